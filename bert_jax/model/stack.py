"""Apply layers whose parameters are stacked on a leading axis, with one compiled body per distinct plan."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Float
from bert_jax.model.layer_plan import LayerPlan, split_prefix_and_scan_body

ApplyLayer = Callable[[Array, Any, Array, LayerPlan, Any], tuple[Array, Any]]
"""(hidden, the layer's parameters, its index, its plan, its edits) -> (hidden, auxiliary outputs)."""
SMALL = 2**16
"""Gradients of fewer elements are stacked by one kernel, as each kernel takes longer to start than to write them."""


def run_stack(
    apply_layer: ApplyLayer,
    hidden: Float[Array, "B S H"],
    stacked: Any,
    plans: tuple[LayerPlan, ...],
    groups: tuple[int, ...],
    edits: Any,
    unroll: int | None,
    apply_last: ApplyLayer | None = None,
    gradient_types: Sequence[str] | None = None,
) -> tuple[Float[Array, "B n H"], Any]:
    """Apply all layers, bottom first.

    Args:
      apply_layer: applies one layer.
      hidden: input of the first layer.
      stacked: parameters with a leading axis over parameter groups; there may be more than the layers have.
      plans: plan of every layer.
      groups: parameter group of every layer. If each layer has its own, the scan slices the stack;
        shared groups are indexed inside the scan, so that they are never copied L times.
      edits: a tree of arrays with a leading axis over the layers, or over more.
      unroll: periods of the plan per iteration of the scan; None: one. There is no scan if one iteration has them all.
      apply_last: applies the last layer in place of `apply_layer`; its auxiliary outputs are not returned.
      gradient_types: as of `split_layers`; None: those of the parameters.

    Returns:
      the last layer's output, and the auxiliary outputs of all layers, stacked on a leading axis of L.
    """
    whole = len(plans) - (apply_last is not None)
    repeats = split_prefix_and_scan_body(plans[:whole]).repeats
    if (unroll or 1) >= repeats:
        types = gradient_types or [str(x.dtype) for x in jax.tree.leaves(stacked)]
        take_parameters = split_layers(tuple(types), stacked).__getitem__
        per_layer = [(jnp.int32(i), take_parameters(groups[i]), _take(edits, i)) for i in range(whole)]
        hidden, auxiliary = _run_layers(apply_layer, hidden, plans[:whole], per_layer)
    else:
        take_parameters = functools.partial(_take, stacked)
        hidden, auxiliary = _scan_layers(apply_layer, hidden, stacked, plans[:whole], groups[:whole], edits, unroll)
    if apply_last is not None:
        parameters = take_parameters(groups[-1])
        hidden, _ = apply_last(hidden, parameters, jnp.int32(whole), plans[-1], _take(edits, whole))
    return hidden, auxiliary


def _run_layers(apply_layer, hidden, plans, per_layer):
    """Apply layers one after another; `per_layer` has (index, parameters, edits) of each."""
    auxiliary = []
    for plan, (layer, parameters, edits) in zip(plans, per_layer, strict=True):
        hidden, aux = apply_layer(hidden, parameters, layer, plan, edits)
        auxiliary.append(aux)
    return hidden, jax.tree.map(lambda *xs: jnp.stack(xs), *auxiliary)


def _scan_layers(apply_layer, hidden, stacked, plans, groups, edits, unroll):
    """`run_stack` of whole layers with a loop."""
    is_unshared = len(set(groups)) == len(plans)
    first = slice(0, len(plans))
    parameters = _take(stacked, first) if is_unshared else jnp.asarray(groups)
    all_layers = jnp.arange(len(plans)), parameters, _take(edits, first)

    def run_unrolled(hidden, plans, inputs):
        per_layer = []
        for i in range(len(plans)):
            layer, parameters, layer_edits = _take(inputs, i)
            per_layer.append((layer, parameters if is_unshared else _take(stacked, parameters), layer_edits))
        return _run_layers(apply_layer, hidden, plans, per_layer)

    repetition = split_prefix_and_scan_body(plans)
    start, period = len(repetition.prefix), len(repetition.body)
    prefix_aux = []
    if start:
        hidden, aux = run_unrolled(hidden, repetition.prefix, _take(all_layers, slice(0, start)))
        prefix_aux.append(aux)
    rest = jax.tree.map(lambda x: x[start:].reshape(repetition.repeats, period, *x.shape[1:]), all_layers)
    hidden, aux = jax.lax.scan(
        lambda hidden, inputs: run_unrolled(hidden, repetition.body, inputs), hidden, rest, unroll=unroll or 1
    )
    aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
    return hidden, jax.tree.map(lambda *xs: jnp.concatenate(xs), *prefix_aux, aux)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def split_layers(gradient_types: tuple[str, ...], stacked: Any) -> tuple[Any, ...]:
    """The parameters of each group, from a tree of arrays with a leading axis over the groups.

    The backward pass writes the gradient of each layer into the stack as soon as it is computed. The transpose of
    slicing would concatenate all of them inside the optimizer's kernels, which then read one element at a time
    (docs/log/model.md, 2026-11-26). The barrier keeps the writes out of these kernels.

    Args:
      gradient_types: of the stored gradients, one for each leaf: smaller than that of the leaf only where it
        represents the gradient exactly.
      stacked: the parameters.
    """
    return _split_forward(gradient_types, stacked)[0]


def _split_forward(gradient_types, stacked):
    groups = jax.tree.leaves(stacked)[0].shape[0]
    return tuple(_take(stacked, i) for i in range(groups)), None


def _split_backward(gradient_types, _, of_groups):
    def stack(dtype, *gradients):
        shape = gradients[0].shape
        if math.prod(shape) < SMALL:
            return jnp.stack(gradients)
        written = jax.lax.empty((len(gradients), *shape), dtype)
        for i in reversed(range(len(gradients))):  # the order in which they are computed
            start = (i, *(0,) * len(shape))
            written = jax.lax.dynamic_update_slice(written, gradients[i][None].astype(dtype), start)
        return written

    groups, structure = [jax.tree.leaves(group) for group in of_groups], jax.tree.structure(of_groups[0])
    stacks = [stack(*one) for one in zip(gradient_types, *groups, strict=True)]
    stacks = jax.lax.optimization_barrier(stacks)
    stacks = [x.astype(like.dtype) for x, like in zip(stacks, groups[0], strict=True)]
    return (jax.tree.unflatten(structure, stacks),)


split_layers.defvjp(_split_forward, _split_backward)


def _take(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)
