"""Whether what was written is, bit for bit, what was read."""

import jax
import numpy as np

from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import first_different_field
from bert_jax.training.param_paths import name_leaves


def differences(before: SourceModel, after: SourceModel) -> tuple[str, ...]:
    """What two models differ in, a line each; none: they are the same, moments included.

    Args:
      before: what was converted.
      after: what was written, read again.
    """
    was, now, found = before.model, after.model, []
    name = first_different_field(was.config, now.config)
    if name is not None:
        found.append(f"model.{name} was {getattr(was.config, name)} and is {getattr(now.config, name)}")
    parts = [
        (heads.mlm, heads.mlm_activation, heads.pair, heads.has_pooler, heads.task) for heads in (was.heads, now.heads)
    ]
    if parts[0] != parts[1]:
        found.append(f"the heads were {was.heads} and are {now.heads}")
    found += _other_leaves("parameter", was.params, now.params)
    if before.optimizer_state is not None and after.optimizer_state is not None:
        if before.optimizer_state.step != after.optimizer_state.step:
            found.append(
                f"{before.optimizer_state.step} updates were behind the moments, and are {after.optimizer_state.step}"
            )
        found += _other_leaves("moment", before.optimizer_state[1:], after.optimizer_state[1:])
    elif (before.optimizer_state is None) != (after.optimizer_state is None):
        found.append("only one of both has moments")
    return tuple(found)


def _other_leaves(what: str, before: object, after: object) -> list[str]:
    was, now = (name_leaves(tree) for tree in (before, after))
    names = [name for name in was.keys() | now.keys() if not _same(was.get(name), now.get(name))]
    return [f"{what} {min(names)} is another ({len(names)} are)"] if names else []


def _same(one: jax.Array | np.ndarray | None, two: jax.Array | np.ndarray | None) -> bool:
    return one is not None and two is not None and np.array_equal(one, two, equal_nan=True)
