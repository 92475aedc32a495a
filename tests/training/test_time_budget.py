"""Phases with a time limit, with a clock that the test sets."""

import dataclasses
import itertools

import numpy as np
import pytest

from bert_jax.config import Config, Phase
from bert_jax.training import time_budget
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.run_directory.metrics import read_metrics
from bert_jax.training.time_budget import FIRST_ESTIMATE, WallClockSchedule

HOUR = 3600.0


def timed(hours: float = 1.0, steps: int = 100_000, before: int = 0) -> Config:
    """A phase by the clock, after `before` steps of another one."""
    phase = Phase(steps=steps, learning_rate=1.0, warmup_steps=steps // 10, decay_start=steps // 10, hours=hours)
    others = (Phase(steps=before, learning_rate=0.5, warmup_steps=0),) if before else ()
    return Config(name="timed", phases=(*others, phase))


class Machine:
    """Runs a schedule at a given speed; `seconds` is its clock."""

    def __init__(self, config: Config, path, seconds: float = 0.0):
        self.seconds = seconds
        self.schedule = WallClockSchedule(config, Ledger(path), clock=lambda: self.seconds)

    def run(self, step: int, until: float, seconds_per_step: float) -> tuple[int, list[float]]:
        """Steps until the end, or until the clock shows `until`; the step count at that time, and the rates used."""
        rates = []
        while step < self.schedule.end_step and self.seconds < until:
            self.schedule.update_estimate(step)
            rates.append(self.schedule.learning_rate(step))
            self.seconds += seconds_per_step
            step += 1
        return step, rates


@pytest.mark.parametrize("speed", [3.0, 7.0])
def test_the_time_is_used_whatever_the_speed(tmp_path, speed):
    machine = Machine(timed(), tmp_path / "ledger")
    steps, rates = machine.run(0, np.inf, speed)
    assert machine.seconds == pytest.approx(HOUR, rel=0.01) and steps == pytest.approx(HOUR / speed, rel=0.01)
    # The schedule as a whole: up to the peak at a tenth of the time, and down to nearly nothing.
    peak = int(np.argmax(rates))
    assert peak / steps == pytest.approx(0.1, abs=0.02) and 0.97 < max(rates) <= 1.0
    assert rates[-1] < 0.01 and np.abs(np.diff(rates[FIRST_ESTIMATE + 2 :])).max() < 0.02


def test_a_machine_that_slows_down(tmp_path):
    machine = Machine(timed(), tmp_path / "ledger")
    step, fast = machine.run(0, HOUR / 2, 3.0)
    step, slow = machine.run(step, np.inf, 12.0)
    assert machine.seconds == pytest.approx(HOUR, rel=0.02) and len(slow) == pytest.approx(len(fast) / 4, rel=0.05)
    # Half the time is half the schedule, and no rate jumps where the speed does.
    assert fast[-1] == pytest.approx(5 / 9, abs=0.02) and slow[0] == pytest.approx(fast[-1], abs=0.005)
    assert slow[-1] < 0.02


def test_compiling_is_no_speed(tmp_path):
    """The first step takes ten minutes; the first estimate knows better."""
    machine = Machine(timed(), tmp_path / "ledger")
    machine.run(0, 1.0, 600.0)
    machine.run(1, 1000.0, 5.0)
    first = machine.schedule.ledger.entries_of("time")[0]
    assert first["step"] <= FIRST_ESTIMATE and first["end"] == pytest.approx((HOUR - 600) / 5, rel=0.01)


def test_a_resumed_run_has_the_same_rates_and_less_time(tmp_path):
    """What was done again costs time, but the rates of those steps are what they were."""
    config = timed(before=50)
    whole = Machine(config, tmp_path / "whole")
    step, rates = whole.run(50, HOUR / 3, 6.0)  # up to an estimate, after which another clock makes others
    again = Machine(config, tmp_path / "whole", seconds=1e6)  # another process, another clock
    assert [again.schedule.learning_rate(s) for s in range(50, step)] == rates
    resumed = step - 60
    last, redone = again.run(resumed, np.inf, 6.0)
    assert redone[:60] == rates[resumed - 50 :]
    assert last - 50 == pytest.approx(HOUR / 6 - 60, rel=0.02)
    assert [entry["step"] for entry in again.schedule.ledger.entries_of("time")] == sorted(
        entry["step"] for entry in again.schedule.ledger.entries_of("time")
    )


def test_a_run_that_the_clock_ended_gets_more_hours(tmp_path):
    """With a constant rate; its steps so far keep their rates."""
    config = dataclasses.replace(timed(), phases=(dataclasses.replace(timed().phases[0], decay="constant"),))
    first = Machine(config, tmp_path / "ledger")
    step, rates = first.run(0, np.inf, 20.0)
    longer = dataclasses.replace(config, phases=(dataclasses.replace(config.phases[0], hours=3.0),))
    machine = Machine(longer, tmp_path / "ledger", seconds=5.0)
    assert first.schedule.end_step == step and [machine.schedule.learning_rate(s) for s in range(step)] == rates
    last, more = machine.run(step, np.inf, 20.0)
    assert last == pytest.approx(3 * step, rel=0.02) and set(more) == {1.0}


def test_phases_without_hours_have_no_decisions(tmp_path):
    config = dataclasses.replace(timed(), phases=(Phase(steps=5), Phase(steps=7, learning_rate=2.0, warmup_steps=0)))
    machine = Machine(config, tmp_path / "ledger")
    steps, rates = machine.run(0, np.inf, 1e9)
    assert steps == 12 and not (tmp_path / "ledger").exists() and rates[5] == 2.0


@pytest.mark.slow
def test_a_run_that_the_clock_ends(tiny_config, train, tmp_path, monkeypatch):
    """Every reading of the clock takes a minute: an hour has 60 steps. A finished run does nothing more."""
    phase = dataclasses.replace(tiny_config.phases[0], steps=1000, warmup_steps=100, hours=0.5)
    config = dataclasses.replace(tiny_config, phases=(phase,))
    minutes = itertools.count()
    original = time_budget.WallClockSchedule.__init__
    monkeypatch.setattr(
        time_budget.WallClockSchedule,
        "__init__",
        lambda self, *args: original(self, *args, clock=lambda: 60.0 * next(minutes)),
    )

    progress = train(config, tmp_path / "run")
    assert progress.ended == "time" and 28 <= progress.cursor.step <= 31
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert rates[-1] < 0.2 * max(rates)
    assert train(config, tmp_path / "run") == progress
