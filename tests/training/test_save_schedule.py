"""When checkpoints are saved beyond every N steps: by time, and after the best evaluation, which is kept."""

import dataclasses
import math

import pytest

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig
from bert_jax.errors import UserError
from bert_jax.training.fork import parse_fork
from bert_jax.training.job import intact_checkpoint
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.run_directory.retention import Retention, best_step
from bert_jax.training.save_schedule import SaveSchedule
from tests.runs import Killed, committed, kill_after, numbers

VALUES = {1: 0.5, 2: 0.7, 3: 0.6, 4: 0.65, 5: 0.72, 6: 0.71, 7: math.nan, 8: 0.2}
"""Accuracies by step."""


@pytest.fixture
def saved(monkeypatch) -> list[int]:
    """The steps of all checkpoints that are saved."""
    steps, save = [], checkpoint.Checkpoints.save

    def spy(self, step, *rest):
        steps.append(step)
        save(self, step, *rest)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", spy)
    return steps


def test_after_some_minutes():
    """Steps of 2 s, then of 0.5 s: a checkpoint is at most one step late, and few steps ask for the time."""
    now, readings = [0.0], []

    def clock() -> float:
        readings.append(now[0])
        return now[0]

    schedule, due = SaveSchedule(CheckpointConfig(every=10**6, every_minutes=5), 0, None, clock), []
    for step in range(1, 2001):
        now[0] += 2.0 if step <= 450 else 0.5
        if schedule.is_due(step, None):
            due.append(now[0])
            schedule.mark_saved(step)
    assert [round(after - before) for before, after in zip([0, *due], due, strict=False)] == [300] * 5
    assert len(readings) < 100


def test_another_checkpoint_begins_the_minutes_again():
    now = [0.0]
    schedule, due = SaveSchedule(CheckpointConfig(every=4, every_minutes=1), 0, None, lambda: now[0]), []
    for step in range(1, 21):
        now[0] += 18
        if schedule.is_due(step, None):
            due.append(step)
            schedule.mark_saved(step)
    assert due == [4, 8, 12, 16, 20], "each after 72 s; 60 s are over only then"


def test_checkpoints_by_time_are_kept_until_the_next(plain_config, train, tmp_path, saved):
    settings = CheckpointConfig(every=4, every_minutes=1e-9, keep=9)
    train(dataclasses.replace(plain_config, checkpoint=settings), tmp_path / "run")
    assert saved == [1, 2, 3, 4, 5, 6, 7, 8] and committed(tmp_path / "run") == [8, 4, 1], "1 will be the good one"


@pytest.mark.parametrize(
    ("metric", "scores", "best"),
    [
        ("mlm_loss", {1: 3.0, 2: 2.0, 3: 2.0}, 2),
        ("mlm_perplexity/books", {1: 3.0, 2: 2.0}, 2),
        ("mlm_accuracy", {1: 0.3, 2: 0.2, 3: math.nan}, 1),
        ("mlm_loss", {1: math.nan}, None),
        ("mlm_loss", {}, None),
    ],
)
def test_best(metric, scores, best):
    assert best_step(metric, scores) == best
    kept = Retention(keep=1, keep_best=metric).kept_steps([4, 3, 2, 1], None, scores)
    assert kept == {4, best} - {None}


@pytest.fixture
def scored_run(train):
    """Trains with the accuracies of VALUES."""
    step = [8]

    class Scored(Pretraining):
        def evaluate(self, score, batch_size):
            return {"mlm_accuracy": VALUES[step[0]]}

    def run(config, workdir, last=None):
        def after_step(count, state):
            step[0] = count
            return state if last is None else kill_after(last)(count, state)

        def change_task(task):
            return Scored(*(getattr(task, field.name) for field in dataclasses.fields(task)))

        return train(config, workdir, after_step=after_step, change_task=change_task)

    return run


def test_the_best_is_saved_and_kept(plain_config, scored_run, train, tmp_path, saved, capsys):
    """Also by a run that is killed: it is found again, and 0.71 is not better."""
    config = dataclasses.replace(
        plain_config,
        checkpoint=CheckpointConfig(every=4, keep=1, keep_best="mlm_accuracy"),
        evaluation=EvaluationConfig(every=1, rows=8, batch_size=8),
    )
    run = tmp_path / "run"
    with pytest.raises(Killed):
        scored_run(config, run, last=6)
    assert saved == [1, 2, 4, 5] and committed(run) == [5, 1], "1 will be the good one"
    scored_run(config, run)
    assert saved == [1, 2, 4, 5, 8] and committed(run) == [8, 5, 1]
    assert intact_checkpoint(run / "checkpoints" / "best").name == "00000005"
    fork = config_lib.replace(config, start={"source": f"{run}@best"}, checkpoint={"keep_best": None})
    train(fork, tmp_path / "fork")
    assert "continuing from step 5" in capsys.readouterr().err
    assert [line["step"] for line in numbers(tmp_path / "fork", "train")] == [6, 7, 8]
    assert parse_fork(f"{run}@best") == (run, None)
    # A run without scores has none.
    with pytest.raises(UserError, match=r"has no best checkpoint: train with --checkpoint.keep-best METRIC"):
        train(config_lib.replace(fork, start={"source": f"{tmp_path}/fork@best"}), tmp_path / "other")


def test_unknown_metrics_are_refused_with_those_of_the_run(tiny_config, tiny_run, train, tmp_path):
    config = config_lib.replace(tiny_config, checkpoint={"keep_best": "mlm_los"})
    with pytest.raises(UserError) as caught:
        train(config, tmp_path / "run")
    line, _, listed = str(caught.value).partition(" It has ")
    assert line == ("checkpoint.keep_best 'mlm_los' is not a held-out metric of this run: did you mean 'mlm_loss'?")
    written = numbers(tiny_run, "validation")[0].keys() - {"step", "split"}
    assert set(listed.split(", ")) == written and not (tmp_path / "run").exists()
