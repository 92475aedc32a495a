"""Divergence: skipped steps, rollbacks, and runs that stop after too many of them."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, Phase, RecoveryConfig, StartConfig
from bert_jax.convert.init_from import load_initial_params
from bert_jax.data.cursor import Cursor, count_rows
from bert_jax.data.mixture_spec import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.training import loop, pretraining, recovery
from bert_jax.training.divergence import (
    DivergenceError,
    check_divergence,
    init_divergence_state,
    reset_for_phase,
    update_divergence_state,
)
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.run_directory.metrics import read_metrics
from bert_jax.training.state import abstract_state
from tests.training.spoiled import spoil

pytestmark = pytest.mark.usefixtures("quick_compilation", "shared_programs")


@pytest.fixture(scope="module")
def config(tiny_config) -> Config:
    """20 steps of 8 rows in two phases, a checkpoint every 4."""
    phase = dataclasses.replace(tiny_config.phases[0], steps=14)
    return dataclasses.replace(
        tiny_config,
        phases=(phase, dataclasses.replace(phase, steps=6, batch_size=4, warmup_steps=0)),
        checkpoint=CheckpointConfig(every=4, keep=1),
        log=LogConfig(every=1, tensorboard=False),
        evaluation=EvaluationConfig(every=0, rows=8, batch_size=8),
        recovery=RecoveryConfig(max_skipped=2, spike=3.0, stable_steps=3, max_rollbacks=2),
    )


def rollbacks(workdir) -> list[dict]:
    lines = [json.loads(line) for line in (workdir / "ledger.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "rollback"]


def lines(workdir) -> list[dict]:
    found = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "timing"} for line in found]


def final_params(workdir, corpus, config) -> list[np.ndarray]:
    task = pretraining.open_task(config, [CorpusWeight(corpus)])
    mesh = loop.checked_mesh(task)
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(workdir), keep=1) as checkpoints:
        state, _ = checkpoints.restore(lambda metadata: abstract_state(task.at(metadata["phase"]), mesh))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def stable_run(config, tiny_corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stable") / "run"
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch.setattr, 0, 0, 3.0)  # nothing, in the program of the runs that are compared with this one
        progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], workdir)
    assert progress.ended == "steps" and not rollbacks(workdir)
    return workdir


def test_single_bad_batches_are_skipped_and_counted(config, stable_run, tiny_corpus, tmp_path, monkeypatch):
    spoil(monkeypatch.setattr, 40, 41, float("nan"))  # step 6
    progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run")
    found = [line for line in lines(tmp_path / "run") if line["split"] == "train"]
    assert progress.ended == "steps" and not rollbacks(tmp_path / "run")
    assert [line["skipped_steps"] for line in found] == [0] * 5 + [1] * 15
    assert found[5]["loss"] is None and all(line["loss"] is not None for line in found[:5] + found[6:])
    # What came before is the uninterrupted run, what comes after differs.
    calm = [line for line in lines(stable_run) if line["split"] == "train"]
    assert found[:5] == calm[:5] and found[6]["loss"] != calm[6]["loss"]


@pytest.mark.parametrize(
    ("factor", "reason"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (3.0, "above the lowest")]
)
def test_trouble_goes_back_and_passes_over_the_rows(
    config, stable_run, tiny_corpus, tmp_path, monkeypatch, capfd, factor, reason
):
    """Step 9, or 9 and 10, are bad (from row 64 on). The newest checkpoint, of step 8, is too young to be good."""
    last = 10 if reason == "not finite" else 9
    spoil(monkeypatch.setattr, 64, last * 8, factor)
    progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run")
    (entry,) = rollbacks(tmp_path / "run")
    # Rows from three steps before the first bad one.
    assert (entry["to"], entry["step"], entry["skipped_rows"]) == (4, last, [40, last * 8])
    assert reason in entry["reason"]
    said = capfd.readouterr().err
    assert "Rolling back to step 4" in said and "rollback 1 of at most 2" in said
    assert progress.ended == "steps" and progress.cursor.skipped == ((40, last * 8),)
    assert progress.cursor.rows == 14 * 8 + 6 * 4 + last * 8 - 40
    found, calm = ([line for line in lines(w) if line["split"] == "train"] for w in (tmp_path / "run", stable_run))
    assert [line["step"] for line in found] == list(range(1, 21))
    assert found[:5] == calm[:5] and found[5]["loss"] != calm[5]["loss"]
    assert all(line["loss"] is not None for line in found)
    # The decision comes back from the checkpoint when its line is damaged, or the file is lost.
    ledger = tmp_path / "run" / "ledger.jsonl"
    for damage in (b"\0" * 80 + b"\n", b""):
        ledger.write_bytes(damage)
        assert pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run") == progress
        assert "restored 1 from the checkpoint" in capfd.readouterr().err and rollbacks(tmp_path / "run") == [entry]


def test_without_a_good_checkpoint_a_run_begins_anew(config, tiny_corpus, tmp_path, monkeypatch):
    spoil(monkeypatch.setattr, 16, 32, float("nan"))  # steps 3 and 4
    progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run")
    (entry,) = rollbacks(tmp_path / "run")
    assert (entry["to"], entry["skipped_rows"]) == (0, [0, 32]) and progress.ended == "steps"
    assert min(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) > 4


def test_a_run_that_diverges_again_and_again_stops(config, tiny_corpus, tmp_path, monkeypatch):
    spoil(monkeypatch.setattr, 64, 10**6, float("nan"))
    with pytest.raises(
        UserError, match=r"training diverged: .* not finite in 2 steps in a row.*rolled back 2 time\(s\)"
    ):
        pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run")
    # What was good once stays good: the second divergence comes too soon for anything else, and does not cost it.
    assert [entry["to"] for entry in rollbacks(tmp_path / "run")] == [4, 4]
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(tmp_path / "run"), keep=1) as checkpoints:
        assert checkpoints.steps() == [4]


def test_a_poisoned_state_is_not_blessed_by_its_checkpoint(config, tiny_corpus, tmp_path, monkeypatch):
    """A step with a finite loss spoils the parameters, and they are saved before any metric shows it."""
    from bert_jax.training import compiled_steps

    train_step = compiled_steps.CompiledSteps.train_step

    def poisoning(self, phase):
        step, accumulation = train_step(self, phase)

        def run(state, batch, inputs):
            state, metrics = step(state, batch, inputs)
            if not poisoned and int(jax.device_get(state.step)) == 8:
                poisoned.append(True)
                state = dataclasses.replace(state, params=jax.tree.map(lambda x: x * jnp.nan, state.params))
            return state, metrics

        return run, accumulation

    poisoned: list[bool] = []
    monkeypatch.setattr(compiled_steps.CompiledSteps, "train_step", poisoning)
    monkeypatch.setattr(jax, "transfer_guard", lambda _: contextlib.nullcontext())
    saved = []
    save = loop._save
    monkeypatch.setattr(
        loop,
        "_save",
        lambda run, c, state, progress: (saved.append(progress.cursor.step), save(run, c, state, progress)),
    )
    progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run")
    (entry,) = rollbacks(tmp_path / "run")
    assert poisoned and saved.count(8) == 2  # the poisoned one was saved, and replaced
    assert entry["to"] == 4 and progress.ended == "steps"
    assert all(np.isfinite(leaf).all() for leaf in final_params(tmp_path / "run", tiny_corpus, config))


def test_a_good_checkpoint_is_kept_while_divergence_begins(config, tiny_corpus, tmp_path, monkeypatch):
    """Saves in quick succession, also among the first bad steps, must not push out what those will need."""
    often = dataclasses.replace(
        config,
        checkpoint=CheckpointConfig(every=1, keep=1),
        recovery=dataclasses.replace(config.recovery, max_skipped=3),
    )
    spoil(monkeypatch.setattr, 56, 80, float("nan"))  # steps 8 to 10
    pretraining.pretrain(often, [CorpusWeight(tiny_corpus)], tmp_path / "run")
    # Not 4: with so few checkpoints kept, the second one to be good is saved when the first one is.
    assert [entry["to"] for entry in rollbacks(tmp_path / "run")] == [1]


def test_a_damaged_checkpoint_is_not_gone_back_to(config, tiny_corpus, tmp_path, monkeypatch):
    workdir, decide_rollback = tmp_path / "run", recovery.decide_rollback

    def damage_and_decide(*arguments):
        data = max((workdir / "checkpoints" / "00000004").rglob("d/*"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:-1])
        decide_rollback(*arguments)

    monkeypatch.setattr(recovery, "decide_rollback", damage_and_decide)
    spoil(monkeypatch.setattr, 64, 80, float("nan"))
    progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], workdir)
    assert [entry["to"] for entry in rollbacks(workdir)] == [0] and progress.ended == "steps"


def test_what_a_run_started_from_is_always_good(config, stable_run, tiny_corpus, tmp_path, monkeypatch):
    """Divergence before any other checkpoint is good: not to random parameters, but to those of the source."""
    started = dataclasses.replace(
        config, start=StartConfig(source=str(stable_run)), recovery=dataclasses.replace(config.recovery, stable_steps=9)
    )
    monkeypatch.setattr(loop, "init_state", None)
    spoil(monkeypatch.setattr, 72, 88, float("nan"))  # steps 10 and 11, with checkpoints 4 and 8 before them
    progress = pretraining.pretrain(
        started, [CorpusWeight(tiny_corpus)], tmp_path / "run", load_initial_params=load_initial_params
    )
    assert [entry["to"] for entry in rollbacks(tmp_path / "run")] == [0] and progress.ended == "steps"


@pytest.mark.parametrize("point", ["before the ledger", "after the ledger", "while deleting"])
def test_killed_while_going_back(config, tiny_corpus, tmp_path, monkeypatch, point):
    """The next start carries the decision out; the run ends like one that was not killed."""
    spoil(monkeypatch.setattr, 64, 80, float("nan"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], whole)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        if point == "before the ledger":
            patch.setattr(recovery, "decide_rollback", die)
        elif point == "after the ledger":
            apply_rollback, calls = recovery.apply_rollback, iter((False, True))
            patch.setattr(recovery, "apply_rollback", lambda *a: die() if next(calls) else apply_rollback(*a))
        else:
            patch.setattr(type(checkpoint.checkpoint_directory(cut)), "rmtree", die)
        with pytest.raises(Killed):
            pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], cut)
    assert len(rollbacks(cut)) == (point != "before the ledger")
    pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], cut)
    assert lines(cut) == lines(whole) and rollbacks(cut) == rollbacks(whole)
    for a, b in zip(final_params(cut, tiny_corpus, config), final_params(whole, tiny_corpus, config), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_are_counted_as_the_stream_counts_them(two_phases, tiny_corpus):
    task = pretraining.open_task(two_phases, [CorpusWeight(tiny_corpus)])
    start = Cursor(skipped=((30, 50), (48, 60), (200, 205)))
    for step in range(two_phases.total_steps + 1):
        assert count_rows(two_phases, start, step) == task.train.cursor_at(start, step).rows


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


def test_a_cut_ledger_line_is_no_decision(tmp_path):
    from bert_jax.training.run_directory.ledger import Ledger

    path = tmp_path / "ledger.jsonl"
    first = {"to": 4, "skipped_rows": [4, 9]}
    Ledger(path).decide("rollback", lambda: first)
    with path.open("a") as file:
        file.write('{"event": "roll')
    again = Ledger(path)
    assert again.entries == [{"event": "rollback", **first}]
    again.decide("rollback", lambda: {"to": 8, "skipped_rows": [8, 9]})
    assert [entry["to"] for entry in Ledger(path).entries_of("rollback")] == [4, 8]


def test_a_damaged_ledger_line_takes_later_decisions_along(tmp_path, capfd):
    """What a checkpoint was trained with is restored; what was decided later may have depended on the lost line."""
    from bert_jax.training.run_directory.ledger import Ledger

    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    saved = [ledger.decide("rollback", lambda to=to: {"to": to, "skipped_rows": (to, 9)}) for to in range(4)]
    lines = path.read_bytes().splitlines(keepends=True)
    untyped = (b'{"event": "rollback"}\n', b'{"event": "rollback", "to": 1, "skipped_rows": [1]}\n')
    for damaged in (b"\xff\n", lines[1].replace(b"1", b"7"), *untyped):
        path.write_bytes(b"".join([lines[0], damaged, *lines[2:]]))
        again = Ledger(path)
        again.restore(saved[:3])
        assert again.entries == Ledger(path).entries == saved[:3]
        assert "restored 3 from the checkpoint; later ones are made again" in capfd.readouterr().err
    again.decide("rollback", lambda: {"to": 8, "skipped_rows": [8, 9]})
    again.restore(saved[:3])
    assert [entry["to"] for entry in Ledger(path).entries] == [0, 1, 2, 8]


def test_phases_have_averages_of_their_own(config, tiny_corpus, tmp_path):
    """A jump where a phase begins is no divergence: the average is reset there."""
    bounds = RecoveryConfig(max_skipped=2, spike=0.2, stable_steps=3, max_rollbacks=0)
    phase = Phase(steps=4, seq_len=32, batch_size=8, learning_rate=1e-3, warmup_steps=0)
    longer = dataclasses.replace(phase, seq_len=48, steps=2)
    quiet = dataclasses.replace(config, phases=(phase, longer), recovery=bounds)
    assert pretraining.pretrain(quiet, [CorpusWeight(tiny_corpus)], tmp_path / "run").ended == "steps"
