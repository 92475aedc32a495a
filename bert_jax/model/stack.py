"""Run layers whose parameters are stacked on a leading axis, one compiled body per distinct plan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.layer_plan import LayerPlan, find_repetition
from bert_jax.shapes import Array, Float

ApplyLayer = Callable[[Array, Any, Array, LayerPlan, Array | None], tuple[Array, Any]]
"""(hidden, the layer's parameters, its index, its plan, its head mask) -> (hidden, what to keep)."""


def run_stack(
    apply_layer: ApplyLayer,
    hidden: Float[Array, "B S H"],
    stacked: Any,
    plans: tuple[LayerPlan, ...],
    groups: tuple[int, ...],
    head_mask: Float[Array, "L N"] | None,
    unroll: int,
) -> tuple[Float[Array, "B S H"], Any]:
    """Apply all layers, bottom first.

    Args:
      apply_layer: one layer.
      hidden: input of the first layer.
      stacked: parameters with a leading axis over parameter groups.
      plans: of every layer.
      groups: parameter group of every layer. With a group each, the scan slices the stack as it goes;
        shared groups are looked up, so that they are never copied out L times.
      head_mask: one row per layer, or None.
      unroll: periods of the plan per iteration of the scan.

    Returns:
      the last layer's output, and what the layers kept, stacked on a leading axis of L.
    """
    own_parameters = len(set(groups)) == len(plans)
    index = jnp.arange(len(plans))
    per_layer = (index, stacked if own_parameters else jnp.asarray(groups), head_mask)

    def run_in_turn(hidden, plans, steps):
        kept = []
        for i, plan in enumerate(plans):
            layer, parameters, mask = _take(steps, i)
            if not own_parameters:
                parameters = _take(stacked, parameters)
            hidden, keep = apply_layer(hidden, parameters, layer, plan, mask)
            kept.append(keep)
        return hidden, jax.tree.map(lambda *xs: jnp.stack(xs), *kept)

    repetition = find_repetition(plans)
    start, period = len(repetition.prefix), len(repetition.body)
    alone = []
    if start:
        hidden, kept = run_in_turn(hidden, repetition.prefix, _take(per_layer, slice(0, start)))
        alone.append(kept)
    rest = jax.tree.map(lambda x: x[start:].reshape(repetition.repeats, period, *x.shape[1:]), per_layer)
    hidden, kept = jax.lax.scan(
        lambda hidden, steps: run_in_turn(hidden, repetition.body, steps),
        hidden,
        rest,
        unroll=min(unroll, repetition.repeats),
    )
    kept = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)
    return hidden, jax.tree.map(lambda *xs: jnp.concatenate(xs), *alone, kept)


def _take(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)
