"""LAMB: Adam's direction, scaled for each tensor by the ratio of weight norm to update norm (You et al. 2020).

The ratio belongs to a logical tensor. Our layers are stacked and Q, K and V fused, so a norm is taken over
all axes but those that count tensors; `optax.lamb` would take one ratio for the whole stack. Under sharding
XLA completes the norms across devices.
"""

from typing import NamedTuple

import jax.numpy as jnp

from bert_jax.config import OptimizerConfig
from bert_jax.shapes import Array, Float


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


def trust_ratio(
    config: OptimizerConfig, weight_squares: Float[Array, "..."], update_squares: Float[Array, "..."]
) -> Float[Array, "..."]:
    """|weights| / |update| of each logical tensor within the config's bounds, or 1 where either norm is 0.

    Args:
      config: has the bounds (phi of algorithm 2).
      weight_squares: sums of squares of logical tensors.
      update_squares: those of their updates.
    """
    usable = (weight_squares > 0) & (update_squares > 0)
    ratio = jnp.sqrt(weight_squares) / jnp.sqrt(jnp.where(usable, update_squares, 1.0))
    return jnp.where(usable, jnp.clip(ratio, config.min_trust_ratio, config.max_trust_ratio), 1.0)
