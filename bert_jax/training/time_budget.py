"""Phases with a time limit: estimates of the number of steps that fit, kept in the ledger.

The schedule of such a phase is stretched over the estimated number of steps. The estimate is updated repeatedly from
the speed so far; each one is written to the ledger before its first use, so that a resumed run has the same rates.
"""

import time
from collections.abc import Callable
from typing import Any

import jax

from bert_jax.config import Config
from bert_jax.training.optimizers.schedules import learning_rate
from bert_jax.training.run_directory.ledger import Ledger

EVENT = "time"
FIRST_ESTIMATE, UNTIMED_STEPS = 10, 2
"""Steps before the first estimate, and how many of them, which include compilation, are not timed."""
BROADCAST_EVERY = 10
"""Steps between estimates of several processes: each needs a broadcast from the first process."""
ESTIMATE_INTERVAL = 0.01
"""Smallest time between two estimates, as a share of the time limit."""


class WallClockSchedule:
    """Learning rates and last step of a run whose last phase may have a time limit."""

    def __init__(self, config: Config, ledger: Ledger, clock: Callable[[], float] = time.monotonic):
        """Continue from the estimates in the ledger.

        Args:
          config: of the run.
          ledger: of the run; estimates are added to it.
          clock: monotonic time in seconds.
        """
        self.config, self.ledger, self.clock = config, ledger, clock
        self.phase, self.start = config.phases[-1], config.total_steps - config.phases[-1].steps
        self._began: float | None = None  # clock time minus the seconds that the phase has taken
        self._calls = 0
        self._timed = (0, 0.0)  # step and time from which the speed is measured

    @property
    def end_step(self) -> int:
        """Current estimate of the run's total steps. Estimates for another time limit are ignored."""
        decisions = [one for one in self.ledger.entries_of(EVENT) if one["hours"] == self.phase.hours]
        return min(decisions[-1]["end"] if decisions else self.config.total_steps, self.config.total_steps)

    def learning_rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        return timed_learning_rate_at(self.config, self.ledger.entries_of(EVENT), step)

    def update_estimate(self, step: int) -> None:
        """Update the estimate of the number of steps if one is due. Called before step `step`, which is always done.

        With several processes the first one's clock counts, and all synchronise every `BROADCAST_EVERY` steps.
        """
        if self.phase.hours is None or step < self.start:
            return
        if jax.process_count() == 1 or (step - self.start) % BROADCAST_EVERY == 0:
            self.ledger.make_decision(EVENT, lambda: self._estimate(step))

    def _estimate(self, step: int) -> dict[str, Any] | None:
        decisions, now = self.ledger.entries_of(EVENT), self.clock()
        last = decisions[-1] if decisions else {"step": self.start, "seconds": 0.0}
        if self._began is None:
            self._began = now - last["seconds"]
        if self._calls == UNTIMED_STEPS:
            self._timed = step, now
        self._calls += 1
        first = all(one["hours"] != self.phase.hours for one in decisions)
        seconds, total = now - self._began, 3600 * self.phase.hours
        due = seconds - last["seconds"] >= ESTIMATE_INTERVAL * total or (first and step - self.start >= FIRST_ESTIMATE)
        if self._calls <= UNTIMED_STEPS + 1 or step <= last["step"] or not due:
            return None
        speed = (step - self._timed[0]) / (now - self._timed[1])
        end = min(step + max(1, round((total - seconds) * speed)), self.config.total_steps)
        self._timed = step, now
        return {"step": step, "hours": self.phase.hours, "seconds": round(seconds, 3), "end": end}


def timed_learning_rate_at(config: Config, decisions: list[dict[str, Any]], step: int) -> float:
    """Learning rate of step `step`.

    Args:
      config: of the run.
      decisions: entries of kind `EVENT` in its ledger.
      step: counted from 0 over all phases.
    """
    phase, done = config.locate_step(step)
    timed = config.phases[phase].hours is not None
    return learning_rate(config.phases[phase], _stretched(config, decisions, step) if timed else done)


def _stretched(config: Config, decisions: list[dict[str, Any]], step: int) -> float:
    """Position in the last phase's schedule: each estimate spreads the rest of the schedule over the steps left."""
    steps = config.phases[-1].steps
    at, position, end = config.total_steps - steps, 0.0, config.total_steps
    for decision in decisions:
        if decision["step"] > step:
            break
        position += (steps - position) * min(1.0, (decision["step"] - at) / max(end - at, 1))
        at, end = decision["step"], decision["end"]
    return position + (steps - position) * min(1.0, (step - at) / max(end - at, 1))
