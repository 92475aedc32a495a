"""LAMB: Adam's direction, scaled for each tensor by the ratio of weight norm to update norm (You et al. 2020).

The ratio belongs to a logical tensor. Our layers are stacked and Q, K and V fused, so a norm is taken over
all axes but those that count tensors; `optax.lamb` would take one ratio for the whole stack. Under sharding
XLA completes the norms across devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.shapes import Array
from bert_jax.training.treatment import Treatment


class Flavour(NamedTuple):
    """What published LAMBs disagree about."""

    bias_correction: bool
    """Divide the moments by 1 - beta^t, as Adam does."""
    adapt_undecayed: bool
    """Give biases and norms a trust ratio too."""


FLAVOURS = {
    # Algorithm 2 of the paper.
    "paper": Flavour(bias_correction=True, adapt_undecayed=True),
    # google-research/albert lamb_optimizer.py.
    "google": Flavour(bias_correction=False, adapt_undecayed=False),
    # NVIDIA apex FusedLAMB without `use_nvlamb`, as their BERT recipe runs it.
    "nvidia": Flavour(bias_correction=True, adapt_undecayed=False),
}


def scale_by_moments(
    beta1: float, beta2: float, epsilon: float, *, bias_correction: bool
) -> optax.GradientTransformation:
    """Adam's direction, with or without bias correction (Kingma and Ba 2015, algorithm 1)."""
    adam = optax.scale_by_adam(beta1, beta2, eps=epsilon)
    if bias_correction:
        return adam

    def update(gradients: Any, state: optax.ScaleByAdamState, params: Any = None):
        mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, gradients)
        nu = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * jnp.square(g), state.nu, gradients)
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu)
        return direction, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(adam.init, update)


def scale_by_trust_ratio(treatments: Any, *, adapt_undecayed: bool) -> optax.GradientTransformation:
    """Multiply each logical tensor's update by |weights| / |update|, or by 1 where either norm is 0.

    Args:
      treatments: tree of `Treatment`; its axes say which logical tensors an array holds.
      adapt_undecayed: whether tensors without weight decay get a ratio too.
    """

    def scale(update: Array, weights: Array, treatment: Treatment) -> Array:
        if not (treatment.decayed or adapt_undecayed):
            return update
        axes = tuple(axis for axis in range(update.ndim) if axis not in treatment.tensor_axes)
        weight_norm, update_norm = (jnp.sqrt(jnp.square(x).sum(axes, keepdims=True)) for x in (weights, update))
        usable = (weight_norm > 0) & (update_norm > 0)
        return update * jnp.where(usable, weight_norm / jnp.where(usable, update_norm, 1.0), 1.0)

    def update(updates: Any, state: optax.EmptyState, params: Any):
        return jax.tree.map(scale, updates, params, treatments), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
