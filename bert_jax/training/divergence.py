"""Divergence detection: the running average of the loss, counts of skipped steps, and the bounds on both."""

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float
from bert_jax.config import RecoveryConfig
from bert_jax.errors import UserError

SKIP_SPAN = 100
"""Steps in the running average of the share of skipped steps."""
NOISE_FACTOR = 4.0
"""Losses may be above the lowest average by this many mean differences between successive losses: 4.5 standard
deviations if losses are independent and normally distributed."""
IN_A_ROW = 3
"""Finite losses in a row that must be too high: of the few tokens of a small batch, single losses can be many times the
mean difference."""


class DivergenceState(NamedTuple):
    """Part of the training state, so that a resumed run detects the same as an uninterrupted one.

    All are scalars but `last_losses`.
    """

    skipped_steps: Any
    """Steps skipped since the start of the run, int32."""
    consecutive_skipped: Any
    """Skipped steps since the last step that was applied, int32."""
    skipped_share: Any
    """Running average of skipped (1) and applied (0) steps over SKIP_SPAN steps, from 0 at the start, float32."""
    finite_losses: Any
    """Number of finite losses since the phase began, int32."""
    last_losses: Any
    """The last finite losses, newest first, float32[IN_A_ROW - 1]."""
    average: Any
    """Running average of the finite losses, float32."""
    noise: Any
    """Running average of the absolute difference between successive finite losses, float32. Unlike a standard
    deviation it hardly depends on a trend of the loss, nor on one jump."""
    lowest: Any
    """Lowest value of `average` in this phase, each with an allowance for its own noise, float32."""


class StepMeasures(NamedTuple):
    """What `check_divergence` reads after a step, and the count that is logged. All scalars."""

    skipped_steps: Any
    consecutive_skipped: Any
    skipped_share: Any
    """Those of the state after the step."""
    loss_rise: Any
    """The least of the last IN_A_ROW finite losses above `lowest` before the step, in nats; 0 if this loss is not
    finite or one of the phase's first IN_A_ROW."""
    average_rise: Any
    """The average after the step above `lowest`, in nats."""
    noise_bound: Any
    """`loss_rise` up to this value is noise, in nats."""


def init_divergence_state() -> DivergenceState:
    """The state before the first step: all zeros."""
    zero, none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return DivergenceState(zero, zero, none, zero, jnp.zeros(IN_A_ROW - 1, jnp.float32), none, none, none)


def reset_for_phase(state: DivergenceState) -> DivergenceState:
    """Reset the average: losses of phases with different rows or depth are not comparable. Counts of skips are kept."""
    return init_divergence_state()._replace(
        skipped_steps=state.skipped_steps,
        consecutive_skipped=state.consecutive_skipped,
        skipped_share=state.skipped_share,
    )


