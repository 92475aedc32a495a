"""StableAdamW: AdamW whose learning rate is divided, for each tensor, by the root mean square of gradient / sqrt(second
moment), where that exceeds 1 (Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language
models", algorithm 2). It replaces clipping by the global norm; ModernBERT is trained with it.

The tensor is a logical one, as LAMB's: each layer of the stack, and query, key and value, have their own.
"""

import math

import jax.numpy as jnp

from bert_jax.array_types import Array, Float
from bert_jax.config import OptimizerConfig
from bert_jax.training.optimizers import OptimizerDescription, UpdateCost
from bert_jax.training.optimizers.adamw import bias_correction, scale_by_adam
from bert_jax.training.optimizers.norms import TensorUpdate, sum_per_tensor


def _trust_ratio(config: OptimizerConfig, tensor: TensorUpdate) -> Float[Array, "..."]:
    """1 / max(1, RMS) of each logical tensor."""
    # A first step that is skipped leaves a count of 0.
    corrected = config.bias_correction is not False
    correction = 1.0 / bias_correction(config.beta2, jnp.maximum(tensor.count, 1)) if corrected else 1.0
    moment = jnp.maximum(tensor.second_moment * correction, config.epsilon**2)
    squares = sum_per_tensor(jnp.square(tensor.gradient) / moment, tensor.rule.tensor_axes)
    elements = tensor.gradient.size / math.prod(squares.shape)
    return 1.0 / jnp.maximum(1.0, jnp.sqrt(squares / elements))


OPTIMIZER = OptimizerDescription(
    transform=lambda config, rules: scale_by_adam(config, config.bias_correction is not False),
    # As AdamW; gradient and second moment are read again.
    cost=UpdateCost(moments=2, step_bytes=36.0),
    is_adapted=lambda config, rule: True,
    trust_ratio=_trust_ratio,
)
