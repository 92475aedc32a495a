"""Norms of logical tensors, of parameter groups and of all parameters, from one set of sums of squares.

A sum keeps its array's rank: axes that index logical tensors keep their size, all others have size 1. So it can be
scaled per tensor, broadcast against the array, and added up over a group.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Float, Int
from bert_jax.model.layers import barrier_on_gpus
from bert_jax.training.optimizers.param_rules import ParamRule
from bert_jax.training.param_paths import EMBEDDINGS, GENERATOR, LAYERS, name_leaves

ROW = 64
"""Elements of a row whose sum is taken first."""
Metrics = dict[str, Float[Array, ""]]


class TensorUpdate(NamedTuple):
    """The update of a parameter, from which its trust ratios are computed."""

    rule: ParamRule
    weight_squares: Float[Array, "..."]
    """Sum of squares of the weights of each logical tensor (`sum_per_tensor`)."""
    update_squares: Float[Array, "..."]
    """The same of the update, weight decay included."""
    gradient: Float[Array, "..."]
    """After clipping."""
    second_moment: Float[Array, "..."]
    """After the step, without correction of its bias."""
    count: Int[Array, ""]
    """Steps, this one included unless it is skipped."""


def sum_per_tensor(array: Float[Array, "..."], tensor_axes: tuple[int, ...]) -> Float[Array, "..."]:
    """Sum over each logical tensor of an array.

    First over rows of at least `ROW` elements, where there are such: XLA for GPUs would otherwise cut a tensor into
    parts of sizes that need more instructions than its update.
    """
    axes = [axis for axis in range(array.ndim) if axis not in tensor_axes]
    row = [axis for axis in axes if set(range(axis, array.ndim)) <= set(axes)]
    while len(row) > 1 and math.prod(array.shape[axis] for axis in row[1:]) >= ROW:
        row = row[1:]
    if row and len(row) < len(axes):
        array = barrier_on_gpus(array.sum(row, keepdims=True))
    # Without the barrier, XLA turns a group's sum over Q, K and V into a second pass over the whole array.
    return jax.lax.optimization_barrier(array.sum(axes, keepdims=True))


def group_names(params: Any) -> list[str]:
    """``embeddings``, ``layer_00`` ..., ``heads``, and ``generator`` if there is one: the groups of `group_sums`, in
    the same order.

    Layers are slices of the stack; if layers share parameters, there are fewer slices than layers.
    """
    leaves = name_leaves(params)
    depths = [leaf.shape[0] for name, leaf in leaves.items() if name.startswith(LAYERS)]
    others = ["heads", *(["generator"] if any(name.startswith(GENERATOR) for name in leaves) else [])]
    return ["embeddings", *(f"layer_{i:02d}" for i in range(max(depths, default=0))), *others]


def group_sums(sums: Any) -> Float[Array, " groups"]:
    """Total of every group, from a tree of sums of logical tensors."""
    embeddings = heads = jnp.zeros(1)
    layers, generator = [], []
    for name, leaf in name_leaves(sums).items():
        if name.startswith(LAYERS):
            layers.append(leaf.reshape(leaf.shape[0], -1).sum(1))
        elif name.startswith(EMBEDDINGS):
            embeddings += leaf.sum()
        elif name.startswith(GENERATOR):
            generator.append(leaf.sum())
        else:
            heads += leaf.sum()
    return jnp.concatenate(
        [embeddings, *([sum(layers)] if layers else []), heads, *([sum(generator)[None]] if generator else [])]
    )


def norm_metrics(gradient_sums: Any, update_sums: Any, weight_sums: Any, groups: Sequence[str]) -> Metrics:
    """`gradient_norm`, `update_norm` and `parameter_norm`; for each of `groups` `gradient_norm/GROUP` and
    `update_ratio/GROUP` = |update| / |parameters|.
    """
    gradients, updates, weights = map(group_sums, (gradient_sums, update_sums, weight_sums))
    metrics = {
        "gradient_norm": jnp.sqrt(gradients.sum()),
        "update_norm": jnp.sqrt(updates.sum()),
        "parameter_norm": jnp.sqrt(weights.sum()),
    }
    ratios = _root_of_share(updates, weights, 0.0)
    for i, group in enumerate(groups):
        metrics |= {f"gradient_norm/{group}": jnp.sqrt(gradients[i]), f"update_ratio/{group}": ratios[i]}
    return metrics


def trust_ratio_metrics(ratios: Any, update_sums: Any, adapted: Any, groups: Sequence[str]) -> Metrics:
    """`trust_ratio_min` and `trust_ratio_max` over all adapted tensors; for each of `groups` `trust_ratio/GROUP`,
    the ratio of the norms of its adapted tensors' updates with and without trust ratios; 1 if none is adapted.
    """
    adapted_sums = jax.tree.map(
        lambda is_adapted, sums: sums if is_adapted else jnp.zeros_like(sums), adapted, update_sums
    )
    scaled = jax.tree.map(lambda ratio, sums: jnp.square(ratio) * sums, ratios, adapted_sums)
    pairs = zip(jax.tree.leaves(adapted), jax.tree.leaves(ratios), strict=True)
    all_ratios = jnp.concatenate([jnp.ravel(ratio) for is_adapted, ratio in pairs if is_adapted] or [jnp.ones(1)])
    metrics = {"trust_ratio_min": all_ratios.min(), "trust_ratio_max": all_ratios.max()}
    by_group = _root_of_share(group_sums(scaled), group_sums(adapted_sums), 1.0)
    return metrics | {f"trust_ratio/{group}": by_group[i] for i, group in enumerate(groups)}


def _root_of_share(part: Array, whole: Array, empty: float) -> Array:
    """Ratio of two norms, from their squares; `empty` where `whole` is 0."""
    return jnp.where(whole > 0, jnp.sqrt(part) / jnp.sqrt(jnp.where(whole > 0, whole, 1.0)), empty)