def update_divergence_state(
    state: DivergenceState, loss: Float[Array, ""], skipped: Bool[Array, ""], span: int
) -> tuple[DivergenceState, StepMeasures]:
    """The divergence state after a step, and the measures of the step.

    Args:
      state: before the step.
      loss: of the step.
      skipped: whether the step was skipped.
      span: number of steps in the averages of the loss (fewer at the beginning of a phase).
    """
    finite, before = jnp.isfinite(loss), state.finite_losses
    count = before + 1
    average = state.average + (loss - state.average) / jnp.clip(count, 1, span)
    differences = jnp.clip(before, 1, None)
    noise = state.noise + (jnp.abs(loss - state.last_losses[0]) - state.noise) / jnp.clip(differences, 1, span)
    noise = jnp.where(before > 0, noise, 0.0)
    # The average of few losses is itself noisy, and the lowest of many such averages would be too low.
    allowed = average + NOISE_FACTOR * noise / jnp.sqrt(jnp.clip(count, 1, span))
    lowest = jnp.where(before > 1, jnp.minimum(state.lowest, allowed), allowed)
    missed = skipped.astype(jnp.int32)
    after = DivergenceState(
        skipped_steps=state.skipped_steps + missed,
        consecutive_skipped=jnp.where(skipped, state.consecutive_skipped + 1, 0),
        skipped_share=state.skipped_share + (missed - state.skipped_share) / SKIP_SPAN,
        finite_losses=jnp.where(finite, count, before),
        last_losses=jnp.where(finite, jnp.concatenate([loss[None], state.last_losses[:-1]]), state.last_losses),
        average=jnp.where(finite, average, state.average),
        noise=jnp.where(finite, noise, state.noise),
        lowest=jnp.where(finite, lowest, state.lowest),
    )
    least = jnp.minimum(loss, state.last_losses.min())
    measures = StepMeasures(
        skipped_steps=after.skipped_steps,
        consecutive_skipped=after.consecutive_skipped,
        skipped_share=after.skipped_share,
        loss_rise=jnp.where(finite & (before >= IN_A_ROW), least - state.lowest, 0.0),
        average_rise=jnp.where(finite & (before > 1), average - state.lowest, 0.0),
        # An average of one difference, or of a few, may be much too small.
        noise_bound=NOISE_FACTOR * state.noise * (1.0 + 4.0 / jnp.clip(before - 1, 1, None)),
    )
    return after, measures


class RollbackError(Exception):
    """The state must not be used further: the run rolls back to a checkpoint."""

    event: ClassVar[str]
    """For `OnEvent`."""
    what: ClassVar[str]
    """What has happened, in a message."""
    advice: ClassVar[str]
    """What to do if it happens again and again."""

    def __init__(self, first: int, last: int, reason: str):
        super().__init__(reason)
        self.first, self.last, self.reason = first, last, reason
        """Steps, counted from 1: the first bad step and the step at which it was detected."""


class DivergenceError(RollbackError):
    """Training diverged."""

    event, what = "divergence", "training diverged"
    advice = "lower the learning rate or lengthen the warmup, in another --workdir"


class DivergedError(UserError):
    """Training diverged, or its state is corrupted, and does not recover."""


def check_divergence(step: int, loss: float, measures: StepMeasures, recovery: RecoveryConfig) -> None:
    """Raise if a step is out of bounds.

    Args:
      step: number of steps done, this one included.
      loss: of the step.
      measures: of the step, numbers.
      recovery: the bounds.

    Raises:
      DivergenceError: the run must be rolled back.
      DivergedError: too many steps are skipped, though not in a row; other rows would not help.
    """
    if measures.consecutive_skipped >= recovery.max_skipped:
        first = step - measures.consecutive_skipped + 1
        reason = f"loss or gradient was not finite in {measures.consecutive_skipped} steps in a row, {first} to {step}"
        raise DivergenceError(first, step, reason)
    # While steps are skipped in a row, the bound above decides.
    if not measures.consecutive_skipped and measures.skipped_share > recovery.max_skipped_share:
        raise DivergedError(
            f"training stops at step {step}: loss or gradient was not finite in {measures.skipped_steps} steps, a "
            f"share of {measures.skipped_share:.0%} of the last {SKIP_SPAN} (recovery.max_skipped_share "
            f"{recovery.max_skipped_share:g}): lower the learning rate, lengthen the warmup or set "
            "--model.compute-dtype float32, in another --workdir"
        )
    if recovery.spike is None:
        return
    above = f"above the lowest average of its phase (recovery.spike {recovery.spike:g}"
    if measures.loss_rise > max(recovery.spike, measures.noise_bound):
        reason = (
            f"{IN_A_ROW} losses in a row up to step {step}, the last one {loss:.2f}, were {measures.loss_rise:.2f} or "
            f"more {above}, noise {measures.noise_bound:.2f})"
        )
        raise DivergenceError(step - IN_A_ROW + 1, step, reason)
    if measures.average_rise > recovery.spike:
        reason = f"the average loss at step {step} was {measures.average_rise:.2f} {above})"
        raise DivergenceError(step, step, reason)
