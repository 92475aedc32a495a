"""Masking and losses. Every loss leaves its function as (total, weight); the one division happens in the step.

Shapes: B rows, S positions, K packed examples per row, M predictions per row, V vocabulary.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bert_jax.config import ObjectiveConfig
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import gather_positions, score_labels
from bert_jax.model.layers import Noise, fold
from bert_jax.model.pretraining import PretrainingModel
from bert_jax.shapes import Array, Bool, Float, Int, UInt32

SELECT, REPLACE, DRAW = range(3)

Batch = dict[str, Any]
"""Arrays by name; see ARCHITECTURE, "A batch"."""


class Sum(NamedTuple):
    """A quantity summed over what was seen, and the count to divide it by once everything is summed."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


class Vocabulary(NamedTuple):
    """What masking must know of a tokenizer."""

    size: int
    mask_id: int
    special_ids: tuple[int, ...]
    """Never masked and never drawn as a random replacement: [PAD] [UNK] [CLS] [SEP] [MASK]."""


def prediction_counts(rate: float, seq_len: int) -> Int[np.ndarray, "..."]:
    """How many positions to predict in an example of n tokens, for n = 0 .. seq_len.

    max(1, round(rate * n)), n counting [CLS] and [SEP] (google-research/bert create_pretraining_data.py);
    ties go to the even neighbour. Host and device read this one table of integers.
    """
    counts = np.array([max(1, round(rate * n)) for n in range(seq_len + 1)], np.int32)
    counts[0] = 0
    return counts


def mask_tokens(batch: Batch, key: UInt32[Array, ""], objective: ObjectiveConfig, vocabulary: Vocabulary) -> Batch:
    """Choose the positions to predict and hide their tokens, on the device.

    The choice is a function of (key, mask_epoch, example_id, offset inside the example) and nothing else:
    not of the row an example is packed into, the batch, the step or the mesh. Exactly `prediction_counts`
    positions of an example are chosen, or all its ordinary tokens if there are fewer.

    Args:
      batch: input_ids, segment_ids, position_ids [B, S], example_id [B, K] (-1: none), mask_epoch [B].
      key: of the run's seed.
      objective: rate and shares of [MASK], random and unchanged tokens.
      vocabulary: which ids are special.

    Returns:
      the batch with input_ids replaced, and masked_positions, masked_labels [B, M] int32 and
      masked_weights [B, M] float32, 1 for each prediction and 0 for the unused tail. M is the count for a
      full row.
    """
    input_ids, segment_ids = batch["input_ids"], batch["segment_ids"]
    seq_len = input_ids.shape[1]
    counts = prediction_counts(objective.mask_rate, seq_len)
    slot = jnp.maximum(segment_ids - 1, 0)
    example_BS = jnp.take_along_axis(batch["example_id"], slot, axis=1)
    place = fold(key, batch["mask_epoch"][:, None], example_BS, batch["position_ids"])

    chosen = _choose(segment_ids, ~_is_special(input_ids, vocabulary), fold(place, SELECT), counts)
    positions, weights = _gather_chosen(chosen, int(counts[-1]))
    labels = jnp.take_along_axis(input_ids, positions, axis=1)

    lottery = fold(place, REPLACE)
    shows_mask = lottery < _share(objective.mask_token_share)
    shows_random = ~shows_mask & (lottery < _share(objective.mask_token_share + objective.random_token_share))
    ordinary = jnp.asarray(np.setdiff1d(np.arange(vocabulary.size, dtype=np.int32), vocabulary.special_ids))
    drawn = ordinary[(fold(place, DRAW) % jnp.uint32(ordinary.size)).astype(jnp.int32)]
    shown = jnp.where(shows_mask, vocabulary.mask_id, jnp.where(shows_random, drawn, input_ids))
    return {
        **batch,
        "input_ids": jnp.where(chosen, shown, input_ids),
        "masked_positions": positions,
        "masked_labels": labels,
        "masked_weights": weights,
    }


def _share(share: float) -> UInt32[Array, ""]:
    return jnp.uint32(min(round(share * 2**32), 2**32 - 1))


def _is_special(ids: Int[Array, "B S"], vocabulary: Vocabulary) -> Bool[Array, "B S"]:
    special = jnp.asarray(vocabulary.special_ids, ids.dtype)
    return (ids[:, :, None] == special[None, None, :]).any(-1)


def _choose(
    segment_ids: Int[Array, "B S"],
    eligible: Bool[Array, "B S"],
    score: UInt32[Array, "B S"],
    counts: Int[np.ndarray, "..."],
) -> Bool[Array, "B S"]:
    """The positions with the lowest scores in each example, as many as `counts` says for its length.

    Comparing all pairs of a row is a small, fusable reduction next to a layer; sorting would be neither.
    """
    eligible &= segment_ids > 0
    same_BSS = segment_ids[:, :, None] == segment_ids[:, None, :]
    earlier_BSS = (score[:, None, :] < score[:, :, None]) | (
        (score[:, None, :] == score[:, :, None]) & jnp.tri(score.shape[1], k=-1, dtype=bool)[None]
    )
    rank = (same_BSS & earlier_BSS & eligible[:, None, :]).sum(-1)
    length = same_BSS.sum(-1)
    return eligible & (rank < jnp.asarray(counts)[length])


def _gather_chosen(chosen: Bool[Array, "B S"], size: int) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Positions of the chosen tokens in order, padded with 0, and 1.0 for each real one."""
    batch, seq_len = chosen.shape
    slot = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, size)
    row = jnp.broadcast_to(jnp.arange(batch)[:, None], chosen.shape)
    place = jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32)[None], chosen.shape)
    positions = jnp.zeros((batch, size), jnp.int32).at[row, slot].set(place, mode="drop")
    weights = jnp.arange(size)[None, :] < chosen.sum(1, keepdims=True)
    return positions, weights.astype(jnp.float32)


def loss_weights(batch: Batch, objective: ObjectiveConfig) -> dict[str, Float[Array, ""]]:
    """Weight of each loss term in a masked batch, known before the model runs."""
    weights = {"mlm_loss": batch["masked_weights"].sum()}
    if objective.pair != "none":
        weights["pair_loss"] = (batch["example_id"] >= 0).sum().astype(jnp.float32)
    return weights


def pretraining_sums(model: PretrainingModel, batch: Batch, noise: Noise | None) -> dict[str, Sum]:
    """MLM and, if the model has a pair head, pair loss and accuracy of a masked batch (Devlin et al. 2019, 3.1)."""
    inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
    output = model.encoder(inputs, noise=noise)
    hidden = gather_positions(output.hidden, batch["masked_positions"])
    logits = model.mlm(hidden, model.encoder.embeddings.attend)
    sums = _classification("mlm", logits, batch["masked_labels"], batch["masked_weights"])
    if model.pair is not None:
        exists = (batch["example_id"] >= 0).astype(jnp.float32)
        sums |= _classification("pair", model.pair(output.pooled), batch["pair_labels"], exists)
    return sums


def _classification(
    name: str, logits: Float[Array, "B N C"], labels: Int[Array, "B N"], weights: Float[Array, "B N"]
) -> dict[str, Sum]:
    weight = weights.sum()
    likelihood, right = score_labels(logits, labels)
    return {
        f"{name}_loss": Sum(-(likelihood * weights).sum(), weight),
        f"{name}_accuracy": Sum((right * weights).sum(), weight),
    }
