"""Muon: orthogonalised momentum for the matrices of the layers, Adam's direction for all other parameters (Jordan et
al. 2024, github.com/KellerJordan/Muon; Liu et al. 2025, "Muon is scalable for LLM training").

A matrix is that of a logical tensor: each layer of the stack, and query, key and value, are orthogonalised apart.
`optax.contrib.muon` takes what has two axes for a matrix: with stacked layers those are the embeddings, the biases and
the norms, and no kernel. With sharded parameters, XLA splits the products of the iteration or gathers the matrix.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.array_types import Array, Bool, Float, Int
from bert_jax.config import OptimizerConfig
from bert_jax.training.optimizers import OptimizerDescription, UpdateCost
from bert_jax.training.optimizers.adamw import moving_average, scale_by_adam
from bert_jax.training.optimizers.param_rules import ParamRule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: it brings singular values into [0.7, 1.2] instead of to 1, in few steps (Jordan et al.)."""
ITERATIONS = 5
ADAM_RMS = 0.2
"""Root mean square of an update: about that of AdamW's, so that its learning rates and weight decay can be used (Liu et
al. 2025, section 2.2)."""


class MuonState(NamedTuple):
    """Trees with the parameters' structure; None where a tree lacks a parameter."""

    count: Int[Array, ""]
    momentum: Any
    """Of matrices."""
    mu: Any
    """First moments of all other parameters."""
    nu: Any
    """Their second moments."""


def orthogonalise(matrices: Float[Array, "n rows columns"]) -> Float[Array, "n rows columns"]:
    """The nearest matrices with orthonormal rows or columns, roughly: their singular values become about 1."""
    a, b, c = COEFFICIENTS
    wide = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    norms = jnp.linalg.norm(wide, axis=(1, 2), keepdims=True)
    x = wide / jnp.maximum(norms, 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def _transform(config: OptimizerConfig, rules: Any) -> optax.GradientTransformationExtraArgs:
    adam = scale_by_adam(config, config.bias_correction is not False)

    def init(params: Any) -> MuonState:
        matrices, others = _split(rules, params)
        return MuonState(momentum=jax.tree.map(jnp.zeros_like, matrices), **adam.init(others)._asdict())

    def update(
        gradients: Any, state: MuonState, params: Any = None, *, applied: Bool[Array, ""]
    ) -> tuple[Any, MuonState]:
        matrices, others = _split(rules, gradients)
        adam_state = optax.ScaleByAdamState(state.count, state.mu, state.nu)
        directions, adam_state = adam.update(others, adam_state, applied=applied)
        beta = config.muon_momentum
        momentum = jax.tree.map(lambda m, g: moving_average(applied, beta, m, g), state.momentum, matrices)

        def merge(rule: ParamRule, gradient: Array, average: Array | None, direction: Array | None) -> Array | None:
            if average is None:
                return direction
            # Nesterov's: the average one step ahead.
            return _direction((1 - beta) * gradient + beta * average, rule)

        merged = jax.tree.map(merge, rules, gradients, momentum, directions, is_leaf=lambda x: x is None)
        return merged, MuonState(momentum=momentum, **adam_state._asdict())

    return optax.GradientTransformationExtraArgs(init, update)


def _split(rules: Any, tree: Any) -> tuple[Any, Any]:
    """The matrices of a tree, and its other leaves."""
    matrices = jax.tree.map(lambda rule, leaf: leaf if rule.input_axes else None, rules, tree)
    others = jax.tree.map(lambda rule, leaf: None if rule.input_axes else leaf, rules, tree)
    return matrices, others


def _direction(momentum: Float[Array, "..."], rule: ParamRule) -> Float[Array, "..."]:
    """The orthogonalised matrices of a parameter, scaled to `ADAM_RMS`."""
    outputs = [axis for axis in range(momentum.ndim) if axis not in (*rule.tensor_axes, *rule.input_axes)]
    order = (*rule.tensor_axes, *rule.input_axes, *outputs)
    transposed = momentum.transpose(order)
    matrices = transposed.reshape(-1, *matrix_shape(rule, momentum.shape))
    # An orthogonal matrix has the root mean square 1 / sqrt(its larger side).
    scaled = ADAM_RMS * math.sqrt(max(matrices.shape[1:])) * orthogonalise(matrices)
    return scaled.reshape(transposed.shape).transpose([order.index(axis) for axis in range(momentum.ndim)])


def matrix_shape(rule: ParamRule, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of each matrix in a parameter of this shape."""
    inputs = math.prod(shape[axis] for axis in rule.input_axes)
    return inputs, math.prod(shape) // inputs // math.prod(shape[axis] for axis in rule.tensor_axes)


def orthogonalisation_flops(rule: ParamRule, shape: tuple[int, ...]) -> float:
    """FLOPs of `orthogonalise` for a parameter of this shape; 0 if it is no matrix."""
    if not rule.input_axes:
        return 0.0
    short, long = sorted(matrix_shape(rule, shape))
    matrices = math.prod(shape) / (short * long)
    return ITERATIONS * matrices * (4 * short * short * long + 2 * short**3)


OPTIMIZER = OptimizerDescription(
    transform=_transform,
    # As AdamW.
    cost=UpdateCost(moments=2, step_bytes=28.0),
    # Gradient, momentum and weights read, the last two written; the iteration's operands and results, read and written
    # at least once in each of its products.
    matrix_cost=UpdateCost(moments=1, step_bytes=20.0 + 8.0 * 2 * ITERATIONS),
    matrix_flops=orthogonalisation_flops,
)
