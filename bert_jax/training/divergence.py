"""What an update remembers of the losses before it, and what counts as trouble."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from bert_jax.config import RescueConfig
from bert_jax.shapes import Array, Bool, Float


class Watch(NamedTuple):
    """Part of the training state, so that a resumed run judges as an undisturbed one. All scalars."""

    skipped: Any
    """Updates skipped since the start of the run, int32."""
    in_a_row: Any
    """How many of them are the last ones, int32."""
    seen: Any
    """Finite losses since the phase began, int32."""
    average: Any
    """Running average of them, float32."""
    lowest: Any
    """The lowest that it ever was in this phase, float32."""


def new_watch() -> Watch:
    """Nothing was seen yet."""
    zero, none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Watch(zero, zero, zero, none, none)


def new_phase(watch: Watch) -> Watch:
    """Losses of the next phase are not compared with those of the last: its rows or its depth are others."""
    return new_watch()._replace(skipped=watch.skipped, in_a_row=watch.in_a_row)


def observe(
    watch: Watch, loss: Float[Array, ""], skipped: Bool[Array, ""], span: int
) -> tuple[Watch, Float[Array, ""]]:
    """The watch after an update, and how far its loss lies above the lowest average before it, in nats.

    A loss that is not finite, and the first of a phase, lie above nothing.

    Args:
      watch: before the update.
      loss: of the update.
      skipped: whether the update was not applied.
      span: updates that the average spans (fewer at the beginning of a phase).
    """
    finite = jnp.isfinite(loss)
    rise = jnp.where(finite & (watch.seen > 0), loss - watch.lowest, 0.0)
    seen = watch.seen + finite
    average = watch.average + (loss - watch.average) / jnp.clip(seen, 1, span)
    lowest = jnp.where(watch.seen > 0, jnp.minimum(watch.lowest, average), average)
    missed = skipped.astype(jnp.int32)
    after = Watch(
        skipped=watch.skipped + missed,
        in_a_row=jnp.where(skipped, watch.in_a_row + 1, 0),
        seen=seen,
        average=jnp.where(finite, average, watch.average),
        lowest=jnp.where(finite, lowest, watch.lowest),
    )
    return after, rise


class TroubleError(Exception):
    """Training went wrong: the state must not be used further."""

    def __init__(self, first: int, last: int, reason: str):
        super().__init__(reason)
        self.first, self.last, self.reason = first, last, reason
        """Updates, counted from 1: the first bad one and the one at which it was noticed."""


def check(step: int, loss: float, in_a_row: int, rise: float, rescue: RescueConfig) -> None:
    """Raise TroubleError if update `step`, counted from 1, shows it.

    Args:
      step: updates done with this one.
      loss: of the update.
      in_a_row: skipped updates up to and with this one.
      rise: what `observe` returned.
      rescue: the bounds.
    """
    if in_a_row >= rescue.max_skipped:
        reason = f"loss or gradient was not finite in {in_a_row} updates in a row, {step - in_a_row + 1} to {step}"
        raise TroubleError(step - in_a_row + 1, step, reason)
    if rescue.spike is not None and rise > rescue.spike:
        above = f"{rise:.2f} above the lowest average of its phase (rescue.spike {rescue.spike:g})"
        raise TroubleError(step, step, f"the loss of update {step} was {loss:.2f}, {above}")
