"""What all optimizers share: clipping, weight decay and learning rates by table, frozen parameters, trust ratios, and
metrics. A step whose loss or gradient is not finite changes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimizerConfig
from bert_jax.shapes import Array, Bool, Float
from bert_jax.training.optimizers import OptimizerDescription, describe
from bert_jax.training.optimizers.norms import (
    Metrics,
    group_names,
    group_sums,
    measure_ratios,
    norm_metrics,
    tensor_sums,
)
from bert_jax.training.optimizers.param_rules import ParamRule, param_rules
from bert_jax.training.param_paths import name_leaves, path_name


class Optimizer(NamedTuple):
    """Two functions of trees, as in optax, but `update` also applies the update and returns metrics."""

    init: Callable[[Any], Any]
    """Parameters to the first state: zero moments and a count of 0."""
    update: Callable[..., tuple[Any, Any, Metrics]]
    """(gradients, state, params, learning_rate, loss_is_finite) to (params, state, metrics); see `_update`."""


class _Settings(NamedTuple):
    config: OptimizerConfig
    description: OptimizerDescription
    transform: optax.GradientTransformation
    rules: Any
    """tree of `ParamRule`"""
    adapted: Any
    """tree of bool: whether a parameter has a trust ratio"""
    frozen: tuple[str, ...]
    """ends of paths in the state that belong to frozen parameters"""
    groups: list[str]
    """names of parameter groups to report norms of"""


def make_optimizer(
    config: OptimizerConfig, params: Any, frozen: tuple[str, ...] = (), *, layers: bool = True
) -> Optimizer:
    """The optimizer of a config.

    Args:
      config: the optimizer and its hyperparameters.
      params: the parameters or their shapes.
      frozen: patterns of parameters that are not trained (`Phase.frozen`).
      layers: also report norms and ratios of every parameter group.

    Raises:
      LookupError: no rule of `PARAM_RULES` matches a parameter.
      UserError: a pattern of the config or of `frozen` matches no parameter.
    """
    rules, description = param_rules(params, config.learning_rate_scales, frozen), describe(config.name)

    def is_adapted(rule: ParamRule) -> bool:
        return description.is_adapted is not None and not rule.frozen and description.is_adapted(config, rule)

    settings = _Settings(
        config=config,
        description=description,
        transform=description.transform(config, rules),
        rules=rules,
        adapted=jax.tree.map(is_adapted, rules),
        frozen=tuple(f"/{name}" for name, rule in name_leaves(rules).items() if rule.frozen),
        groups=group_names(params) if layers else [],
    )
    return Optimizer(settings.transform.init, functools.partial(_update, settings))


def _update(
    settings: _Settings,
    gradients: Any,
    state: Any,
    params: Any,
    learning_rate: Float[Array, ""],
    loss_is_finite: Bool[Array, ""],
) -> tuple[Any, Any, Metrics]:
    """One update, inside jit. If the loss or the gradient norm is not finite, parameters and state do not change.

    Metrics, float32 scalars: `skipped`; 2-norms over all parameters: `gradient_norm` (of trained parameters,
    before clipping), `update_norm` (of the applied change), `parameter_norm` (after the update); with trust ratios,
    `trust_ratio_min` and `trust_ratio_max`. With groups, for each of them: `gradient_norm/GROUP`,
    `update_ratio/GROUP` = |update| / |parameters|, `trust_ratio/GROUP` = |r u| / |u| of its adapted tensors.
    """
    config, rules = settings.config, settings.rules
    gradient_sums = jax.tree.map(_trained_squares, rules, gradients)
    gradient_norm = jnp.sqrt(group_sums(gradient_sums).sum())
    applied = loss_is_finite & jnp.isfinite(gradient_norm)
    scale = 1.0 if config.clip_norm is None else config.clip_norm / jnp.maximum(gradient_norm, config.clip_norm)
    # Zeros instead of values that are not finite, so that the metrics of a skipped step are finite.
    clipped = jax.tree.map(lambda g: jnp.where(applied, scale * g, 0), gradients)
    directions, new_state = settings.transform.update(clipped, state, params)
    new_state = _keep_state(settings, applied, new_state, state)

    def decay(rule: ParamRule, direction: Array, w: Array) -> Array:
        return direction + config.weight_decay * w if rule.decayed else direction

    updates = jax.tree.map(decay, rules, directions, params)
    update_sums = jax.tree.map(_trained_squares, rules, updates)
    weight_sums = jax.tree.map(_squares, rules, params)
    ratios = jax.tree.map(
        lambda adapted, w, u: settings.description.trust_ratio(config, w, u) if adapted else jnp.ones_like(u),
        settings.adapted,
        weight_sums,
        update_sums,
    )
    factors = jax.tree.map(lambda rule, ratio: learning_rate * rule.learning_rate_scale * ratio, rules, ratios)

    def subtract(rule: ParamRule, w: Array, factor: Array, u: Array) -> Array:
        return w if rule.frozen else jnp.where(applied, w - factor * u, w)

    new_params = jax.tree.map(subtract, rules, params, factors, updates)
    changes = jax.tree.map(lambda f, u: jnp.where(applied, jnp.square(f) * u, 0), factors, update_sums)
    metrics = norm_metrics(gradient_sums, changes, jax.tree.map(_squares, rules, new_params), settings.groups)
    if settings.description.is_adapted is not None:
        metrics |= measure_ratios(ratios, update_sums, settings.adapted, settings.groups)
    return new_params, new_state, metrics | {"skipped": 1 - applied.astype(jnp.float32)}


def _keep_state(settings: _Settings, applied: Bool[Array, ""], new_state: Any, state: Any) -> Any:
    """The new state if the update is applied, but the old one for frozen parameters."""

    def keep(path: tuple[Any, ...], new: Array, old: Array) -> Array:
        return old if path_name(path).endswith(settings.frozen) else jnp.where(applied, new, old)

    return jax.tree_util.tree_map_with_path(keep, new_state, state)


def _squares(rule: ParamRule, array: Array) -> Array:
    return tensor_sums(jnp.square(array), rule.tensor_axes)


def _trained_squares(rule: ParamRule, array: Array) -> Array:
    """`_squares`, but 0 for frozen parameters."""
    sums = _squares(rule, array)
    return jnp.zeros_like(sums) if rule.frozen else sums
