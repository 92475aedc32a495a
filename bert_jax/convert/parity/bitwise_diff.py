"""Differences between two models, compared bit for bit."""

import jax
import numpy as np

from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import first_different_field
from bert_jax.training.param_paths import name_leaves


def differences(before: SourceModel, after: SourceModel) -> tuple[str, ...]:
    """Compare config, heads, parameters and optimizer state; one line per difference, empty if they are equal.

    Args:
      before: the source.
      after: the converted model, read again.
    """
    old, new, lines = before.model, after.model, []
    name = first_different_field(old.config, new.config)
    if name is not None:
        lines.append(f"model.{name} was {getattr(old.config, name)} and is {getattr(new.config, name)}")
    parts = [
        (heads.mlm, heads.mlm_activation, heads.pair, heads.has_pooler, heads.task) for heads in (old.heads, new.heads)
    ]
    if parts[0] != parts[1]:
        lines.append(f"the heads were {old.heads} and are {new.heads}")
    lines += _different_leaves("parameter", old.params, new.params)
    if before.optimizer_state is not None and after.optimizer_state is not None:
        if before.optimizer_state.step != after.optimizer_state.step:
            lines.append(f"the moments had {before.optimizer_state.step} steps and have {after.optimizer_state.step}")
        lines += _different_leaves("moment", before.optimizer_state[1:], after.optimizer_state[1:])
    elif (before.optimizer_state is None) != (after.optimizer_state is None):
        lines.append("only one of the two has moments")
    return tuple(lines)


def _different_leaves(what: str, before: object, after: object) -> list[str]:
    old, new = (name_leaves(tree) for tree in (before, after))
    names = [name for name in old.keys() | new.keys() if not _equal(old.get(name), new.get(name))]
    return [f"{what} {min(names)} differs ({len(names)} in all)"] if names else []


def _equal(a: jax.Array | np.ndarray | None, b: jax.Array | np.ndarray | None) -> bool:
    return a is not None and b is not None and np.array_equal(a, b, equal_nan=True)
