"""Where the time of a run went, with a clock that the test turns."""

import dataclasses
import itertools
import json

import pytest

from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, RecoveryConfig
from bert_jax.training import loop, pretraining
from bert_jax.training.run_directory import goodput
from bert_jax.training.run_directory.goodput import FILE, KINDS, GoodputRecorder, format_summary, summarize
from tests.runs import Killed, kill_after, spoil


class Clock:
    """Stands in for the module `time`."""

    def __init__(self, step: float):
        self.now, self.step = 1_000_000.0, step
        self.error = 0.0
        """Of the date."""

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now

    def time(self) -> float:
        return self.now + self.error


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Stands still unless it is turned."""
    clock = Clock(0.0)
    monkeypatch.setattr(goodput, "time", clock)
    return clock


def attempt(clock: Clock, workdir, begin: int, last: int, save_every: int = 4) -> GoodputRecorder:
    """Init takes 10 seconds, a step 1, a save 3; a line for each step."""
    meter = GoodputRecorder(workdir, clock.now)
    clock.now += 10
    meter.ready(begin)
    for step in range(begin + 1, last + 1):
        clock.now += 1
        meter.write_totals(step)
        if step % save_every == 0:
            with meter.measure("checkpoint"):
                clock.now += 3
            meter.write_totals(step)
    return meter


def test_no_kind_ever_becomes_less(clock, tmp_path):
    """Prometheus takes a smaller value for a new start, and adds all of it."""
    meter, pages = GoodputRecorder(tmp_path, clock.now - 5), []

    def turn(seconds: float) -> None:
        clock.now += seconds
        pages.append(meter.totals())

    turn(1)
    with meter.measure("compile"):
        turn(2)
        turn(2)
    turn(1)
    meter.ready(0)
    turn(3)
    with meter.measure("evaluation"):
        turn(4)
    turn(1)
    assert pages[-1] == dict.fromkeys(KINDS, 0.0) | {"init": 7.0, "compile": 4.0, "step": 4.0, "evaluation": 4.0}
    assert all(page[kind] >= before[kind] for before, page in itertools.pairwise(pages) for kind in page)


def nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items() if value and name != "goodput"}


def test_all_kinds_of_one_attempt(clock, tmp_path):
    meter = GoodputRecorder(tmp_path, clock.now - 5)  # the process is older than its clock
    clock.now += 2
    meter.ready(0)
    for i, kind in enumerate(KINDS[1:], start=1):
        with pytest.raises(ValueError), meter.measure(kind):
            clock.now += 10 * i
            raise ValueError  # what went wrong took its time as well
        clock.now += 100
    meter.write_totals(4)
    expected = {"init": 7, "compile": 10, "data_wait": 20, "evaluation": 30, "checkpoint": 40, "step": 400}
    found = summarize(tmp_path)
    assert nonzero(found) == expected | {"wall": 507} and found["goodput"] == pytest.approx(400 / 507)
    assert found["wall"] == clock.now - meter.start_time
    said = format_summary(found)
    assert said.startswith("goodput 78.9% of 507 s: init 1.4%, compile 2.0%, data wait 3.9%")
    assert said.endswith("lost 0.0%, down 0.0%") and "\n" not in said


def test_updates_behind_the_last_save_are_lost(clock, tmp_path):
    attempt(clock, tmp_path, 0, 7)
    clock.now += 60
    attempt(clock, tmp_path, 4, 8)
    expected = {"init": 20, "checkpoint": 6, "step": 8, "lost": 3, "down": 60}
    assert nonzero(summarize(tmp_path)) == expected | {"wall": 97}


def test_a_start_without_a_step_loses_none(clock, tmp_path):
    meter = GoodputRecorder(tmp_path, clock.now)
    clock.now += 4
    meter.begin(0)
    clock.now += 60
    attempt(clock, tmp_path, 0, 4)
    assert nonzero(summarize(tmp_path)) == {"init": 14, "checkpoint": 3, "step": 4, "down": 60, "wall": 81}


def test_going_back_behind_several_attempts_loses_of_all(clock, tmp_path):
    """From 4, then from 8, then back to 4: what was done between 4 and 8 was done twice as well."""
    for begin, last in ((0, 6), (4, 10), (8, 11), (4, 12)):
        attempt(clock, tmp_path, begin, last)
    found = nonzero(summarize(tmp_path))
    assert (found["step"], found["lost"]) == (12, 2 + 6 + 3)


@pytest.mark.parametrize("jump", [-1e9, -70, 1e9])
def test_a_date_that_jumps_while_a_process_runs(clock, tmp_path, jump):
    """Durations are of another clock, and the order of attempts is that of their lines."""
    first = attempt(clock, tmp_path, 0, 5)
    clock.error = jump
    clock.now += 1
    first.write_totals(6)
    clock.now += 60
    attempt(clock, tmp_path, 4, 8)
    found = summarize(tmp_path)
    assert nonzero(found) == {"init": 20, "checkpoint": 6, "step": 8, "lost": 2, "down": 60, "wall": 96}
    assert found["goodput"] == pytest.approx(8 / 96)


def test_a_date_that_jumps_between_starts(clock, tmp_path):
    for error in (0, 1e6, -1e6, 5):
        clock.error = error
        attempt(clock, tmp_path, 0, 4)
    assert nonzero(summarize(tmp_path))["step"] == 4
    (tmp_path / FILE).unlink()
    for error, step in ((0, 0), (1e6, 4), (0, 4), (-1e6, 4), (50, 4)):
        clock.error, clock.now = error, clock.now + 10
        GoodputRecorder(tmp_path, clock.now).begin(step)
    assert [goodput.starts_without_checkpoint(tmp_path, step) for step in (0, 4)] == [0, 4]


@pytest.fixture(scope="module")
def config(tiny_config) -> Config:
    """Eight steps, saved every two; nothing is found good before it is two steps old."""
    return dataclasses.replace(
        tiny_config,
        checkpoint=CheckpointConfig(every=2, keep=4),
        log=LogConfig(every=1, tensorboard=False),
        evaluation=EvaluationConfig(every=3, rows=8, batch_size=8),
        recovery=RecoveryConfig(max_skipped=2, stable_steps=1, max_rollbacks=1),
    )


@pytest.fixture
def ticking(monkeypatch) -> Clock:
    """Every reading of the clock takes a second, and nothing else does."""
    clock = Clock(1.0)
    for module in (goodput, loop, pretraining):
        monkeypatch.setattr(module, "time", clock)
    return clock


def entries(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / FILE).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_killed_and_continued(config, train, tmp_path, ticking):
    """Everything that happened is counted once, and nothing twice: kinds add up to the time that passed."""
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every=3, keep=4))
    began, workdir = ticking.now + 1, tmp_path / "run"
    spoils_none = spoil(0, 0, float("nan"))  # the programs are those of the next test
    with pytest.raises(Killed):
        train(config, workdir, after_step=kill_after(6), change_task=spoils_none)
    ticking.now += 500
    train(config, workdir, change_task=spoils_none)
    found = summarize(workdir)
    # Five steps up to the last line, then five from the save after the third; evaluated and saved after 3, 6 and 8.
    steps = 5 + 5
    attempts = 2  # each first looks at whether memory is known
    assert (found["data_wait"], found["compile"]) == (steps, steps + attempts)
    assert (found["evaluation"], found["checkpoint"]) == (3, 3)
    assert found["wall"] == ticking.now - began
    first = [entry for entry in entries(workdir) if entry["start_time"] == began]
    saved = max(entry["seconds"]["step"] for entry in first if entry["step"] == 3)
    assert first[-1]["step"] == 4 and 0 < found["lost"] == first[-1]["seconds"]["step"] - saved
    assert 500 < found["down"] < 510
    for one, other in itertools.pairwise(first):
        assert all(one["seconds"][kind] <= other["seconds"][kind] for kind in one["seconds"])


@pytest.mark.slow
def test_a_run_that_goes_back(config, train, tmp_path, ticking):
    """From step 6 to the save after step 2: what was done in between is lost."""
    began = ticking.now + 1
    progress = train(config, tmp_path / "run", change_task=spoil(32, 48, float("nan")))
    assert progress.ended == "steps" and progress.cursor.skipped
    found, lines = summarize(tmp_path / "run"), entries(tmp_path / "run")
    first = [entry for entry in lines if entry["start_time"] == began]
    (start,) = {entry["step"] for entry in lines[len(first) : len(first) + 1]}
    assert start == 2 and len({entry["start_time"] for entry in lines}) == 2
    saved = max(entry["seconds"]["step"] for entry in first if entry["step"] == 2)
    assert 0 < found["lost"] == first[-1]["seconds"]["step"] - saved
    assert found["wall"] == ticking.now - began and 0 < found["goodput"] < 1
