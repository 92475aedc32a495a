"""Losses of examples under masks of heads and feed-forward units, and their derivatives by the masks.

A mask is a factor of what each head sends to the output projection, or of each unit's activation: 1 keeps the head or
unit, 0 removes it (Michel et al. 2019, arXiv:1905.10650, equation 1). Shapes: L layers, n heads or units, E examples,
B rows of a batch, M labels of a row, C classes.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Bool, Float
from bert_jax.finetune.finetuning_task import span_log_likelihoods
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import analysis_config, compute
from bert_jax.model.activations import SITES, Edit
from bert_jax.model.heads import label_log_likelihoods

CONTEXT, ACTIVATIONS = "attention.context", "feed_forward.activations"
"""The sites that masks are factors of: those of heads and of units."""
MASKED_AXES = {CONTEXT: "N", ACTIVATIONS: "F"}
Masks = Mapping[str, Float[np.ndarray, "L n"] | Bool[np.ndarray, "L n"]]
"""Factors by site, CONTEXT or ACTIVATIONS."""


class ExampleBatch(NamedTuple):
    """Rows with labels; one example per row."""

    inputs: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Input ids, token types and attention mask, int32 [B, S]."""
    positions: np.ndarray | None
    """int32 [B, M], where the MLM head is applied; None for a task head."""
    labels: np.ndarray
    """int32 [B, M], -1 where there is none; of regressions float32 [B, 1], NaN where there is none; of spans
    int32 [B, 1, 2]."""
    indices: np.ndarray
    """int64 [B]: the example of each row; -1 for rows that only fill the batch, which have no label."""


class Examples(NamedTuple):
    """Examples of a loss."""

    kind: str
    """``mlm``, or the kind of the task head."""
    batches: list[ExampleBatch]
    count: int
    """Number of examples, E."""
    lengths: np.ndarray
    """Tokens of each example, int64 [E]."""
    score: Callable[[list[np.ndarray]], float] | None
    """From the logits of every example, [1, C] or [tokens, C], to the score of the task; None: the score is the share
    of labels with the highest logit."""


class RowLosses(NamedTuple):
    """Of the rows of a batch."""

    sums: Float[Array, " B"]
    """Sum of the losses of a row's labels: cross-entropies in nats, or squared errors."""
    weights: Float[Array, " B"]
    """Number of labels."""
    correct: Float[Array, " B"]
    """Number of labels with the highest logit."""
    logits: Float[Array, "B n C"] | None
    """Of the task head; None for the MLM head."""


class Evaluation(NamedTuple):
    """The losses of examples under masks."""

    sums: np.ndarray
    """[E], as of `RowLosses`."""
    weights: np.ndarray
    """[E]."""
    score: float
    """Of the task, or accuracy at masked tokens."""

    @property
    def loss(self) -> float:
        """Mean over all labels."""
        return float(self.sums.sum() / self.weights.sum())


def evaluate(model: LoadedModel, examples: Examples, masks: Masks) -> Evaluation:
    """Losses and score under masks, without dropout."""
    factors = _to_factors(masks)
    sums, weights, correct = (np.zeros(examples.count) for _ in range(3))
    logits: list[np.ndarray] = [np.zeros((0, 0))] * examples.count
    config = analysis_config(model.config, list(masks))
    for batch in examples.batches:
        found = jax.device_get(_losses(config, model.heads, examples.kind, model.params, _traced(batch), factors))
        for b, index in enumerate(batch.indices):
            if index < 0:
                continue
            sums[index], weights[index], correct[index] = found.sums[b], found.weights[b], found.correct[b]
            if found.logits is not None:
                logits[index] = found.logits[b, : examples.lengths[index]]  # [1, C] stays as it is
    score = correct.sum() / weights.sum() if examples.score is None else examples.score(logits)
    return Evaluation(sums, weights, float(score))


def mask_derivatives(model: LoadedModel, examples: Examples, masks: Masks) -> dict[str, Float[np.ndarray, "E L n"]]:
    """Derivatives of each example's loss by a factor of each head's context or unit's activation, at 1, under masks.

    The loss of an example is the mean over its labels.

    Returns:
      derivatives by site, for the sites of the masks.
    """
    factors, config = _to_factors(masks), analysis_config(model.config, list(masks))
    found = {site: np.zeros((examples.count, *mask.shape), np.float32) for site, mask in masks.items()}
    for batch in examples.batches:
        by_site = _derivatives(config, model.heads, examples.kind, model.params, _traced(batch), factors)
        used = batch.indices >= 0
        for site, by_row in by_site.items():
            found[site][batch.indices[used]] = np.moveaxis(np.asarray(by_row), 1, 0)[used]
    return found


def mask_edits(masks: Masks) -> dict[str, Edit]:
    """The edits of the encoder that apply masks."""
    return {site: Edit(factor=factor) for site, factor in _to_factors(masks).items()}


def _to_factors(masks: Masks) -> dict[str, np.ndarray]:
    return {site: np.asarray(mask, np.float32).reshape(_shape(site, *mask.shape)) for site, mask in masks.items()}


def _shape(site: str, layers: int, size: int, rows: int = 1) -> list[int]:
    """Of a factor that is the same for all positions."""
    sizes = {"B": rows, MASKED_AXES[site]: size}
    return [layers, *(sizes.get(axis, 1) for axis in SITES[site].split())]


def _traced(batch: ExampleBatch) -> tuple:
    return batch.inputs, batch.positions, batch.labels


def _forward(config, heads, kind, params, batch, factors) -> RowLosses:
    inputs, positions, labels = batch
    name = "mlm_logits" if kind == "mlm" else "task_logits"
    edits = {site: Edit(factor=factor) for site, factor in factors.items()}
    logits = compute(config, heads, (), (name,), params, inputs, edits, positions)[name]
    is_regression = jnp.issubdtype(labels.dtype, jnp.floating)
    first = labels[..., 0] if kind == "span" else labels
    weights = (~jnp.isnan(first) if is_regression else first >= 0).astype(jnp.float32)
    if is_regression:
        losses, correct = jnp.square(logits[..., 0] - jnp.nan_to_num(labels)), jnp.zeros_like(weights)
    elif kind == "span":
        cls_positions = jnp.zeros((len(labels), 1), jnp.int32)
        likelihoods, correct = span_log_likelihoods(logits, inputs[2], cls_positions, labels)
        losses = -likelihoods
    else:
        likelihoods, correct = label_log_likelihoods(logits, jnp.maximum(labels, 0))
        losses = -likelihoods
    sums = ((one * weights).sum(1) for one in (losses, jnp.ones_like(weights), correct))
    return RowLosses(*sums, None if kind == "mlm" else logits)


_losses = functools.partial(jax.jit, static_argnums=(0, 1, 2))(_forward)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _derivatives(config, heads, kind, params, batch, factors) -> dict[str, Float[Array, "L B n"]]:
    def total(xi):
        found = _forward(config, heads, kind, params, batch, {site: factors[site] * one for site, one in xi.items()})
        return (found.sums / jnp.maximum(found.weights, 1)).sum()

    layers, rows = len(next(iter(factors.values()))), len(batch[0][0])
    sizes = {site: math.prod(factor.shape[1:]) for site, factor in factors.items()}
    ones = {site: jnp.ones(_shape(site, layers, size, rows)) for site, size in sizes.items()}
    return {site: found.reshape(layers, rows, sizes[site]) for site, found in jax.grad(total)(ones).items()}
