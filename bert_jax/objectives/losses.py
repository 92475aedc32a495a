"""The protocol of an objective, and its sums. A loss is returned as (sum, weight); the training step divides once.

Shapes: B rows, S positions, K packed examples per row, M predictions per row, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from bert_jax.array_types import Array, Float, Int
from bert_jax.config import Config, ModelConfig, ObjectiveConfig
from bert_jax.model.bert import BertModel
from bert_jax.model.encoder import EncoderOutput
from bert_jax.model.heads import label_log_likelihoods
from bert_jax.objectives.masking import Batch

Z_LOSS = "z_loss"


class WeightedSum(NamedTuple):
    """A sum over tokens or pairs and its weight; the mean is sum / weight, after both are summed over all devices."""

    sum: Float[Array, "..."]
    """A scalar, but for new values of parameters (`Task.sums`) and for histograms, from which a metric is derived
    (training/eval_metrics.py)."""
    weight: Float[Array, ""]


class Objective(NamedTuple):
    """A term of the pretraining loss: a module of this package with `OBJECTIVE`, and a line in `objectives.OBJECTIVES`.

    Its metrics are ``NAME_loss``, ``NAME_accuracy`` and so on, with its name in the table.
    """

    is_active: Callable[[ModelConfig, ObjectiveConfig], bool]
    """Whether a run has this term."""
    weight: Callable[[Batch], Float[Array, ""]]
    """Weight of the term in prepared rows; it does not depend on the model's output."""
    sums: Callable[[str, BertModel, EncoderOutput, Batch], dict[str, WeightedSum]]
    """Sums over prepared rows, from the objective's name, the model and the encoder's output at the positions of the
    targets."""
    prepare: Callable[..., Batch] = lambda batch, *rest: batch
    """Adds targets to a batch, on the device: (batch, Config, phase, Vocabulary, seed, mask_counts); the last two: see
    `Task.prepare`."""
    loss_weight: Callable[[ObjectiveConfig], float] = lambda objective: 1.0
    """Factor of the term's mean in the loss."""
    of_generator: bool = False
    """Whether its model is the generator of replaced-token detection."""
    heads: Callable[[ModelConfig], Mapping[str, Any]] = lambda model: {}
    """Fields of `Heads` that the model needs."""
    predicts_tokens: bool = False
    """Whether it predicts tokens of the vocabulary: then the exponential of its loss is a perplexity."""
    predictions: Callable[[Config, int], int] = lambda config, phase: 0
    """Positions of a row of a phase that the MLM head predicts, for the count of FLOPs."""


def mlm_head_sums(name: str, model: BertModel, output: EncoderOutput, batch: Batch) -> dict[str, WeightedSum]:
    """Loss, accuracy and z-loss of the MLM head over the targets, whose positions are those of the output.

    The z-loss is the mean of the squared log-partition (Chowdhery et al. 2022, section 5).
    """
    table, weights = model.encoder.embeddings.decoder_table(), batch["target_weights"]
    scores = model.mlm.label_scores(output.hidden, table, batch["target_labels"])
    squares = WeightedSum((jnp.square(scores.log_partition) * weights).sum(), weights.sum())
    return _label_sums(name, scores.likelihood, scores.correct, weights) | {f"{name}_{Z_LOSS}": squares}


def classification(
    name: str, logits: Float[Array, "B n c"], labels: Int[Array, "B n"], weights: Float[Array, "B n"]
) -> dict[str, WeightedSum]:
    """Cross-entropy and accuracy of weighted labels."""
    return _label_sums(name, *label_log_likelihoods(logits, labels), weights)


def _label_sums(name, likelihood, correct, weights):
    weight = weights.sum()
    return {
        f"{name}_loss": WeightedSum(-(likelihood * weights).sum(), weight),
        f"{name}_accuracy": WeightedSum((correct * weights).sum(), weight),
    }
