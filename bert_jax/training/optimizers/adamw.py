"""AdamW: Adam's direction; decoupled weight decay is common to all optimizers (Loshchilov and Hutter 2019)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.array_types import Array, Bool, Float, Int
from bert_jax.config import OptimizerConfig
from bert_jax.training.optimizers import OptimizerDescription, UpdateCost


def scale_by_adam(config: OptimizerConfig, corrected: bool) -> optax.GradientTransformationExtraArgs:
    """Adam's direction (Kingma and Ba 2015, algorithm 1), with or without division of the moments by 1 - beta^t."""

    def update(
        gradients: Any, state: optax.ScaleByAdamState, params: Any = None, *, applied: Bool[Array, ""]
    ) -> tuple[Any, optax.ScaleByAdamState]:
        following = optax.safe_increment(state.count)
        count = jnp.where(applied, following, state.count)
        # A factor of all elements, because each division takes more instructions than the rest of the update. Not of
        # `count`, which is 0 if the first step is skipped.
        corrections = [1.0 / bias_correction(beta, following) for beta in (config.beta1, config.beta2)]
        mu = jax.tree.map(lambda m, g: moving_average(applied, config.beta1, m, g), state.mu, gradients)
        nu = jax.tree.map(lambda v, g: moving_average(applied, config.beta2, v, jnp.square(g)), state.nu, gradients)

        def direction(m: Array, v: Array) -> Array:
            if corrected:
                m, v = m * corrections[0], v * corrections[1]
            return m / (jnp.sqrt(v) + config.epsilon)

        return jax.tree.map(direction, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def moving_average(
    applied: Bool[Array, ""], beta: float, old: Float[Array, "..."], new: Float[Array, "..."]
) -> Float[Array, "..."]:
    """beta x old + (1 - beta) x new; `old` in a skipped step, whose `new` is 0."""
    # A scalar is chosen instead of an array: XLA for CPUs would copy both moments before it updates them.
    return jnp.where(applied, beta, 1.0) * old + (1 - beta) * new


def bias_correction(beta: float, count: Int[Array, ""]) -> Float[Array, ""]:
    """1 - beta^count, in a form that keeps float32 precision for beta near 1."""
    return -jnp.expm1(count * (math.log(beta) if beta else -math.inf))


OPTIMIZER = OptimizerDescription(
    transform=lambda config, rules: scale_by_adam(config, config.bias_correction is not False),
    # Gradient, both moments and weights read, all but the gradient written.
    cost=UpdateCost(moments=2, step_bytes=28.0),
)
