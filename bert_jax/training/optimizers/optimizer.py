"""The optimizer of a run: clipping, Adam's moments, decay by table, LAMB's ratio, and no update at all where
the loss or the gradient is not finite.
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
    measure_norms,
    measure_ratios,
    tensor_sums,
)
from bert_jax.training.optimizers.param_rules import Treatment, treatments


class Optimizer(NamedTuple):
    """Two functions of plain trees, as optax has them, but the update is already applied and judged."""

    init: Callable[[Any], optax.ScaleByAdamState]
    """Parameters to zero moments and a count of 0."""
    update: Callable[..., tuple[Any, optax.ScaleByAdamState, Metrics]]
    """(gradients, state, params, learning_rate, loss_is_finite) to (params, state, metrics); see `_update`."""


class _Rules(NamedTuple):
    config: OptimizerConfig
    treated: Any
    """tree of `Treatment`"""
    adapted: Any
    """tree of bool: whether a parameter has a trust ratio"""
    bias_correction: bool
    groups: list[str]
    """names, or none if norms of groups are not wanted"""


def make_optimizer(
    config: OptimizerConfig, params: Any, frozen: tuple[str, ...] = (), *, layers: bool = True
) -> Optimizer:
    """AdamW or LAMB.

    Args:
      config: which optimizer and its numbers.
      params: the parameters or their shapes.
      frozen: patterns of parameters that stay as they are (`Phase.frozen`).
      layers: also report norms and ratios of every group of parameters.

    Raises:
      LookupError: a parameter that no rule of the treatment table matches.
      UserError: a pattern of the config or of `frozen` that matches no parameter.
    """
    treated = treatments(params, config.learning_rate_scales, frozen)
    lamb, flavour = config.name == "lamb", FLAVOURS[config.lamb_flavour]
    correct = flavour.bias_correction if lamb else True
    rules = _Rules(
        config=config,
        treated=treated,
        adapted=jax.tree.map(lambda t: lamb and not t.frozen and (t.decayed or flavour.adapt_undecayed), treated),
        bias_correction=correct if config.bias_correction is None else config.bias_correction,
        groups=group_names(params) if layers else [],
    )
    return Optimizer(optax.scale_by_adam().init, functools.partial(_update, rules))


def _update(
    rules: _Rules,
    gradients: Any,
    state: optax.ScaleByAdamState,
    params: Any,
    learning_rate: Float[Array, ""],
    loss_is_finite: Bool[Array, ""],
) -> tuple[Any, optax.ScaleByAdamState, Metrics]:
    """One update, to be traced. Where the loss or the gradient's norm is not finite, nothing changes but metrics.

    Metrics, float32 scalars: `skipped`; 2-norms over all parameters: `gradient_norm` (of those that are trained,
    before clipping), `update_norm` (what is subtracted), `parameter_norm` (after the update); LAMB's
    `trust_ratio_min` and `trust_ratio_max`. With groups, for each of them: `gradient_norm/GROUP`,
    `update_ratio/GROUP` = |update| / |parameters|, `trust_ratio/GROUP` = |r u| / |u| of its adapted tensors.
    """
    gradient_sums = jax.tree.map(_trained_squares, rules.treated, gradients)
    gradient_norm = jnp.sqrt(group_sums(gradient_sums).sum())
    applied = loss_is_finite & jnp.isfinite(gradient_norm)
    moved = _move_moments(rules, gradients, state, gradient_norm, applied)
    direction = functools.partial(_direction, rules, state.count + 1)
    updates = jax.tree.map(direction, rules.treated, moved.mu, moved.nu, params)
    update_sums = jax.tree.map(_trained_squares, rules.treated, updates)
    weight_sums = jax.tree.map(_squares, rules.treated, params)
    ratios = jax.tree.map(
        lambda adapted, w, u: trust_ratio(rules.config, w, u) if adapted else jnp.ones_like(u),
        rules.adapted,
        weight_sums,
        update_sums,
    )
    factors = jax.tree.map(lambda t, ratio: learning_rate * t.learning_rate_scale * ratio, rules.treated, ratios)

    def subtract(t: Treatment, w: Array, factor: Array, u: Array) -> Array:
        return w if t.frozen else jnp.where(applied, w - factor * u, w)

    new_params = jax.tree.map(subtract, rules.treated, params, factors, updates)
    changes = jax.tree.map(lambda f, u: jnp.where(applied, jnp.square(f) * u, 0), factors, update_sums)
    metrics = measure_norms(gradient_sums, changes, jax.tree.map(_squares, rules.treated, new_params), rules.groups)
    if rules.config.name == "lamb":
        metrics |= measure_ratios(ratios, update_sums, rules.adapted, rules.groups)
    return new_params, moved, metrics | {"skipped": 1 - applied.astype(jnp.float32)}


def _squares(treatment: Treatment, array: Array) -> Array:
    return tensor_sums(jnp.square(array), treatment.tensor_axes)


def _trained_squares(treatment: Treatment, array: Array) -> Array:
    """`_squares`, of frozen parameters 0."""
    sums = _squares(treatment, array)
    return jnp.zeros_like(sums) if treatment.frozen else sums


def _move_moments(
    rules: _Rules,
    gradients: Any,
    state: optax.ScaleByAdamState,
    gradient_norm: Float[Array, ""],
    applied: Bool[Array, ""],
) -> optax.ScaleByAdamState:
    """Running means of the clipped gradient and of its square, where the update is applied."""
    beta1, beta2, most = rules.config.beta1, rules.config.beta2, rules.config.clip_norm
    shrink = 1.0 if most is None else most / jnp.maximum(gradient_norm, most)

    def mean(beta: float, old: Array, new: Array) -> Array:
        return jnp.where(applied, beta * old + (1 - beta) * new, old)

    return optax.ScaleByAdamState(
        count=jnp.where(applied, optax.safe_increment(state.count), state.count),
        mu=jax.tree.map(
            lambda t, m, g: m if t.frozen else mean(beta1, m, shrink * g), rules.treated, state.mu, gradients
        ),
        nu=jax.tree.map(
            lambda t, v, g: v if t.frozen else mean(beta2, v, jnp.square(shrink * g)),
            rules.treated,
            state.nu,
            gradients,
        ),
    )


def _direction(rules: _Rules, count: Int[Array, ""], treatment: Treatment, m: Array, v: Array, w: Array) -> Array:
    """Adam's direction (Kingma and Ba 2015, algorithm 1) and decoupled weight decay."""
    config = rules.config
    if rules.bias_correction:
        m, v = m / _share_seen(config.beta1, count), v / _share_seen(config.beta2, count)
    update = m / (jnp.sqrt(v) + config.epsilon)
    return update + config.weight_decay * w if treatment.decayed else update


def _share_seen(beta: float, count: Int[Array, ""]) -> Float[Array, ""]:
    """1 - beta^count. Written so, float32 keeps its digits where beta is near 1."""
    return -jnp.expm1(count * (math.log(beta) if beta else -math.inf))
