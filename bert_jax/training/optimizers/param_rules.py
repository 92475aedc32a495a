"""The one table that says how the optimizer treats each parameter, and what a config changes of it."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax.errors import UserError, require
from bert_jax.training.param_paths import map_with_table, name_leaves


@dataclass(frozen=True)
class Treatment:
    """How the optimizer treats a parameter."""

    decayed: bool
    """Whether weight decay applies."""
    tensor_axes: tuple[int, ...] = ()
    """Axes that count logical tensors: the stack of layers, and Q, K and V. LAMB's norms span the others."""
    learning_rate_scale: float = 1.0
    """Factor of its learning rate."""
    frozen: bool = False
    """Whether it stays as it is, and its moments too."""


# First match wins; a parameter that nothing matches is an error.
TREATMENTS: tuple[tuple[str, Treatment], ...] = (
    (r"layers/qkv/kernel", Treatment(decayed=True, tensor_axes=(0, 2))),
    (r"layers/qkv/bias", Treatment(decayed=False, tensor_axes=(0, 1))),
    (r"layers/\w+/kernel", Treatment(decayed=True, tensor_axes=(0,))),
    (r"layers/\w+/(bias|scale)", Treatment(decayed=False, tensor_axes=(0,))),
    (r"embeddings/(word|position|token_type)", Treatment(decayed=True)),
    (r"kernel", Treatment(decayed=True)),
    (r"bias|scale", Treatment(decayed=False)),
)


def treatments(params: Any, scales: tuple[tuple[str, float], ...] = (), frozen: tuple[str, ...] = ()) -> Any:
    """The treatment of every parameter, as a tree of the same structure.

    Args:
      params: parameters or their shapes; only their paths are read.
      scales: (pattern, factor of the learning rate), as in `OptimizerConfig.learning_rate_scales`; the first
        that matches counts.
      frozen: patterns of parameters that stay as they are, as in `Phase.frozen`.

    Raises:
      LookupError: a parameter that no rule of the table matches.
      UserError: a pattern that is no regular expression or matches no parameter; everything is frozen.
    """
    scaled = _choose("optimizer.learning_rate_scales", scales, 1.0, params)
    still = _choose("phases: frozen", [(pattern, True) for pattern in frozen], False, params)
    require(not all(jax.tree.leaves(still)), f"phases: frozen {list(frozen)} leaves no parameter to train")
    rules = map_with_table(TREATMENTS, lambda treatment, leaf: treatment, params)
    return jax.tree.map(
        lambda rule, scale, stays: dataclasses.replace(rule, learning_rate_scale=scale, frozen=stays),
        rules,
        scaled,
        still,
    )


def _choose(field: str, table: Sequence[tuple[str, Any]], default: Any, params: Any) -> Any:
    """What a user's table says of every parameter, each of its patterns checked."""
    for pattern, _ in table:
        try:
            re.compile(pattern)
            matched = map_with_table(((pattern, True), (".*", False)), lambda matches, leaf: matches, params)
        except re.error as error:
            raise UserError(f"{field}: '{pattern}' is no regular expression: {error}") from None
        require(
            any(jax.tree.leaves(matched)),
            f"{field}: '{pattern}' is no end of a parameter's path; near are {', '.join(_near(pattern, params))}",
        )
    return map_with_table((*table, (".*", default)), lambda value, leaf: value, params)


def _near(pattern: str, params: Any) -> list[str]:
    """Ends of parameters' paths that look like a pattern."""
    parts = [name.split("/") for name in name_leaves(params)]
    ends = {"/".join(path[i:]): None for path in parts for i in range(len(path))}
    return difflib.get_close_matches(pattern, ends, n=3, cutoff=0)
