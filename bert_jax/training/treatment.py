"""The one table that says how the optimizer treats each parameter."""

from dataclasses import dataclass
from typing import Any

from bert_jax.training.paths import map_with_table


@dataclass(frozen=True)
class Treatment:
    """How the optimizer treats a parameter."""

    decayed: bool
    """Whether weight decay applies."""
    tensor_axes: tuple[int, ...] = ()
    """Axes that count logical tensors: the stack of layers, and Q, K and V. LAMB's norms span the others."""


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


def treatments(params: Any) -> Any:
    """The treatment of every parameter, as a tree of the same structure.

    Raises:
      LookupError: a parameter that no rule of the table matches.
    """
    return map_with_table(TREATMENTS, lambda treatment, leaf: treatment, params)
