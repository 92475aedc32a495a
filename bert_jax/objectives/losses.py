"""Losses, and the targets of a causal model. A loss is returned as (sum, weight); the training step divides once.

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


class WeightedSum(NamedTuple):
    """A sum over tokens or pairs and its weight; the mean is sum / weight, after both are summed over all devices."""

    sum: Float[Array, ""]
    weight: Float[Array, ""]


TOKEN_METRICS = {"bidirectional": "mlm", "causal": "causal"}
"""Prefix of the metrics over tokens, by direction. They differ, because the losses are over different tokens."""


def add_next_token_targets(batch: Batch) -> Batch:
    """Targets of a causal model: every token of an example except the last predicts its successor.

    [SEP] is predicted like any other token; [CLS] is not predicted, because it is the first token of its example.

    Args:
      batch: input_ids, segment_ids [B, S].

    Returns:
      the batch with target_positions, target_labels [B, S - 1] int32 and target_weights [B, S - 1] float32,
      with the meaning that `mask_tokens` gives them: weight 1 if position and label belong to one example, else 0.
    """
    input_ids, segment_ids = batch["input_ids"], batch["segment_ids"]
    labels = input_ids[:, 1:]
    positions = jnp.arange(labels.shape[1], dtype=jnp.int32)
    same_example = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return {
        **batch,
        "target_positions": jnp.broadcast_to(positions[None], labels.shape),
        "target_labels": labels,
        "target_weights": same_example.astype(jnp.float32),
    }


def loss_weights(batch: Batch, model: ModelConfig, objective: ObjectiveConfig) -> dict[str, Float[Array, ""]]:
    """Weight of each loss term in a batch with targets; it does not depend on the model's output."""
    weights = {f"{TOKEN_METRICS[model.direction]}_loss": batch["target_weights"].sum()}
    if objective.pair != "none":
        weights["pair_loss"] = _pair_weights(batch).sum()
    return weights


def pretraining_sums(model: BertModel, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
    """Loss and accuracy over the targets, and over labelled pairs if the model has a pair head.

    The names are mlm_* (Devlin et al. 2019, section 3.1) or causal_* for a causal model, and pair_*. `pair_negatives`
    counts the pairs with label 1.
    """
    inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
    output = model.encoder(inputs, dropout_key=dropout_key)
    hidden = gather_positions(output.hidden, batch["target_positions"])
    logits = model.mlm(hidden, model.encoder.embeddings.attend)
    prefix = TOKEN_METRICS[model.encoder.config.direction]
    sums = _classification(prefix, logits, batch["target_labels"], batch["target_weights"])
    if model.pair is not None:
        labels = jnp.maximum(batch["pair_labels"], 0)
        weights = _pair_weights(batch)
        sums |= _classification("pair", model.pair(output.pooled), labels, weights)
        sums["pair_negatives"] = WeightedSum((labels * weights).sum(), weights.sum())
    return sums


def _pair_weights(batch: Batch) -> Float[Array, "B K"]:
    """1.0 for each example with a pair label; label -1 marks an example without one."""
    return ((batch["example_id"] >= 0) & (batch["pair_labels"] >= 0)).astype(jnp.float32)


def _classification(
    prefix: str, logits: Float[Array, "B n c"], labels: Int[Array, "B n"], weights: Float[Array, "B n"]
) -> dict[str, WeightedSum]:
    weight = weights.sum()
    likelihood, correct = score_labels(logits, labels)
    return {
        f"{prefix}_loss": WeightedSum(-(likelihood * weights).sum(), weight),
        f"{prefix}_accuracy": WeightedSum((correct * weights).sum(), weight),
    }
