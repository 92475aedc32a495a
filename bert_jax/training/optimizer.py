"""The optimizer of a run."""

from typing import Any

import jax
import optax

from bert_jax.config import OptimizerConfig
from bert_jax.training.lamb import FLAVOURS, scale_by_moments, scale_by_trust_ratio
from bert_jax.training.schedules import Schedule
from bert_jax.training.treatment import treatments


def make_optimizer(config: OptimizerConfig, schedule: Schedule, params: Any) -> optax.GradientTransformation:
    """AdamW or LAMB with global-norm clipping, decay by table, and the run's learning rate.

    Args:
      config: which optimizer and its numbers.
      schedule: learning rate by update.
      params: the parameters or their shapes; only their paths are read.

    Raises:
      LookupError: a parameter that no rule of the treatment table matches.
    """
    treated = treatments(params)
    flavour = FLAVOURS[config.lamb_flavour]
    bias_correction = config.name == "adamw" or flavour.bias_correction
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    steps = [
        clip,
        scale_by_moments(config.beta1, config.beta2, config.epsilon, bias_correction=bias_correction),
        optax.add_decayed_weights(config.weight_decay, mask=jax.tree.map(lambda t: t.decayed, treated)),
    ]
    if config.name == "lamb":
        steps.append(scale_by_trust_ratio(treated, adapt_undecayed=flavour.adapt_undecayed))
    return optax.chain(*steps, optax.scale_by_learning_rate(schedule))
