"""Learning rate as a function of the update, over all phases of a run."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from bert_jax.config import Phase
from bert_jax.shapes import Array, Float, Int

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def learning_rate(phases: Sequence[Phase]) -> Schedule:
    """Linear warmup, then polynomial decay; each phase counts its own updates from 0.

    Update n of a phase (n = 0 is its first) gets, for n < warmup, peak * n / warmup, and after that
    end + (peak - end) * (1 - n / steps) ** power: google-research/bert optimization.py, where the decay
    also runs from update 0 and is merely covered by the warmup.
    """
    starts = [sum(phase.steps for phase in phases[:i]) for i in range(len(phases))]

    def schedule(step: Int[Array, ""]) -> Float[Array, ""]:
        rate = jnp.float32(0)
        for start, phase in zip(starts, phases, strict=True):
            rate = jnp.where(step >= start, _within(phase, step - start), rate)
        return rate

    return schedule


def _within(phase: Phase, step: Int[Array, ""]) -> Float[Array, ""]:
    progress = jnp.clip(step / phase.steps, 0.0, 1.0)
    span = phase.learning_rate - phase.end_learning_rate
    decayed = phase.end_learning_rate + span * (1.0 - progress) ** phase.decay_power
    warming = phase.learning_rate * step / max(1, phase.warmup_steps)
    return jnp.where(step < phase.warmup_steps, warming, decayed).astype(jnp.float32)
