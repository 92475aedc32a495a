"""Learning rate as a function of the update. The host computes it; neither jax nor numpy is needed."""

import math

from bert_jax.config import Config, Phase


def learning_rate(phase: Phase, step: float) -> float:
    """Learning rate of one update of a phase.

    While `step` < `warmup_steps` it rises linearly; afterwards it falls, by the phase's `decay`, over the way from
    `decay_start` to the phase's end. With the defaults that is google-research/bert optimization.py, where the
    decay also runs from update 0 and is merely covered by the warmup.

    Args:
      phase: whose schedule.
      step: update, 0 being the phase's first. It need not be whole: a phase that ends by the clock is stretched.
        Behind the phase's end the rate stays what it is there.
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
    """Learning rate of an update of a run, 0 being the first. Every phase starts its schedule anew."""
    phase, within = config.place_of(step)
    return learning_rate(config.phases[phase], within)
