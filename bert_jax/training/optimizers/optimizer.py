"""What all optimizers share: clipping, weight decay and learning rates by table, frozen parameters, trust ratios, and
metrics. A step whose loss or gradient is not finite changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float
from bert_jax.config import OptimizerConfig
from bert_jax.training.optimizers import describe
from bert_jax.training.optimizers.norms import (
    Metrics,
    TensorUpdate,
    group_names,
    group_sums,
    norm_metrics,
    sum_per_tensor,
    trust_ratio_metrics,
)
from bert_jax.training.optimizers.param_rules import ParamRule, param_rules
from bert_jax.training.param_paths import name_leaves, path_name


class Optimizer:
    """The optimizer of a config: two functions of trees, as in optax, but `update` also applies the update."""

    def __init__(self, config: OptimizerConfig, params: Any, frozen: tuple[str, ...] = (), *, layers: bool = True):
        """Makes the rules of all parameters.

        Args:
          config: the optimizer and its hyperparameters.
          params: the parameters or their shapes.
          frozen: patterns of parameters that are not trained (`Phase.frozen`).
          layers: also report norms and ratios of every parameter group.

        Raises:
          LookupError: no rule of `PARAM_RULES` matches a parameter.
          UserError: a pattern of the config or of `frozen` matches no parameter.
        """
        rules = param_rules(params, config.learning_rate_scales, frozen, config.layer_decay)
        description = describe(config.name)

        def is_adapted(rule: ParamRule) -> bool:
            return description.is_adapted is not None and not rule.frozen and description.is_adapted(config, rule)

        self._config, self._description, self._rules = config, description, rules
        self._transform = description.transform(config, rules)
        self._adapted = jax.tree.map(is_adapted, rules)  # whether a parameter has a trust ratio
        self._frozen = {name for name, rule in name_leaves(rules).items() if rule.frozen}
        self._groups = group_names(params) if layers else []

    def init(self, params: Any) -> Any:
        """The first state: zero moments and a count of 0."""
        return self._transform.init(params)

    def update(
        self, gradients: Any, state: Any, params: Any, learning_rate: Float[Array, ""], loss_is_finite: Bool[Array, ""]
    ) -> tuple[Any, Any, Metrics]:
        """One update, inside jit: new parameters, new state, metrics. Neither changes if the loss or the gradient norm
        is not finite.

        Metrics, float32 scalars: `skipped`; 2-norms over all parameters: `gradient_norm` (of trained parameters,
        before clipping), `update_norm` (of the applied change), `parameter_norm` (after the update); with trust ratios
        and with groups, those of `norms.norm_metrics` and `norms.trust_ratio_metrics`.
        """
        config, rules = self._config, self._rules
        gradient_sums = jax.tree.map(_trained_squares, rules, gradients)
        gradient_norm = jnp.sqrt(group_sums(gradient_sums).sum())
        applied = loss_is_finite & jnp.isfinite(gradient_norm)
        scale = 1.0 if config.clip_norm is None else config.clip_norm / jnp.maximum(gradient_norm, config.clip_norm)
        # Zeros instead of values that are not finite, so that the metrics of a skipped step are finite.
        clipped = jax.tree.map(lambda g: jnp.where(applied, scale * g, 0), gradients)
        directions, new_state = self._transform.update(clipped, state, params, applied=applied)
        new_state = self._keep_frozen(new_state, state)
        rate = jnp.where(applied, learning_rate, 0.0)

        def decay(rule: ParamRule, direction: Array, w: Array) -> Array:
            return direction + config.weight_decay * w if rule.decayed else direction

        updates = jax.tree.map(decay, rules, directions, params)
        update_sums = jax.tree.map(_trained_squares, rules, updates)
        weight_sums = jax.tree.map(_squares, rules, params)
        ratios = self._trust_ratios(weight_sums, update_sums, clipped, new_state)
        factors = jax.tree.map(lambda rule, ratio: rate * _rate_scale(rule, ratio) * ratio, rules, ratios)

        def subtract(rule: ParamRule, w: Array, factor: Array, u: Array) -> Array:
            return w if rule.frozen else w - factor * u

        new_params = jax.tree.map(subtract, rules, params, factors, updates)
        changes = jax.tree.map(lambda f, u: jnp.square(f) * u, factors, update_sums)
        metrics = norm_metrics(gradient_sums, changes, jax.tree.map(_squares, rules, new_params), self._groups)
        if self._description.is_adapted is not None:
            metrics |= trust_ratio_metrics(ratios, update_sums, self._adapted, self._groups)
        return new_params, new_state, metrics | {"skipped": 1 - applied.astype(jnp.float32)}

    def _trust_ratios(self, weight_sums: Any, update_sums: Any, clipped: Any, new_state: Any) -> Any:
        """The factor of each logical tensor's update."""
        if self._description.trust_ratio is None:
            return jax.tree.map(jnp.ones_like, update_sums)

        def ratio(adapted: bool, *tensor: Any) -> Array:
            update = TensorUpdate(*tensor, new_state.count)
            return (
                self._description.trust_ratio(self._config, update) if adapted else jnp.ones_like(update.update_squares)
            )

        return jax.tree.map(ratio, self._adapted, self._rules, weight_sums, update_sums, clipped, new_state.nu)

    def _keep_frozen(self, new_state: Any, state: Any) -> Any:
        """The new state, but the old one for frozen parameters."""

        def keep(path: tuple[Any, ...], new: Array, old: Array) -> Array:
            return old if path_name(path[1:]) in self._frozen else new  # after the field of the state

        return jax.tree_util.tree_map_with_path(keep, new_state, state)


def _rate_scale(rule: ParamRule, ratio: Array) -> float | Array:
    """The factor of the learning rate, so that it broadcasts against the ratios of logical tensors."""
    scale = rule.learning_rate_scale
    return scale if isinstance(scale, float) else jnp.asarray(scale).reshape(-1, *(1,) * (ratio.ndim - 1))


def _squares(rule: ParamRule, array: Array) -> Array:
    return sum_per_tensor(jnp.square(array), rule.tensor_axes)


def _trained_squares(rule: ParamRule, array: Array) -> Array:
    """`_squares`, but 0 for frozen parameters."""
    sums = _squares(rule, array)
    return jnp.zeros_like(sums) if rule.frozen else sums
