"""Phases that end by the clock: how many updates the time allows for, decided as the run goes, kept in the ledger.

The schedule of such a phase is stretched over the updates that it will have. How many is estimated from the speed so
far, again and again; each estimate is written down before it is used, so that a resumed run has the same rates.
"""

import time
from collections.abc import Callable
from typing import Any

import jax

from bert_jax.config import Config
from bert_jax.training.optimizers.schedules import learning_rate
from bert_jax.training.run_directory.ledger import Ledger

EVENT = "time"
FIRST, UNTIMED = 10, 2
"""The speed is looked at first behind so many updates, of which the first ones, which compile, do not count."""
ASKED_EVERY = 10
"""Updates; how often several processes ask the first one."""
SHARE = 0.01
"""Of the time; so often the speed is looked at again."""


class Budget:
    """Learning rate and end of a run."""

    def __init__(self, config: Config, ledger: Ledger, clock: Callable[[], float] = time.monotonic):
        """Continues from what the ledger says.

        Args:
          config: of the run.
          ledger: read and added to.
          clock: seconds.
        """
        self.config, self.ledger, self.clock = config, ledger, clock
        self.phase, self.start = config.phases[-1], config.total_steps - config.phases[-1].steps
        self._began: float | None = None  # on the clock, when the phase had taken no time
        self._calls = 0
        self._timed = (0, 0.0)  # update and time from which the speed is measured

    @property
    def end(self) -> int:
        """Updates that the run has, as far as is known now. Estimates for other hours do not count."""
        decisions = [one for one in self.ledger.of(EVENT) if one["hours"] == self.phase.hours]
        return min(decisions[-1]["end"] if decisions else self.config.total_steps, self.config.total_steps)

    def rate(self, step: int) -> float:
        """Learning rate of the update behind `step` updates."""
        return rate(self.config, self.ledger.of(EVENT), step)

    def look(self, step: int) -> None:
        """Called before the update behind `step` updates, which is done in any case: decide anew if it is time to.

        Of several processes the first one's clock decides, and all ask it, now and then.
        """
        if self.phase.hours is None or step < self.start:
            return
        if jax.process_count() == 1 or (step - self.start) % ASKED_EVERY == 0:
            self.ledger.decide(EVENT, lambda: self._decision(step))

    def _decision(self, step: int) -> dict[str, Any] | None:
        decisions, now = self.ledger.of(EVENT), self.clock()
        last = decisions[-1] if decisions else {"update": self.start, "seconds": 0.0}
        if self._began is None:
            self._began = now - last["seconds"]
        if self._calls == UNTIMED:
            self._timed = step, now
        self._calls += 1
        first = all(one["hours"] != self.phase.hours for one in decisions)
        seconds, total = now - self._began, 3600 * self.phase.hours
        due = seconds - last["seconds"] >= SHARE * total or (first and step - self.start >= FIRST)
        if self._calls <= UNTIMED + 1 or step <= last["update"] or not due:
            return None
        speed = (step - self._timed[0]) / (now - self._timed[1])
        end = min(step + max(1, round((total - seconds) * speed)), self.config.total_steps)
        self._timed = step, now
        return {"update": step, "hours": self.phase.hours, "seconds": round(seconds, 3), "end": end}


def rate(config: Config, decisions: list[dict[str, Any]], step: int) -> float:
    """Learning rate of the update after `step` updates.

    Args:
      config: of the run.
      decisions: the `EVENT`s of its ledger.
      step: counted over all phases.
    """
    phase, done = config.place_of(step)
    timed = config.phases[phase].hours is not None
    return learning_rate(config.phases[phase], _stretched(config, decisions, step) if timed else done)


def _stretched(config: Config, decisions: list[dict[str, Any]], step: int) -> float:
    """Where in its schedule the last phase is: the part that is left is spread evenly over the updates left."""
    steps = config.phases[-1].steps
    at, place, end = config.total_steps - steps, 0.0, config.total_steps
    for decision in decisions:
        if decision["update"] > step:
            break
        place += (steps - place) * min(1.0, (decision["update"] - at) / max(end - at, 1))
        at, end = decision["update"], decision["end"]
    return place + (steps - place) * min(1.0, (step - at) / max(end - at, 1))
