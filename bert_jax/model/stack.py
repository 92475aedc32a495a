"""Apply layers whose parameters are stacked on a leading axis, with one compiled body per distinct plan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Float
from bert_jax.model.layer_plan import LayerPlan, split_prefix_and_scan_body

ApplyLayer = Callable[[Array, Any, Array, LayerPlan, Any], tuple[Array, Any]]
"""(hidden, the layer's parameters, its index, its plan, its edits) -> (hidden, auxiliary outputs)."""


def run_stack(
    apply_layer: ApplyLayer,
    hidden: Float[Array, "B S H"],
    stacked: Any,
    plans: tuple[LayerPlan, ...],
    groups: tuple[int, ...],
    edits: Any,
    unroll: int | None,
) -> tuple[Float[Array, "B S H"], Any]:
    """Apply all layers, bottom first.

    Args:
      apply_layer: applies one layer.
      hidden: input of the first layer.
      stacked: parameters with a leading axis over parameter groups; there may be more than the layers have.
      plans: plan of every layer.
      groups: parameter group of every layer. If each layer has its own, the scan slices the stack;
        shared groups are indexed inside the scan, so that they are never copied L times.
      edits: a tree of arrays with a leading axis over the layers, or over more.
      unroll: periods of the plan per iteration of the scan; None: one.

    Returns:
      the last layer's output, and the auxiliary outputs of all layers, stacked on a leading axis of L.
    """
    is_unshared = len(set(groups)) == len(plans)
    index = jnp.arange(len(plans))
    first = slice(0, len(plans))
    per_layer = (index, _take(stacked, first) if is_unshared else jnp.asarray(groups), _take(edits, first))

    def run_unrolled(hidden, plans, inputs):
        auxiliary = []
        for i, plan in enumerate(plans):
            layer, parameters, layer_edits = _take(inputs, i)
            if not is_unshared:
                parameters = _take(stacked, parameters)
            hidden, aux = apply_layer(hidden, parameters, layer, plan, layer_edits)
            auxiliary.append(aux)
        return hidden, jax.tree.map(lambda *xs: jnp.stack(xs), *auxiliary)

    repetition = split_prefix_and_scan_body(plans)
    start, period = len(repetition.prefix), len(repetition.body)
    prefix_aux = []
    if start:
        hidden, aux = run_unrolled(hidden, repetition.prefix, _take(per_layer, slice(0, start)))
        prefix_aux.append(aux)
    rest = jax.tree.map(lambda x: x[start:].reshape(repetition.repeats, period, *x.shape[1:]), per_layer)
    hidden, aux = jax.lax.scan(
        lambda hidden, inputs: run_unrolled(hidden, repetition.body, inputs),
        hidden,
        rest,
        unroll=min(unroll or 1, repetition.repeats),
    )
    aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
    return hidden, jax.tree.map(lambda *xs: jnp.concatenate(xs), *prefix_aux, aux)


def _take(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)
