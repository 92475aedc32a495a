"""Masking on the device: which tokens of an example are predicted, and which ids replace them.

Shapes: B rows, S positions, K packed examples per row, M predictions per row, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Bool, Float, Int, UInt32
from bert_jax.config import ObjectiveConfig
from bert_jax.model.dropout import hash_combine
from bert_jax.objectives.mask_groups import find_groups, find_words, group_length_probabilities, position_of_nth

SELECT, REPLACE, RANDOM_TOKEN, GROUP_LENGTH, SAMPLE = range(5)
"""Streams of random bits, as words of `hash_combine`."""

Batch = dict[str, Any]
"""Arrays by name (data/row_reader.py)."""


class Vocabulary(NamedTuple):
    """Properties of a tokenizer that masking needs."""

    size: int
    mask_id: int
    special_ids: tuple[int, ...]
    """Ids that are neither masked nor drawn as random replacements: [PAD] [UNK] [CLS] [SEP] [MASK]."""
    continues_word: bytes = b""
    """One byte per id, 1 if the piece continues the preceding word (`Tokenizer.continues_word.tobytes()`); required
    unless mask_unit is 'token'. Bytes, because jit hashes this tuple as a static argument."""


@functools.lru_cache
def prediction_counts_by_length(
    rate: float, seq_len: int, max_predictions: int | None = None
) -> Int[np.ndarray, "..."]:
    """Number of positions to predict in an example of n tokens, for n = 0 .. seq_len.

    min(max_predictions, max(1, round(rate * n))), where n counts [CLS] and [SEP] (google-research/bert
    create_pretraining_data.py, max_predictions_per_seq); ties round to even. Host and device use this one table.
    """
    counts = np.maximum(1, np.rint(rate * np.arange(seq_len + 1))).astype(np.int32)
    counts[0] = 0
    counts = counts if max_predictions is None else np.minimum(counts, max_predictions)
    counts.flags.writeable = False  # all callers share this array
    return counts


@functools.lru_cache
def predictions_per_row(rate: float, seq_len: int, slots: int, max_predictions: int | None = None) -> int:
    """Maximum number of predictions in a row of `seq_len` tokens: M of `mask_tokens`.

    The count of each packed example is rounded, so a packed row can need more than one example of the same length.
    This is the maximum of the sum of `prediction_counts_by_length` over at most `slots` examples of at least three
    tokens, [CLS] x [SEP], that fit into one row.
    """
    counts = prediction_counts_by_length(rate, seq_len, max_predictions)
    # best[n]: the maximum for n tokens and the number of examples of the loops so far.
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
    counts: Int[Array, " n"] | None = None,
) -> Batch:
    """Choose the positions to predict and replace their tokens, on the device.

    The choice is a function of (key, mask_epoch, example_id, offset in the example, tokens of the example). It does
    not depend on the row that an example is packed into, the batch, the step or the mesh.

    With mask_unit 'token', exactly `prediction_counts_by_length` positions of an example are chosen, or all its
    ordinary tokens if there are fewer; a lower rate chooses a subset of them. With the other units that number is a
    budget. Words are tried in a random order, in which those of an n-gram or span (mask_groups.py) are consecutive, and
    a word that would exceed the budget is skipped (google-research/bert create_pretraining_data.py,
    do_whole_word_mask). So a group that does not fit is split between two words, and words that fit use the rest of the
    budget; if all are too long, nothing is predicted.

    Args:
      batch: input_ids, segment_ids, position_ids [B, S], example_id [B, K] (-1: none), mask_epoch [B].
      key: derived from the run's seed.
      objective: rate, unit, and shares of [MASK], random and unchanged tokens.
      vocabulary: special ids, and ids that continue a word.
      max_predictions: maximum number of predictions per example; None sets no maximum.
      counts: `prediction_counts_by_length` of a lower rate that is not known at compile time; None: of the objective's.

    Returns:
      the batch with input_ids replaced, and target_positions, target_labels [B, M] int32 and
      target_weights [B, M] float32, 1 for each prediction and 0 for unused entries. M is `predictions_per_row`.
    """
    input_ids, segment_ids, unit = batch["input_ids"], batch["segment_ids"], objective.mask_unit
    slots, seq_len = batch["example_id"].shape[1], input_ids.shape[1]
    position_key = position_keys(batch, key)

    counts = prediction_counts_by_length(objective.mask_rate, seq_len, max_predictions) if counts is None else counts
    ordinary = (segment_ids > 0) & ~_is_special(input_ids, vocabulary)
    if unit == "token":
        group_key = position_key
        chosen = _choose_tokens(segment_ids, ordinary, hash_combine(position_key, SELECT), counts)
    else:
        words = find_words(segment_ids, ordinary, _continues_word(input_ids, vocabulary))
        groups = find_groups(words, hash_combine(position_key, GROUP_LENGTH), group_length_probabilities(objective))
        group_key = jnp.take_along_axis(position_key, groups, axis=1)
        taken = _choose_words(segment_ids, words.word_length, hash_combine(group_key, SELECT), counts)
        chosen = ordinary & jnp.take_along_axis(taken, words.word_start, axis=1)
    row_predictions = predictions_per_row(objective.mask_rate, seq_len, slots, max_predictions)
    positions, weights = _gather_chosen(chosen, row_predictions)

    # SpanBERT draws the kind of replacement once per span; Google's BERT and ALBERT draw it per token of a whole word.
    kind_bits = hash_combine(group_key if unit == "span" else position_key, REPLACE)
    replaced = _replace(input_ids, kind_bits, hash_combine(position_key, RANDOM_TOKEN), objective, vocabulary)
    return {
        **batch,
        "input_ids": jnp.where(chosen, replaced, input_ids),
        "target_positions": positions,
        "target_labels": jnp.take_along_axis(input_ids, positions, axis=1),
        "target_weights": weights,
    }


def position_keys(batch: Batch, key: UInt32[Array, ""]) -> UInt32[Array, "B S"]:
    """The key of every position: a function of (key, mask_epoch, example_id, offset in the example)."""
    slot = jnp.maximum(batch["segment_ids"] - 1, 0)
    example_BS = jnp.take_along_axis(batch["example_id"], slot, axis=1)
    return hash_combine(key, batch["mask_epoch"][:, None], example_BS, batch["position_ids"])


def _replace(
    input_ids: Int[Array, "B S"],
    kind_bits: UInt32[Array, "B S"],
    token_bits: UInt32[Array, "B S"],
    objective: ObjectiveConfig,
    vocabulary: Vocabulary,
) -> Int[Array, "B S"]:
    """The replacement of each token, if it is predicted: [MASK], a random ordinary token, or the token itself."""
    is_mask = kind_bits < _threshold(objective.mask_token_share)
    is_random = ~is_mask & (kind_bits < _threshold(objective.mask_token_share + objective.random_token_share))
    ordinary = jnp.asarray(np.setdiff1d(np.arange(vocabulary.size, dtype=np.int32), vocabulary.special_ids))
    random_ids = ordinary[(token_bits % jnp.uint32(ordinary.size)).astype(jnp.int32)]
    return jnp.where(is_mask, vocabulary.mask_id, jnp.where(is_random, random_ids, input_ids))


def _threshold(share: float) -> UInt32[Array, ""]:
    """The share of the range of 32-bit words."""
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


def _precedes(score: UInt32[Array, "B S"]) -> Bool[Array, "B S S"]:
    """[b, i, j]: j precedes i in the order of (score, position).

    Comparing all pairs of a row is cheap compared with a layer and XLA fuses it; sorting is neither.
    """
    return (score[:, None, :] < score[:, :, None]) | (
        (score[:, None, :] == score[:, :, None]) & jnp.tri(score.shape[1], k=-1, dtype=bool)[None]
    )


def _choose_tokens(
    segment_ids: Int[Array, "B S"],
    ordinary: Bool[Array, "B S"],
    score: UInt32[Array, "B S"],
    counts: Int[Array | np.ndarray, "..."],
) -> Bool[Array, "B S"]:
    """The ordinary positions with the lowest scores in each example; `counts` gives their number by length."""
    same_BSS = _same_example(segment_ids)
    rank = (same_BSS & _precedes(score) & ordinary[:, None, :]).sum(-1)
    return ordinary & (rank < jnp.asarray(counts)[same_BSS.sum(-1)])


def _choose_words(
    segment_ids: Int[Array, "B S"],
    length: Int[Array, "B S"],
    score: UInt32[Array, "B S"],
    counts: Int[Array | np.ndarray, "..."],
) -> Bool[Array, "B S"]:
    """The words that a sequential pass in the order of (score, position) takes, skipping those that exceed the budget.

    Candidates of a round are the words that fit into the remaining budget on their own. The round takes all candidates
    before the first one that no longer fits after its predecessors. Skipped words never fit later, because the budget
    only shrinks; so the rounds give the result of the sequential pass. Text needs one to four rounds.

    Args:
      segment_ids: index of the packed example that a position belongs to.
      length: at the first token of a word, its number of tokens; else 0.
      score: at the first token of a word, its rank.
      counts: budget in tokens by length of example.

    Returns:
      true at the first token of each word that is taken.
    """
    same_BSS = _same_example(segment_ids)

    def fits(taken: Bool[Array, "B S"], left: Int[Array, "B S"]) -> Bool[Array, "B S"]:
        return (length > 0) & (length <= left) & ~taken

    def take(taken: Bool[Array, "B S"], left: Int[Array, "B S"]) -> tuple[Bool[Array, "B S"], Int[Array, "B S"]]:
        candidates = fits(taken, left)
        candidate_length = jnp.where(candidates, length, 0)
        before = jnp.where(same_BSS & _precedes(score), candidate_length[:, None, :], 0).sum(-1)
        newly_taken = candidates & (before + length <= left)
        spent = jnp.where(same_BSS, jnp.where(newly_taken, length, 0)[:, None, :], 0).sum(-1)
        return taken | newly_taken, left - spent

    budget = jnp.asarray(counts)[same_BSS.sum(-1)]
    # The first round is outside the loop, because every batch needs it.
    start = take(length < 0, budget)
    return jax.lax.while_loop(lambda state: fits(*state).any(), lambda state: take(*state), start)[0]


def _gather_chosen(chosen: Bool[Array, "B S"], size: int) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Positions of the chosen tokens in ascending order, padded with 0, and weights: 1.0 for each chosen token."""
    weights = jnp.arange(size)[None, :] < chosen.sum(1, keepdims=True)
    positions = jnp.where(weights, position_of_nth(chosen, size), 0)
    return positions, weights.astype(jnp.float32)
