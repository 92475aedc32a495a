"""LAMB: Adam's direction, scaled for each tensor by the ratio of weight norm to update norm (You et al. 2020).

The ratio is one per logical tensor. The layers are stacked and Q, K and V fused, so a norm spans all axes but those
that index logical tensors; `optax.lamb` would use one ratio for the whole stack. With sharded parameters, XLA sums
the norms across devices.
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from bert_jax.array_types import Array, Float
from bert_jax.config import OptimizerConfig
from bert_jax.training.optimizers import OptimizerDescription, UpdateCost
from bert_jax.training.optimizers.adamw import scale_by_adam
from bert_jax.training.optimizers.norms import TensorUpdate
from bert_jax.training.optimizers.param_rules import ParamRule


class _Flavour(NamedTuple):
    """Settings that differ between published implementations of LAMB."""

    bias_correction: bool
    """Divide the moments by 1 - beta^t, as Adam does."""
    adapt_undecayed: bool
    """Give biases and norms a trust ratio too."""


FLAVOURS = {
    # Algorithm 2 of the paper.
    "paper": _Flavour(bias_correction=True, adapt_undecayed=True),
    # google-research/albert lamb_optimizer.py.
    "google": _Flavour(bias_correction=False, adapt_undecayed=False),
    # NVIDIA apex FusedLAMB without `use_nvlamb`, as in their BERT recipe.
    "nvidia": _Flavour(bias_correction=True, adapt_undecayed=False),
}


def _trust_ratio(config: OptimizerConfig, tensor: TensorUpdate) -> Float[Array, "..."]:
    """|weights| / |update| of each logical tensor, clipped to the config's bounds (phi of algorithm 2); 1 if either
    norm is 0.
    """
    weight_squares, update_squares = tensor.weight_squares, tensor.update_squares
    nonzero = (weight_squares > 0) & (update_squares > 0)
    ratio = jnp.sqrt(weight_squares) / jnp.sqrt(jnp.where(nonzero, update_squares, 1.0))
    return jnp.where(nonzero, jnp.clip(ratio, config.min_trust_ratio, config.max_trust_ratio), 1.0)


def _transform(config: OptimizerConfig, rules: object) -> optax.GradientTransformationExtraArgs:
    corrected = FLAVOURS[config.lamb_flavour].bias_correction
    return scale_by_adam(config, corrected if config.bias_correction is None else config.bias_correction)


def _is_adapted(config: OptimizerConfig, rule: ParamRule) -> bool:
    return rule.decayed or FLAVOURS[config.lamb_flavour].adapt_undecayed


OPTIMIZER = OptimizerDescription(
    transform=_transform,
    # As AdamW; direction and weights are read again for their norms.
    cost=UpdateCost(moments=2, step_bytes=40.0),
    is_adapted=_is_adapted,
    trust_ratio=_trust_ratio,
)
