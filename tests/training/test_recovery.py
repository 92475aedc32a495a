"""Divergence: skipped steps, rollbacks, and runs that stop after too many of them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import CheckpointConfig, Config, RecoveryConfig, StartConfig
from bert_jax.convert.init_from import load_initial_params
from bert_jax.data.cursor import Cursor, rows_before_step
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.training import pretraining, recovery
from bert_jax.training.divergence import (
    DivergenceError,
    check_divergence,
    init_divergence_state,
    reset_for_phase,
    update_divergence_state,
)
from bert_jax.training.run_directory import checkpoint
from tests.runs import Killed, arrays, assert_same_run, final_state, numbers, spoil


@pytest.fixture(scope="module")
def config(plain_config) -> Config:
    """20 steps of 8 rows in two phases, a checkpoint every 4."""
    phase = dataclasses.replace(plain_config.phases[0], steps=14)
    return dataclasses.replace(
        plain_config,
        phases=(phase, dataclasses.replace(phase, steps=6, batch_size=4, warmup_steps=0)),
        checkpoint=CheckpointConfig(every=4, keep=1),
        recovery=RecoveryConfig(max_skipped=2, spike=3.0, stable_steps=3, max_rollbacks=2),
    )


def rollbacks(workdir) -> list[dict]:
    lines = [json.loads(line) for line in (workdir / "ledger.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "rollback"]


def lines(workdir) -> list[dict]:
    return numbers(workdir, "train")


@pytest.fixture(scope="module")
def run(config, train):
    """Trains in a directory; the loss of the stream's rows [first, last) is multiplied with `factor`."""

    def run(workdir, first=0, last=0, factor=float("nan"), config=config, after_step=None, **arguments):
        return train(config, workdir, None, after_step, spoil(first, last, factor), **arguments)

    return run


@pytest.fixture(scope="module")
def stable_run(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stable") / "run"
    assert run(workdir).ended == "steps" and not rollbacks(workdir)
    return workdir


def test_single_bad_batches_are_skipped_and_counted(run, stable_run, tmp_path):
    progress = run(tmp_path / "run", 40, 41)  # step 6
    found = lines(tmp_path / "run")
    assert progress.ended == "steps" and not rollbacks(tmp_path / "run")
    assert [line["skipped_steps"] for line in found] == [0] * 5 + [1] * 15
    assert found[5]["loss"] is None and all(line["loss"] is not None for line in found[:5] + found[6:])
    # What came before is the uninterrupted run, what comes after differs.
    assert found[:5] == lines(stable_run)[:5] and found[6]["loss"] != lines(stable_run)[6]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "reason"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (3.0, "above the lowest")]
)
def test_trouble_goes_back_and_passes_over_the_rows(run, stable_run, tmp_path, capfd, factor, reason):
    """Step 9, or 9 and 10, are bad (from row 64 on). The newest checkpoint, of step 8, is too young to be good."""
    last = 10 if reason == "not finite" else 9
    progress = run(tmp_path / "run", 64, last * 8, factor)
    (entry,) = rollbacks(tmp_path / "run")
    # Rows from three steps before the first bad one.
    assert (entry["to"], entry["step"], entry["skipped_rows"]) == (4, last, [40, last * 8])
    assert reason in entry["reason"]
    said = capfd.readouterr().err
    assert "Rolling back to step 4" in said and "rollback 1 of at most 2" in said
    assert progress.ended == "steps" and progress.cursor.skipped == ((40, last * 8),)
    assert progress.cursor.rows == 14 * 8 + 6 * 4 + last * 8 - 40
    found, stable = lines(tmp_path / "run"), lines(stable_run)
    assert [line["step"] for line in found] == list(range(1, 21))
    assert found[:5] == stable[:5] and found[5]["loss"] != stable[5]["loss"]
    assert all(line["loss"] is not None for line in found)
    if factor != 3.0:
        return
    # The decision comes back from the checkpoint when its line is damaged, or the file is lost.
    ledger = tmp_path / "run" / "ledger.jsonl"
    for damage in (b"\0" * 80 + b"\n", b""):
        ledger.write_bytes(damage)
        assert run(tmp_path / "run", 64, last * 8, factor) == progress
        assert "restored 1 from the checkpoint" in capfd.readouterr().err and rollbacks(tmp_path / "run") == [entry]


