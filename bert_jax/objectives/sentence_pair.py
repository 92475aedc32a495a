"""Sentence pairs: next-sentence prediction or sentence order, from the pooled [CLS] of each example."""

import jax.numpy as jnp

from bert_jax.array_types import Array, Float
from bert_jax.model.bert import BertModel
from bert_jax.model.encoder import EncoderOutput
from bert_jax.objectives.losses import Objective, WeightedSum, classification
from bert_jax.objectives.masking import Batch


def sums(name: str, model: BertModel, output: EncoderOutput, batch: Batch) -> dict[str, WeightedSum]:
    """Loss and accuracy over labelled pairs. `pair_negatives` counts the pairs with label 1."""
    labels, weights = jnp.maximum(batch["pair_labels"], 0), _weights(batch)
    found = classification(name, model.pair(output.pooled), labels, weights)
    return found | {f"{name}_negatives": WeightedSum((labels * weights).sum(), weights.sum())}


def _weights(batch: Batch) -> Float[Array, "B K"]:
    """1.0 for each example with a pair label; label -1 marks an example without one."""
    return ((batch["example_id"] >= 0) & (batch["pair_labels"] >= 0)).astype(jnp.float32)


OBJECTIVE = Objective(
    is_active=lambda model, objective: objective.pair != "none",
    weight=lambda batch: _weights(batch).sum(),
    sums=sums,
    heads=lambda model: {"pair": True},
)
