"""Losses, and the targets of a causal model. A loss leaves its function as (total, weight); the step divides, once.

Shapes: B rows, S positions, K packed examples per row, M predictions per row, V vocabulary.
"""

from typing import NamedTuple

import jax.numpy as jnp

from bert_jax.config import ModelConfig, ObjectiveConfig
from bert_jax.model.bert import BertModel
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import gather_positions, score_labels
from bert_jax.model.layers import DropoutKey
from bert_jax.objectives.masking import Batch
from bert_jax.shapes import Array, Float, Int


class Sum(NamedTuple):
    """A quantity summed over what was seen, and the count to divide it by once everything is summed."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


TOKEN_TASKS = {"bidirectional": "mlm", "causal": "causal"}
"""Stem of the metrics over tokens, by direction. Two stems: a causal loss is over other tokens than a masked one."""


def next_token_targets(batch: Batch) -> Batch:
    """Targets of a causal model: every token of an example but the last predicts the one after it.

    [SEP] is predicted like any other token; [CLS], which nothing of its example precedes, never is.

    Args:
      batch: input_ids, segment_ids [B, S].

    Returns:
      the batch with target_positions, target_labels [B, S - 1] int32 and target_weights [B, S - 1] float32,
      as masking has them: weight 1 where position and label belong to one example, else 0.
    """
    input_ids, segment_ids = batch["input_ids"], batch["segment_ids"]
    labels = input_ids[:, 1:]
    place = jnp.arange(labels.shape[1], dtype=jnp.int32)
    within = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return {
        **batch,
        "target_positions": jnp.broadcast_to(place[None], labels.shape),
        "target_labels": labels,
        "target_weights": within.astype(jnp.float32),
    }


def loss_weights(batch: Batch, model: ModelConfig, objective: ObjectiveConfig) -> dict[str, Float[Array, ""]]:
    """Weight of each loss term in a batch with targets, known before the model runs."""
    weights = {f"{TOKEN_TASKS[model.direction]}_loss": batch["target_weights"].sum()}
    if objective.pair != "none":
        weights["pair_loss"] = _pair_weights(batch).sum()
    return weights


def pretraining_sums(model: BertModel, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Sum]:
    """Loss and accuracy over the targets, and over labelled pairs if the model has a pair head.

    Named mlm_* (Devlin et al. 2019, 3.1) or, of a causal model, causal_*; and pair_*. `pair_negatives` counts the
    pairs with label 1.
    """
    inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
    output = model.encoder(inputs, dropout_key=dropout_key)
    hidden = gather_positions(output.hidden, batch["target_positions"])
    logits = model.mlm(hidden, model.encoder.embeddings.attend)
    task = TOKEN_TASKS[model.encoder.config.direction]
    sums = _classification(task, logits, batch["target_labels"], batch["target_weights"])
    if model.pair is not None:
        labels = jnp.maximum(batch["pair_labels"], 0)
        weights = _pair_weights(batch)
        sums |= _classification("pair", model.pair(output.pooled), labels, weights)
        sums["pair_negatives"] = Sum((labels * weights).sum(), weights.sum())
    return sums


def _pair_weights(batch: Batch) -> Float[Array, "B K"]:
    """1.0 for each example with a pair label; label -1 says that an example has none."""
    return ((batch["example_id"] >= 0) & (batch["pair_labels"] >= 0)).astype(jnp.float32)


def _classification(
    name: str, logits: Float[Array, "B N C"], labels: Int[Array, "B N"], weights: Float[Array, "B N"]
) -> dict[str, Sum]:
    weight = weights.sum()
    likelihood, right = score_labels(logits, labels)
    return {
        f"{name}_loss": Sum(-(likelihood * weights).sum(), weight),
        f"{name}_accuracy": Sum((right * weights).sum(), weight),
    }
