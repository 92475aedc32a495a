"""Learning rate as a function of the step. Computed on the host, without jax or numpy."""

import math

from bert_jax.config import Config, Phase


def learning_rate(phase: Phase, step: float) -> float:
    """Learning rate of one step of a phase.

    While `step` < `warmup_steps` it rises linearly; afterwards it decays, by the phase's `decay`, from `decay_start`
    to the end of the phase. The defaults are those of google-research/bert optimization.py, where the decay also
    begins at step 0 and warmup replaces its beginning.

    Args:
      phase: with the schedule.
      step: counted from 0 at the start of the phase. It can be fractional: the schedule of a phase with a time limit
        is stretched. After the end of the phase the rate is constant.
    """
    peak, end = phase.learning_rate, phase.end_learning_rate
    if step < phase.warmup_steps:
        return peak * (step + phase.warmup_done) / (phase.warmup_steps + phase.warmup_done)
    t = min(max((step - phase.decay_start) / (phase.steps - phase.decay_start), 0.0), 1.0)
    match phase.decay:
        case "polynomial":
            share = (1 - t) ** phase.decay_power
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * t))
        case "sqrt":
            share = 1 - math.sqrt(t)
        case "constant":
            share = 1.0
    return end + (peak - end) * share


def learning_rate_at(config: Config, step: int) -> float:
    """Learning rate of step `step` of a run, counted from 0. Every phase has its own schedule."""
    phase, within = config.locate_step(step)
    return learning_rate(config.phases[phase], within)
