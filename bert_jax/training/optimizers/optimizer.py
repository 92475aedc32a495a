"""AdamW and LAMB: clipping, Adam's moments, weight decay by table, LAMB's trust ratio. A step whose loss or gradient
is not finite changes nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimizerConfig
from bert_jax.shapes import Array, Bool, Float, Int
from bert_jax.training.optimizers.lamb import FLAVOURS, trust_ratio
from bert_jax.training.optimizers.norms import (
    Metrics,
    group_names,
    group_sums,
    measure_ratios,
    norm_metrics,
    tensor_sums,
)
from bert_jax.training.optimizers.param_rules import ParamRule, param_rules


class Optimizer(NamedTuple):
    """Two functions of trees, as in optax, but `update` also applies the update and returns metrics."""

    init: Callable[[Any], optax.ScaleByAdamState]
    """Parameters to zero moments and a count of 0."""
    update: Callable[..., tuple[Any, optax.ScaleByAdamState, Metrics]]
    """(gradients, state, params, learning_rate, loss_is_finite) to (params, state, metrics); see `_update`."""


class _Settings(NamedTuple):
    config: OptimizerConfig
    rules: Any
    """tree of `ParamRule`"""
    adapted: Any
    """tree of bool: whether a parameter has a trust ratio"""
    bias_correction: bool
    groups: list[str]
    """names of parameter groups to report norms of"""


def make_optimizer(
    config: OptimizerConfig, params: Any, frozen: tuple[str, ...] = (), *, layers: bool = True
) -> Optimizer:
    """AdamW or LAMB.

    Args:
      config: the optimizer and its hyperparameters.
      params: the parameters or their shapes.
      frozen: patterns of parameters that are not trained (`Phase.frozen`).
      layers: also report norms and ratios of every parameter group.

    Raises:
      LookupError: no rule of `PARAM_RULES` matches a parameter.
      UserError: a pattern of the config or of `frozen` matches no parameter.
    """
    rules = param_rules(params, config.learning_rate_scales, frozen)
    lamb, flavour = config.name == "lamb", FLAVOURS[config.lamb_flavour]
    bias_correction = flavour.bias_correction if lamb else True
    settings = _Settings(
        config=config,
        rules=rules,
        adapted=jax.tree.map(lambda r: lamb and not r.frozen and (r.decayed or flavour.adapt_undecayed), rules),
        bias_correction=bias_correction if config.bias_correction is None else config.bias_correction,
        groups=group_names(params) if layers else [],
    )
    return Optimizer(optax.scale_by_adam().init, functools.partial(_update, settings))


def _update(
    settings: _Settings,
    gradients: Any,
    state: optax.ScaleByAdamState,
    params: Any,
    learning_rate: Float[Array, ""],
    loss_is_finite: Bool[Array, ""],
) -> tuple[Any, optax.ScaleByAdamState, Metrics]:
    """One update, inside jit. If the loss or the gradient norm is not finite, parameters and moments do not change.

    Metrics, float32 scalars: `skipped`; 2-norms over all parameters: `gradient_norm` (of trained parameters,
    before clipping), `update_norm` (of the applied change), `parameter_norm` (after the update); LAMB's
    `trust_ratio_min` and `trust_ratio_max`. With groups, for each of them: `gradient_norm/GROUP`,
    `update_ratio/GROUP` = |update| / |parameters|, `trust_ratio/GROUP` = |r u| / |u| of its adapted tensors.
    """
    gradient_sums = jax.tree.map(_trained_squares, settings.rules, gradients)
    gradient_norm = jnp.sqrt(group_sums(gradient_sums).sum())
    applied = loss_is_finite & jnp.isfinite(gradient_norm)
    new_state = _update_moments(settings, gradients, state, gradient_norm, applied)
    direction = functools.partial(_direction, settings, state.count + 1)
    updates = jax.tree.map(direction, settings.rules, new_state.mu, new_state.nu, params)
    update_sums = jax.tree.map(_trained_squares, settings.rules, updates)
    weight_sums = jax.tree.map(_squares, settings.rules, params)
    ratios = jax.tree.map(
        lambda adapted, w, u: trust_ratio(settings.config, w, u) if adapted else jnp.ones_like(u),
        settings.adapted,
        weight_sums,
        update_sums,
    )
    factors = jax.tree.map(lambda rule, ratio: learning_rate * rule.learning_rate_scale * ratio, settings.rules, ratios)

    def subtract(rule: ParamRule, w: Array, factor: Array, u: Array) -> Array:
        return w if rule.frozen else jnp.where(applied, w - factor * u, w)

    new_params = jax.tree.map(subtract, settings.rules, params, factors, updates)
    changes = jax.tree.map(lambda f, u: jnp.where(applied, jnp.square(f) * u, 0), factors, update_sums)
    metrics = norm_metrics(gradient_sums, changes, jax.tree.map(_squares, settings.rules, new_params), settings.groups)
    if settings.config.name == "lamb":
        metrics |= measure_ratios(ratios, update_sums, settings.adapted, settings.groups)
    return new_params, new_state, metrics | {"skipped": 1 - applied.astype(jnp.float32)}


def _squares(rule: ParamRule, array: Array) -> Array:
    return tensor_sums(jnp.square(array), rule.tensor_axes)


def _trained_squares(rule: ParamRule, array: Array) -> Array:
    """`_squares`, but 0 for frozen parameters."""
    sums = _squares(rule, array)
    return jnp.zeros_like(sums) if rule.frozen else sums


def _update_moments(
    settings: _Settings,
    gradients: Any,
    state: optax.ScaleByAdamState,
    gradient_norm: Float[Array, ""],
    applied: Bool[Array, ""],
) -> optax.ScaleByAdamState:
    """Running means of the clipped gradient and of its square, unchanged if the update is not applied."""
    beta1, beta2, clip_norm = settings.config.beta1, settings.config.beta2, settings.config.clip_norm
    scale = 1.0 if clip_norm is None else clip_norm / jnp.maximum(gradient_norm, clip_norm)

    def mean(beta: float, old: Array, new: Array) -> Array:
        return jnp.where(applied, beta * old + (1 - beta) * new, old)

    return optax.ScaleByAdamState(
        count=jnp.where(applied, optax.safe_increment(state.count), state.count),
        mu=jax.tree.map(
            lambda rule, m, g: m if rule.frozen else mean(beta1, m, scale * g), settings.rules, state.mu, gradients
        ),
        nu=jax.tree.map(
            lambda rule, v, g: v if rule.frozen else mean(beta2, v, jnp.square(scale * g)),
            settings.rules,
            state.nu,
            gradients,
        ),
    )


def _direction(settings: _Settings, count: Int[Array, ""], rule: ParamRule, m: Array, v: Array, w: Array) -> Array:
    """Adam's direction (Kingma and Ba 2015, algorithm 1) and decoupled weight decay."""
    config = settings.config
    if settings.bias_correction:
        m, v = m / _bias_correction(config.beta1, count), v / _bias_correction(config.beta2, count)
    update = m / (jnp.sqrt(v) + config.epsilon)
    return update + config.weight_decay * w if rule.decayed else update


def _bias_correction(beta: float, count: Int[Array, ""]) -> Float[Array, ""]:
    """1 - beta^count, in a form that keeps float32 precision for beta near 1."""
    return -jnp.expm1(count * (math.log(beta) if beta else -math.inf))