def test_a_run_that_diverges_again_and_again_stops(run, tmp_path):
    with pytest.raises(
        UserError, match=r"training diverged: .* not finite in 2 steps in a row.*rolled back 2 time\(s\)"
    ):
        run(tmp_path / "run", 64, 10**6)
    # What was good once stays good: the second divergence comes too soon for anything else, and does not cost it.
    assert [entry["to"] for entry in rollbacks(tmp_path / "run")] == [4, 4]
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(tmp_path / "run"), keep=1) as checkpoints:
        assert checkpoints.steps() == [4]


def test_a_poisoned_state_is_not_blessed_by_its_checkpoint(run, config, tmp_path, capfd):
    """A step with a finite loss spoils the parameters, and they are saved before any metric shows it."""
    poisoned: list[bool] = []

    def poison(count, state):
        if count == 8 and not poisoned:
            poisoned.append(True)
            state = dataclasses.replace(state, params=jax.tree.map(lambda x: x * jnp.nan, state.params))
            jax.block_until_ready(state)
        return state

    progress = run(tmp_path / "run", after_step=poison)
    (entry,) = rollbacks(tmp_path / "run")
    assert poisoned and entry["to"] == 4 and progress.ended == "steps"
    # The poisoned checkpoint was saved after step 8, and replaced: the run went back behind it.
    assert "Rolling back to step 4" in capfd.readouterr().err and entry["step"] > 8
    assert all(np.isfinite(array).all() for array in arrays(final_state(tmp_path / "run", config)[0]).values())


@pytest.mark.slow
def test_a_good_checkpoint_is_kept_while_divergence_begins(run, config, tmp_path):
    """Saves in quick succession, also among the first bad steps, must not push out what those will need."""
    recovery = dataclasses.replace(config.recovery, max_skipped=3)
    often = dataclasses.replace(config, checkpoint=CheckpointConfig(every=1, keep=1), recovery=recovery)
    run(tmp_path / "run", 56, 80, config=often)  # steps 8 to 10
    # Not 4: with so few checkpoints kept, the second one to be good is saved when the first one is.
    assert [entry["to"] for entry in rollbacks(tmp_path / "run")] == [1]


def test_a_damaged_checkpoint_is_not_gone_back_to(run, tmp_path, monkeypatch):
    workdir, record_rollback = tmp_path / "run", recovery.record_rollback

    def damage_and_decide(*arguments):
        data = max((workdir / "checkpoints" / "00000004").rglob("d/*"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:-1])
        record_rollback(*arguments)

    monkeypatch.setattr(recovery, "record_rollback", damage_and_decide)
    progress = run(workdir, 64, 80)
    assert [entry["to"] for entry in rollbacks(workdir)] == [0] and progress.ended == "steps"


@pytest.mark.slow
def test_what_a_run_started_from_is_always_good(run, config, stable_run, tmp_path):
    """Divergence before any other checkpoint is good: not to random parameters, but to those of the source."""
    started = dataclasses.replace(
        config, start=StartConfig(source=str(stable_run)), recovery=dataclasses.replace(config.recovery, stable_steps=9)
    )
    # Steps 10 and 11, with checkpoints 4 and 8 before them. Random parameters would have a higher loss.
    progress = run(tmp_path / "run", 72, 88, config=started, load_initial_params=load_initial_params)
    assert [entry["to"] for entry in rollbacks(tmp_path / "run")] == [0] and progress.ended == "steps"
    assert lines(tmp_path / "run")[0]["loss"] < lines(stable_run)[0]["loss"] - 0.3


@pytest.fixture(scope="module")
def rolled_back(run, tmp_path_factory):
    """A run that went back once and was not killed."""
    workdir = tmp_path_factory.mktemp("rolled_back") / "run"
    run(workdir, 64, 80)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before the ledger", "after the ledger", "while deleting"])
