"""The table of optimizer rules per parameter (decay, logical tensors, matrices), and a config's changes to it."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax.errors import UserError, require
from bert_jax.training.param_paths import EMBEDDINGS, LAYERS, map_with_paths, map_with_table, name_leaves


@dataclass(frozen=True)
class ParamRule:
    """Optimizer settings of a parameter."""

    decayed: bool
    """Whether weight decay applies."""
    tensor_axes: tuple[int, ...] = ()
    """Axes that index logical tensors: the layer stack, and Q, K and V. LAMB's norms span the other axes."""
    input_axes: tuple[int, ...] = ()
    """Axes of the inputs of a matrix of a layer; those of its outputs are all others that index no logical tensors.
    Muon orthogonalises these matrices. Empty: the parameter is no matrix of a layer."""
    learning_rate_scale: float | tuple[float, ...] = 1.0
    """Factor on its learning rate; one for each index of axis 0 of a layer stack."""
    frozen: bool = False
    """Whether the parameter and its moments stay unchanged."""


# First match wins; a parameter without a match is an error.
PARAM_RULES: tuple[tuple[str, ParamRule], ...] = (
    (r"layers/(qkv|query_key)/kernel", ParamRule(decayed=True, tensor_axes=(0, 2), input_axes=(1,))),
    (r"layers/(qkv|query_key)/bias", ParamRule(decayed=False, tensor_axes=(0, 1))),
    (r"layers/attention_out/kernel", ParamRule(decayed=True, tensor_axes=(0,), input_axes=(1, 2))),
    (r"layers/(\w+/)+kernel", ParamRule(decayed=True, tensor_axes=(0,), input_axes=(1,))),
    (r"layers/(\w+/)+(bias|scale)", ParamRule(decayed=False, tensor_axes=(0,))),
    (r"embeddings/(word|position|token_type)|mlm/extra_columns", ParamRule(decayed=True)),
    (r"task/cls_norm/(mean|std|variance)", ParamRule(decayed=False, frozen=True)),  # statistics, not trained
    (r"task/mix/weights", ParamRule(decayed=False)),
    (r"kernel", ParamRule(decayed=True)),
    (r"bias|scale", ParamRule(decayed=False)),
)


def param_rules(
    params: Any, scales: tuple[tuple[str, float], ...] = (), frozen: tuple[str, ...] = (), layer_decay: float = 1.0
) -> Any:
    """The rule of every parameter, as a tree of the same structure.

    Args:
      params: parameters or their shapes.
      scales: (pattern, factor of the learning rate), as in `OptimizerConfig.learning_rate_scales`; the first
        match applies.
      frozen: patterns of parameters that are not trained, as in `Phase.frozen`, besides those that no rule trains.
      layer_decay: as in `OptimizerConfig.layer_decay`.

    Raises:
      LookupError: no rule of the table matches a parameter.
      UserError: a pattern is not a regular expression or matches no parameter; all parameters are frozen.
    """
    scale_tree = _values_by_pattern("optimizer.learning_rate_scales", scales, 1.0, params)
    frozen_tree = _values_by_pattern("phases: frozen", [(pattern, True) for pattern in frozen], False, params)
    rules = map_with_table(PARAM_RULES, lambda rule, leaf: rule, params)
    frozen_tree = jax.tree.map(lambda rule, is_frozen: rule.frozen or is_frozen, rules, frozen_tree)
    require(not all(jax.tree.leaves(frozen_tree)), f"phases: frozen {list(frozen)} leaves no parameter to train")
    if layer_decay != 1:
        scale_tree = _decay_by_layer(scale_tree, params, layer_decay)
    return jax.tree.map(
        lambda rule, scale, is_frozen: dataclasses.replace(rule, learning_rate_scale=scale, frozen=is_frozen),
        rules,
        scale_tree,
        frozen_tree,
    )


def _decay_by_layer(scale_tree: Any, params: Any, layer_decay: float) -> Any:
    """Multiply scales by layer_decay^(L + 1 - l) in layer l = 1..L, and by layer_decay^(L + 1) in the embeddings."""
    scales, leaves = name_leaves(scale_tree), name_leaves(params)
    depth = max((leaf.shape[0] for name, leaf in leaves.items() if name.startswith(LAYERS)), default=0)

    def decayed(name: str, leaf: Any) -> float | tuple[float, ...]:
        if name.startswith(LAYERS):
            return tuple(scales[name] * layer_decay ** (depth - i) for i in range(depth))
        return scales[name] * (layer_decay ** (depth + 1) if name.startswith(EMBEDDINGS) else 1.0)

    return map_with_paths(decayed, params)


def _values_by_pattern(field: str, table: Sequence[tuple[str, Any]], default: Any, params: Any) -> Any:
    """The value of every parameter in a user's table, after a check of the table's patterns."""
    for pattern, _ in table:
        try:
            re.compile(pattern)
            matched = map_with_table(((pattern, True), (".*", False)), lambda matches, leaf: matches, params)
        except re.error as error:
            raise UserError(f"{field}: '{pattern}' is not a regular expression: {error}") from None
        require(
            any(jax.tree.leaves(matched)),
            f"{field}: '{pattern}' matches the end of no parameter's path; similar are "
            f"{', '.join(_similar_ends(pattern, params))}",
        )
    return map_with_table((*table, (".*", default)), lambda value, leaf: value, params)


def _similar_ends(pattern: str, params: Any) -> list[str]:
    """Ends of parameter paths that are similar to a pattern."""
    parts = [name.split("/") for name in name_leaves(params)]
    ends = {"/".join(path[i:]): None for path in parts for i in range(len(path))}
    return difflib.get_close_matches(pattern, ends, n=3, cutoff=0)
