"""Masking on the device: which tokens of an example are predicted, and what is shown in their place.

Shapes: B rows, S positions, K packed examples per row, M predictions per row, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ObjectiveConfig
from bert_jax.model.layers import hash_combine
from bert_jax.objectives.mask_groups import find_groups, find_words, group_lengths
from bert_jax.shapes import Array, Bool, Float, Int, UInt32

SELECT, REPLACE, DRAW, LENGTH = range(4)

Batch = dict[str, Any]
"""Arrays by name; see ARCHITECTURE, "A batch"."""


class Vocabulary(NamedTuple):
    """What masking must know of a tokenizer."""

    size: int
    mask_id: int
    special_ids: tuple[int, ...]
    """Never masked and never drawn as a random replacement: [PAD] [UNK] [CLS] [SEP] [MASK]."""
    continues_word: bytes = b""
    """One byte per id, 1 if the piece continues the word before it (`Tokenizer.continues_word.tobytes()`); only
    mask_unit 'token' can do without. Bytes, because this tuple is hashed as a part of the compiled program."""


@functools.lru_cache
def prediction_counts(rate: float, seq_len: int, most: int | None = None) -> Int[np.ndarray, "..."]:
    """How many positions to predict in an example of n tokens, for n = 0 .. seq_len.

    min(most, max(1, round(rate * n))), n counting [CLS] and [SEP] (google-research/bert create_pretraining_data.py,
    max_predictions_per_seq); ties go to the even neighbour. Host and device read this one table of integers.
    """
    counts = np.array([max(1, round(rate * n)) for n in range(seq_len + 1)], np.int32)
    counts[0] = 0
    counts = counts if most is None else np.minimum(counts, most)
    counts.flags.writeable = False  # every caller gets this one
    return counts


@functools.lru_cache
def predictions_per_row(rate: float, seq_len: int, slots: int, most: int | None = None) -> int:
    """The most predictions that a row of `seq_len` tokens can need: the M of `mask_tokens`.

    Each packed example rounds for itself, so a packed row can need more than one example of the same length. This
    is the maximum of the sum of `prediction_counts` over at most `slots` examples of at least three tokens, [CLS]
    x [SEP], that fit into the row together.
    """
    counts = prediction_counts(rate, seq_len, most)
    # best[n]: for n tokens and as many examples as were added so far.
    best = np.zeros(seq_len + 1, np.int32)
    for _ in range(min(slots, max(1, seq_len // 3))):
        longer = best.copy()
        for length in range(min(3, seq_len), seq_len + 1):
            longer[length:] = np.maximum(longer[length:], counts[length] + best[: seq_len + 1 - length])
        best = longer
    return int(best[-1])


def mask_tokens(
    batch: Batch,
    key: UInt32[Array, ""],
    objective: ObjectiveConfig,
    vocabulary: Vocabulary,
    max_predictions: int | None = None,
) -> Batch:
    """Choose the positions to predict and hide their tokens, on the device.

    The choice is a function of (key, mask_epoch, example_id, offset inside the example, the example's tokens) and
    nothing else: not of the row an example is packed into, the batch, the step or the mesh.

    With mask_unit 'token', exactly `prediction_counts` positions of an example are chosen, or all its ordinary
    tokens if there are fewer. With the other units that is a budget. Words are tried in a random order, in which
    those of an n-gram or span (mask_groups.py) follow one another, and a word is skipped if it would exceed the budget
    (google-research/bert create_pretraining_data.py, do_whole_word_mask). So a group that does not fit is cut
    between two words, and words that fit fill what is left; if all are too long, nothing is predicted.

    Args:
      batch: input_ids, segment_ids, position_ids [B, S], example_id [B, K] (-1: none), mask_epoch [B].
      key: of the run's seed.
      objective: rate, unit, and shares of [MASK], random and unchanged tokens.
      vocabulary: which ids are special, and which continue a word.
      max_predictions: at most so many positions of an example are chosen; None sets no bound.

    Returns:
      the batch with input_ids replaced, and target_positions, target_labels [B, M] int32 and
      target_weights [B, M] float32, 1 for each prediction and 0 for the unused tail. M is `predictions_per_row`.
    """
    input_ids, segment_ids, unit = batch["input_ids"], batch["segment_ids"], objective.mask_unit
    slots, seq_len = batch["example_id"].shape[1], input_ids.shape[1]
    slot = jnp.maximum(segment_ids - 1, 0)
    example_BS = jnp.take_along_axis(batch["example_id"], slot, axis=1)
    place = hash_combine(key, batch["mask_epoch"][:, None], example_BS, batch["position_ids"])

    counts = prediction_counts(objective.mask_rate, seq_len, max_predictions)
    ordinary = (segment_ids > 0) & ~_is_special(input_ids, vocabulary)
    if unit == "token":
        group_place = place
        chosen = _choose_tokens(segment_ids, ordinary, hash_combine(place, SELECT), counts)
    else:
        words = find_words(segment_ids, ordinary, _continues_word(input_ids, vocabulary))
        groups = find_groups(words, hash_combine(place, LENGTH), group_lengths(objective))
        group_place = jnp.take_along_axis(place, groups, axis=1)
        taken = _choose_words(segment_ids, words.size, hash_combine(group_place, SELECT), counts)
        chosen = ordinary & jnp.take_along_axis(taken, words.first, axis=1)
    most = predictions_per_row(objective.mask_rate, seq_len, slots, max_predictions)
    positions, weights = _gather_chosen(chosen, most)

    # SpanBERT decides once for a span; Google's BERT and ALBERT decide for each token, in whole words too.
    lottery = hash_combine(group_place if unit == "span" else place, REPLACE)
    shown = _replace(input_ids, lottery, hash_combine(place, DRAW), objective, vocabulary)
    return {
        **batch,
        "input_ids": jnp.where(chosen, shown, input_ids),
        "target_positions": positions,
        "target_labels": jnp.take_along_axis(input_ids, positions, axis=1),
        "target_weights": weights,
    }


def _replace(
    input_ids: Int[Array, "B S"],
    lottery: UInt32[Array, "B S"],
    dice: UInt32[Array, "B S"],
    objective: ObjectiveConfig,
    vocabulary: Vocabulary,
) -> Int[Array, "B S"]:
    """What each token would show if it were predicted."""
    shows_mask = lottery < _share(objective.mask_token_share)
    shows_random = ~shows_mask & (lottery < _share(objective.mask_token_share + objective.random_token_share))
    ordinary = jnp.asarray(np.setdiff1d(np.arange(vocabulary.size, dtype=np.int32), vocabulary.special_ids))
    drawn = ordinary[(dice % jnp.uint32(ordinary.size)).astype(jnp.int32)]
    return jnp.where(shows_mask, vocabulary.mask_id, jnp.where(shows_random, drawn, input_ids))


def _share(share: float) -> UInt32[Array, ""]:
    return jnp.uint32(min(round(share * 2**32), 2**32 - 1))


def _is_special(ids: Int[Array, "B S"], vocabulary: Vocabulary) -> Bool[Array, "B S"]:
    special = jnp.asarray(vocabulary.special_ids, ids.dtype)
    return (ids[:, :, None] == special[None, None, :]).any(-1)


def _continues_word(ids: Int[Array, "B S"], vocabulary: Vocabulary) -> Bool[Array, "B S"]:
    table = np.frombuffer(vocabulary.continues_word, bool)
    assert len(table) == vocabulary.size, (
        f"masking whole words needs Vocabulary.continues_word, one byte for each of {vocabulary.size} ids: "
        f"it has {len(table)}"
    )
    return jnp.asarray(table)[ids]


def _same_example(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    return segment_ids[:, :, None] == segment_ids[:, None, :]


def _earlier(score: UInt32[Array, "B S"]) -> Bool[Array, "B S S"]:
    """[b, i, j]: j comes before i in the order of (score, position).

    Comparing all pairs of a row is a small, fusable reduction next to a layer; sorting would be neither.
    """
    return (score[:, None, :] < score[:, :, None]) | (
        (score[:, None, :] == score[:, :, None]) & jnp.tri(score.shape[1], k=-1, dtype=bool)[None]
    )


def _choose_tokens(
    segment_ids: Int[Array, "B S"],
    ordinary: Bool[Array, "B S"],
    score: UInt32[Array, "B S"],
    counts: Int[np.ndarray, "..."],
) -> Bool[Array, "B S"]:
    """The ordinary positions with the lowest scores in each example, as many as `counts` says for its length."""
    same_BSS = _same_example(segment_ids)
    rank = (same_BSS & _earlier(score) & ordinary[:, None, :]).sum(-1)
    return ordinary & (rank < jnp.asarray(counts)[same_BSS.sum(-1)])


def _choose_words(
    segment_ids: Int[Array, "B S"],
    size: Int[Array, "B S"],
    score: UInt32[Array, "B S"],
    counts: Int[np.ndarray, "..."],
) -> Bool[Array, "B S"]:
    """The words that a pass in the order of (score, position) takes, skipping those that exceed the budget.

    A round takes, of the words that still fit by themselves, all up to the first that would not fit after those
    before it. That one is then too long for good, as are all that were left out before: budgets only shrink. So
    rounds end where the sequential pass ends: after one to four in examples with words like those of text.

    Args:
      segment_ids: which example a position belongs to.
      size: tokens of the word that begins here, else 0.
      score: rank of the word that begins here.
      counts: budget in tokens by length of example.

    Returns:
      true where a word begins that is taken.
    """
    same_BSS = _same_example(segment_ids)

    def fits(taken: Bool[Array, "B S"], left: Int[Array, "B S"]) -> Bool[Array, "B S"]:
        return (size > 0) & (size <= left) & ~taken

    def take(taken: Bool[Array, "B S"], left: Int[Array, "B S"]) -> tuple[Bool[Array, "B S"], Int[Array, "B S"]]:
        candidates = fits(taken, left)
        waiting = jnp.where(candidates, size, 0)
        before = jnp.where(same_BSS & _earlier(score), waiting[:, None, :], 0).sum(-1)
        fresh = candidates & (before + size <= left)
        spent = jnp.where(same_BSS, jnp.where(fresh, size, 0)[:, None, :], 0).sum(-1)
        return taken | fresh, left - spent

    budget = jnp.asarray(counts)[same_BSS.sum(-1)]
    # The first round stands outside: every batch needs it.
    start = take(size < 0, budget)
    return jax.lax.while_loop(lambda state: fits(*state).any(), lambda state: take(*state), start)[0]


def _gather_chosen(chosen: Bool[Array, "B S"], size: int) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Positions of the chosen tokens in order, padded with 0, and 1.0 for each real one."""
    batch, seq_len = chosen.shape
    slot = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, size)
    row = jnp.broadcast_to(jnp.arange(batch)[:, None], chosen.shape)
    place = jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32)[None], chosen.shape)
    positions = jnp.zeros((batch, size), jnp.int32).at[row, slot].set(place, mode="drop")
    weights = jnp.arange(size)[None, :] < chosen.sum(1, keepdims=True)
    return positions, weights.astype(jnp.float32)