def test_killed_while_going_back(run, rolled_back, config, tmp_path, monkeypatch, point):
    """The next start carries the decision out; the run ends like one that was not killed."""
    cut = tmp_path / "cut"

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        if point == "before the ledger":
            patch.setattr(recovery, "record_rollback", die)
        elif point == "after the ledger":
            apply_rollback, calls = recovery.apply_rollback, iter((False, True))
            patch.setattr(recovery, "apply_rollback", lambda *a: die() if next(calls) else apply_rollback(*a))
        else:
            patch.setattr(type(checkpoint.checkpoint_directory(cut)), "rmtree", die)
        with pytest.raises(Killed):
            run(cut, 64, 80)
    assert len(rollbacks(cut)) == (point != "before the ledger")
    run(cut, 64, 80)
    assert rollbacks(cut) == rollbacks(rolled_back)
    assert_same_run(cut, rolled_back, config)


def test_rows_are_counted_as_the_stream_counts_them(two_phases, tiny_corpus):
    task = pretraining.open_task(two_phases, [CorpusWeight(tiny_corpus)])
    start = Cursor(skipped=((30, 50), (48, 60), (200, 205)))
    for step in range(two_phases.total_steps + 1):
        assert rows_before_step(two_phases, start, step) == task.train.cursor_at(start, step).rows


def test_the_loss_average():
    divergence, losses = init_divergence_state(), [5.0, 4.0, float("nan"), 3.0, 9.0]
    rises, averages = [], []
    for loss in losses:
        bad = jnp.asarray(not np.isfinite(loss))
        divergence, rise = update_divergence_state(divergence, jnp.float32(loss), bad, span=2)
        rises.append(float(rise))
        averages.append(float(divergence.average))
    np.testing.assert_allclose(averages, [5.0, 4.5, 4.5, 3.75, 6.375])
    np.testing.assert_allclose(rises, [0.0, -1.0, 0.0, -1.5, 5.25])
    assert (int(divergence.skipped_steps), int(divergence.consecutive_skipped)) == (1, 0)
    assert float(divergence.lowest) == 3.75
    again = reset_for_phase(divergence)
    assert (int(again.skipped_steps), int(again.finite_losses)) == (1, 0)
    assert float(update_divergence_state(again, jnp.float32(20.0), jnp.asarray(False), 2)[1]) == 0.0


def test_what_counts_as_divergence():
    bounds = RecoveryConfig(max_skipped=3, spike=2.0)
    check_divergence(7, float("nan"), 2, float("nan"), bounds)
    check_divergence(7, 5.0, 0, 2.0, bounds)
    check_divergence(7, 50.0, 0, 40.0, dataclasses.replace(bounds, spike=None))
    with pytest.raises(DivergenceError, match="3 steps in a row, 5 to 7") as caught:
        check_divergence(7, float("nan"), 3, float("nan"), bounds)
    assert (caught.value.first, caught.value.last) == (5, 7)
    with pytest.raises(DivergenceError, match=r"the loss of step 7 was 5.00, 2.10 above"):
        check_divergence(7, 5.0, 0, 2.1, bounds)


def test_a_damaged_ledger_line_takes_later_decisions_along(tmp_path, capfd):
    """What a checkpoint was trained with is restored; what was decided later may have depended on the lost line."""
    from bert_jax.training.run_directory.ledger import Ledger

    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    saved = [ledger.make_decision("rollback", lambda to=to: {"to": to, "skipped_rows": (to, 9)}) for to in range(4)]
    lines = path.read_bytes().splitlines(keepends=True)
    untyped = b'{"event": "rollback", "to": 1, "skipped_rows": [1]}\n'
    incomplete = b'{"event": "rollback", "to": 1}\n'
    for damaged in (b"\xff\n", lines[1].replace(b"1", b"7"), untyped, incomplete):
        path.write_bytes(b"".join([lines[0], damaged, *lines[2:]]))
        again = Ledger(path)
        again.restore(saved[:3])
        assert again.entries == Ledger(path).entries == saved[:3]
        assert "restored 3 from the checkpoint; later ones are made again" in capfd.readouterr().err
    again.make_decision("rollback", lambda: {"to": 8, "skipped_rows": [8, 9]})
    again.restore(saved[:3])
    assert [entry["to"] for entry in Ledger(path).entries] == [0, 1, 2, 8]
