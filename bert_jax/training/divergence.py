"""Divergence detection: the running average of the loss, counts of skipped steps, and the bounds on both."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float
from bert_jax.config import RecoveryConfig


class DivergenceState(NamedTuple):
    """Part of the training state, so that a resumed run detects the same as an uninterrupted one. All scalars."""

    skipped_steps: Any
    """Steps skipped since the start of the run, int32."""
    consecutive_skipped: Any
    """Skipped steps since the last step that was applied, int32."""
    finite_losses: Any
    """Number of finite losses since the phase began, int32."""
    average: Any
    """Running average of the finite losses, float32."""
    lowest: Any
    """Lowest value of `average` in this phase, float32."""


def init_divergence_state() -> DivergenceState:
    """The state before the first step: all zeros."""
    zero, none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return DivergenceState(zero, zero, zero, none, none)


def reset_for_phase(state: DivergenceState) -> DivergenceState:
    """Reset the average: losses of phases with different rows or depth are not comparable. Counts of skips are kept."""
    return init_divergence_state()._replace(
        skipped_steps=state.skipped_steps, consecutive_skipped=state.consecutive_skipped
    )


def update_divergence_state(
    state: DivergenceState, loss: Float[Array, ""], skipped: Bool[Array, ""], span: int
) -> tuple[DivergenceState, Float[Array, ""]]:
    """The divergence state after a step, and the rise of its loss above the lowest average before it, in nats.

    The rise is 0 for a loss that is not finite and for the first loss of a phase.

    Args:
      state: before the step.
      loss: of the step.
      skipped: whether the step was skipped.
      span: number of steps in the average (fewer at the beginning of a phase).
    """
    finite = jnp.isfinite(loss)
    rise = jnp.where(finite & (state.finite_losses > 0), loss - state.lowest, 0.0)
    finite_losses = state.finite_losses + finite
    average = state.average + (loss - state.average) / jnp.clip(finite_losses, 1, span)
    lowest = jnp.where(state.finite_losses > 0, jnp.minimum(state.lowest, average), average)
    missed = skipped.astype(jnp.int32)
    after = DivergenceState(
        skipped_steps=state.skipped_steps + missed,
        consecutive_skipped=jnp.where(skipped, state.consecutive_skipped + 1, 0),
        finite_losses=finite_losses,
        average=jnp.where(finite, average, state.average),
        lowest=jnp.where(finite, lowest, state.lowest),
    )
    return after, rise


class DivergenceError(Exception):
    """Training diverged: the state must not be used further."""

    def __init__(self, first: int, last: int, reason: str):
        super().__init__(reason)
        self.first, self.last, self.reason = first, last, reason
        """Steps, counted from 1: the first bad step and the step at which the divergence was detected."""


def check_divergence(step: int, loss: float, consecutive_skipped: int, rise: float, recovery: RecoveryConfig) -> None:
    """Raise DivergenceError if the metrics of step `step`, counted from 1, are out of bounds.

    Args:
      step: number of steps done, this one included.
      loss: of the step.
      consecutive_skipped: skipped steps in a row, up to and including this one.
      rise: of the loss, as returned by `update_divergence_state`.
      recovery: the bounds.
    """
    if consecutive_skipped >= recovery.max_skipped:
        first = step - consecutive_skipped + 1
        reason = f"loss or gradient was not finite in {consecutive_skipped} steps in a row, {first} to {step}"
        raise DivergenceError(first, step, reason)
    if recovery.spike is not None and rise > recovery.spike:
        above = f"{rise:.2f} above the lowest average of its phase (recovery.spike {recovery.spike:g})"
        raise DivergenceError(step, step, f"the loss of step {step} was {loss:.2f}, {above}")
