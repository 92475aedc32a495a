"""Divergence: skipped steps, rollbacks, and runs that stop after too many of them."""

import dataclasses
import functools
import itertools
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
    DivergedError,
    DivergenceError,
    DivergenceState,
    StepMeasures,
    check_divergence,
    init_divergence_state,
    reset_for_phase,
    update_divergence_state,
)
from bert_jax.training.replicas import ReplicaError
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.run_directory.ledger import Ledger
from tests.runs import Killed, arrays, assert_same_run, final_state, numbers, spoil


@pytest.fixture(scope="module")
def config(plain_config) -> Config:
    """20 steps of 8 rows in two phases, a checkpoint every 4."""
    phase = dataclasses.replace(plain_config.phases[0], steps=14)
    return dataclasses.replace(
        plain_config,
        phases=(phase, dataclasses.replace(phase, steps=6, batch_size=4, warmup_steps=0)),
        checkpoint=CheckpointConfig(every=4, keep=1),
        recovery=RecoveryConfig(max_skipped=2, spike=2.0, stable_steps=3, max_rollbacks=2),
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
@pytest.mark.parametrize(("factor", "reason"), [(float("inf"), "not finite"), (3.0, "above the lowest")])
def test_trouble_goes_back_and_passes_over_the_rows(run, stable_run, tmp_path, capfd, factor, reason):
    """Steps 9 and 10 are bad (from row 64 on). The newest checkpoint, of step 8, is too young to be good."""
    progress = run(tmp_path / "run", 64, 80, factor)
    (entry,) = rollbacks(tmp_path / "run")
    # Rows from three steps before the first bad one; the average of losses is too high at step 10.
    first = 40 if reason == "not finite" else 48
    assert (entry["to"], entry["step"], entry["skipped_rows"]) == (4, 10, [first, 80])
    assert reason in entry["reason"]
    said = capfd.readouterr().err
    assert "Rolling back to step 4" in said and "rollback 1 of at most 2" in said
    assert progress.ended == "steps" and progress.cursor.skipped == ((first, 80),)
    assert progress.cursor.rows == 14 * 8 + 6 * 4 + 80 - first
    found, stable = lines(tmp_path / "run"), lines(stable_run)
    assert [line["step"] for line in found] == list(range(1, 21))
    before = first // 8
    assert found[:before] == stable[:before] and found[before]["loss"] != stable[before]["loss"]
    assert all(line["loss"] is not None for line in found)
    if factor != 3.0:
        return
    # The decision comes back from the checkpoint when its line is damaged, or the file is lost.
    ledger = tmp_path / "run" / "ledger.jsonl"
    for damage in (b"\0" * 80 + b"\n", b""):
        ledger.write_bytes(damage)
        assert run(tmp_path / "run", 64, 80, factor) == progress
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

    events: list[tuple] = []
    progress = run(tmp_path / "run", after_step=poison, on_event=lambda *event: events.append(event))
    (entry,) = rollbacks(tmp_path / "run")
    assert poisoned and entry["to"] == 4 and progress.ended == "steps"
    steps = [("start", 0), ("divergence", entry["step"]), ("rollback", 4), ("start", 4)]
    assert [event[:2] for event in events] == steps and entry["reason"] == events[1][2]
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
        return record_rollback(*arguments)

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
@pytest.mark.parametrize("point", ["after the ledger", "while deleting"])
def test_killed_while_going_back(run, rolled_back, config, tmp_path, monkeypatch, point):
    """The next start carries the decision out; the run ends like one that was not killed."""
    cut = tmp_path / "cut"

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        if point == "after the ledger":
            apply_rollback, calls = recovery.apply_rollback, iter((False, True))
            patch.setattr(recovery, "apply_rollback", lambda *a: die() if next(calls) else apply_rollback(*a))
        else:
            patch.setattr(type(checkpoint.checkpoint_directory(cut)), "rmtree", die)
        with pytest.raises(Killed):
            run(cut, 64, 80)
    assert len(rollbacks(cut)) == 1
    run(cut, 64, 80)
    assert rollbacks(cut) == rollbacks(rolled_back)
    assert_same_run(cut, rolled_back, config)


def test_rows_are_counted_as_the_stream_counts_them(two_phases, tiny_corpus):
    task = pretraining.open_task(two_phases, [CorpusWeight(tiny_corpus)])
    start = Cursor(skipped=((30, 50), (48, 60), (200, 205)))
    for step in range(two_phases.total_steps + 1):
        assert rows_before_step(two_phases, start, step) == task.train.cursor_at(start, step).rows


@pytest.mark.parametrize("bad", [(0, 0), (2, 3), (2, 10**6)])
def test_skipped_rows_are_those_of_the_phase_of_the_first_bad_step(bad, two_phases, tmp_path):
    """Also if bad steps begin within `stable_steps` of the phase's first step, or end after its last one."""
    start = two_phases.phases[0].steps
    first, last = (start + 1 + step for step in bad)
    entry = recovery._rollback_entry(DivergenceError(first, last, ""), two_phases, None, Ledger(tmp_path / "ledger"))
    assert two_phases.recovery.stable_steps > bad[0]
    ends = min(last, two_phases.total_steps)
    assert entry["skipped_rows"] == [rows_before_step(two_phases, Cursor(), step) for step in (start, ends)]


@functools.partial(jax.jit, static_argnums=2)
def scan_steps(losses, skipped, span):
    def step(state, given):
        after, measures = jax.vmap(lambda *run: update_divergence_state(*run, span))(state, *given)
        return after, (after, measures)

    first = jax.tree.map(lambda x: jnp.stack([x] * losses.shape[1]), init_divergence_state())
    return jax.lax.scan(step, first, (losses, skipped))[1]


def measure_runs(losses, span: int = 50, skipped=None) -> list[tuple[DivergenceState, StepMeasures]]:
    """The states and measures of the steps of each run, as arrays; one program for all."""
    losses = np.asarray(losses, np.float32)
    skipped = ~np.isfinite(losses) if skipped is None else np.asarray(skipped)
    found = jax.device_get(scan_steps(losses.T, skipped.T, span))
    return [jax.tree.map(lambda x, run=run: x[:, run], found) for run in range(len(losses))]


def measure(losses, span: int = 50, skipped=None) -> tuple[DivergenceState, StepMeasures]:
    return measure_runs([losses], span, None if skipped is None else [skipped])[0]


def at_step(found: StepMeasures, step: int) -> StepMeasures:
    """The measures of a step, counted from 0, as numbers."""
    return StepMeasures(*(x[step].item() for x in found))


def first_divergences(runs) -> list[int | None]:
    """Of each run, the step, counted from 1, at which it would roll back."""
    return [_first_divergence(losses, found) for losses, (_, found) in zip(runs, measure_runs(runs), strict=True)]


def _first_divergence(losses, found: StepMeasures) -> int | None:
    for step in np.flatnonzero(np.maximum(found.loss_rise, found.average_rise) > RecoveryConfig().spike):
        try:
            check_divergence(step + 1, losses[step], at_step(found, step), RecoveryConfig())
        except DivergenceError:
            return step + 1
    return None


def test_the_loss_average():
    states, found = measure([5.0, 4.0, float("nan"), 3.0, 9.0], span=2)
    np.testing.assert_allclose(states.average, [5.0, 4.5, 4.5, 3.75, 6.375])
    np.testing.assert_allclose(states.noise, [0.0, 1.0, 1.0, 1.0, 3.5])
    # The average of two losses with a mean difference of 1 may be 4 / sqrt(2) too low.
    lowest = 3.75 + 4 / 2**0.5
    np.testing.assert_allclose(states.lowest[1:], [4.5 + 4 / 2**0.5, 4.5 + 4 / 2**0.5, lowest, lowest])
    np.testing.assert_allclose(found.loss_rise, [0, 0, 0, 0, 3 - lowest], rtol=1e-5)
    np.testing.assert_allclose(found.average_rise[-1], 6.375 - lowest, rtol=1e-5)
    assert found.noise_bound[3] == 4 * 1.0 * 5 and found.noise_bound[4] == 4 * 1.0 * 3
    last = jax.tree.map(lambda x: x[-1], states)
    assert (last.skipped_steps, last.consecutive_skipped, *last.last_losses) == (1, 0, 9.0, 3.0)
    np.testing.assert_allclose(last.skipped_share, 0.01 * 0.99**2, rtol=1e-5)
    again = reset_for_phase(last)
    assert (again.skipped_steps, again.skipped_share, again.finite_losses) == (1, last.skipped_share, 0)
    assert float(update_divergence_state(again, jnp.float32(20.0), jnp.asarray(False), 2)[1].loss_rise) == 0.0


def sample_losses(steps: int, noise: float, seed: int) -> np.ndarray:
    """A loss that falls from 9 to 5, with normal noise."""
    rng = np.random.default_rng(seed)
    return 5 + 4 * np.exp(-np.arange(steps) / 100) + noise * rng.standard_normal(steps)


def test_noise_is_no_divergence():
    """A few tokens per step: 1.5 nats. The bound was 3 nats above the lowest average whatever the noise."""
    runs = [sample_losses(2000, noise, seed) for noise in (0.05, 0.5, 1.5, 3.0) for seed in range(5)]
    assert first_divergences(runs) == [None] * 20


def losses_of_few_tokens(tokens: int) -> np.ndarray:
    """Three runs of 4000 steps with a loss per token that is skewed."""
    rng = np.random.default_rng(tokens)
    means = 2 + 5 * np.exp(-np.arange(4000) / 1500)
    per_token = np.minimum(rng.lognormal(-0.5, 1.0, (3, 4000, tokens)) * means[:, None], 25.0)
    counts = rng.integers(tokens // 2, tokens + 1, (3, 4000, 1))
    return np.where(np.arange(tokens) < counts, per_token, 0.0).sum(-1) / counts[..., 0]


def test_losses_of_few_tokens_are_no_divergence():
    """With 4 and 8 tokens, all runs had false divergences."""
    runs = np.concatenate([losses_of_few_tokens(tokens) for tokens in (4, 8, 20, 200)])
    raised = runs.copy()
    raised[:, 3000:] += 6.0
    found = first_divergences(np.concatenate([runs, raised]))
    assert found[:12] == [None] * 12
    assert all(3000 < step < 3200 for step in found[12:]), found


SHAPES = [
    *itertools.product(["spike", "level"], [30, 300, 1500]),
    *itertools.product(["slope", "oscillation"], [4, 1500]),
]


def test_divergence_is_found():
    """Early and late; for good or for three steps; at once or by and by."""
    cases = list(itertools.product(SHAPES, [0.05, 0.3]))
    runs = [sample_losses(2000, noise, 0) for _, noise in cases]
    for losses, ((shape, at), _) in zip(runs, cases, strict=True):
        after = np.arange(2000 - at)
        losses[at:] += {
            "spike": 5.0 * (after < 3),
            "level": 5.0,
            "slope": np.minimum(0.1 * after, 8.0),
            "oscillation": np.minimum(0.1 * after, 8.0) * (1 + np.cos(np.pi * after)),
        }[shape]
    for found, case in zip(first_divergences(runs), cases, strict=True):
        (shape, at), _ = case
        assert found is not None and at < found <= at + {"spike": 3, "level": 3}.get(shape, 120), case


def test_what_counts_as_divergence():
    bounds, healthy = RecoveryConfig(max_skipped=3, spike=2.0), StepMeasures(0, 0, 0.0, 0.0, 0.0, 1.0)
    check_divergence(7, float("nan"), healthy._replace(consecutive_skipped=2, loss_rise=float("nan")), bounds)
    check_divergence(7, 5.0, healthy._replace(loss_rise=2.0, average_rise=2.0), bounds)
    check_divergence(7, 5.0, healthy._replace(loss_rise=3.0, noise_bound=3.0), bounds)
    check_divergence(7, 50.0, healthy._replace(loss_rise=40.0), dataclasses.replace(bounds, spike=None))
    with pytest.raises(DivergenceError, match="3 steps in a row, 5 to 7") as caught:
        check_divergence(7, float("nan"), healthy._replace(consecutive_skipped=3), bounds)
    assert (caught.value.first, caught.value.last) == (5, 7)
    with pytest.raises(DivergenceError, match=r"3 losses .* to step 7, .* 5.00, were 2.10 .*, noise 1") as caught:
        check_divergence(7, 5.0, healthy._replace(loss_rise=2.1), bounds)
    assert (caught.value.first, caught.value.last) == (5, 7)
    with pytest.raises(DivergenceError, match=r"the average loss at step 7 was 2.10 above"):
        check_divergence(7, 5.0, healthy._replace(average_rise=2.1), bounds)


def test_the_share_of_skipped_steps_is_bounded():
    """Every second gradient was not finite in 40 of 80 steps, and the run "finished"."""
    losses = np.full(80, 5.0)
    found = measure(losses, skipped=np.arange(80) % 2 == 1)[1]
    check_divergence(21, 5.0, at_step(found, 20), RecoveryConfig())
    with pytest.raises(DivergedError, match="not finite in 12 steps, a share of 11% of the last 100"):
        check_divergence(25, 5.0, at_step(found, 24), RecoveryConfig())
    check_divergence(80, 5.0, at_step(found, 79), RecoveryConfig(max_skipped_share=1.0))
    # Steps in a row are rolled back, however many recovery.max_skipped allows.
    found = measure(losses, skipped=np.arange(80) >= 50)[1]
    check_divergence(69, 5.0, at_step(found, 68), RecoveryConfig(max_skipped=20))
    with pytest.raises(DivergenceError, match="20 steps in a row"):
        check_divergence(70, 5.0, at_step(found, 69), RecoveryConfig(max_skipped=20))


def test_a_run_that_skips_too_often_stops(run, config, tmp_path):
    """It stops at the same step when it is continued."""
    strict = dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, max_skipped_share=0.005))
    for _ in range(2):
        with pytest.raises(UserError, match="training stops at step 7: loss or gradient was not finite in 1 steps"):
            run(tmp_path / "run", 40, 41, config=strict)
    assert not rollbacks(tmp_path / "run") and lines(tmp_path / "run")[-1]["step"] == 6


def test_progress_renews_the_rollbacks(config, tmp_path):
    """They were counted over the whole run: three spikes within a million steps ended it."""
    config = dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, rollback_steps=1000))
    divergence = DivergenceError(5000, 5000, "a spike")
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(tmp_path / "run"), keep=1) as checkpoints:
        ledger = Ledger(tmp_path / "ledger.jsonl")
        for step in (100, 200, 300, 4000, 4001):
            ledger.make_decision("rollback", lambda step=step: {"step": step, "to": 0, "skipped_rows": [0, 0]})
        recovery.record_rollback(divergence, config, checkpoints, ledger)
        assert len(ledger.entries) == 6
        with pytest.raises(DivergedError, match=r"rolled back 2 time\(s\) within 1000 steps"):
            recovery.record_rollback(divergence, config, checkpoints, ledger)


def test_a_damaged_ledger_line_takes_later_decisions_along(tmp_path, capfd):
    """What a checkpoint was trained with is restored; what was decided later may have depended on the lost line."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    saved = [
        ledger.make_decision("rollback", lambda to=to: {"step": 9, "to": to, "skipped_rows": (to, 9)})
        for to in range(4)
    ]
    lines = path.read_bytes().splitlines(keepends=True)
    untyped = b'{"event": "rollback", "step": 9, "to": 1, "skipped_rows": [1]}\n'
    incomplete = b'{"event": "rollback", "to": 1}\n'
    for damaged in (b"\xff\n", lines[1].replace(b"1", b"7"), untyped, incomplete):
        path.write_bytes(b"".join([lines[0], damaged, *lines[2:]]))
        again = Ledger(path)
        again.restore(saved[:3])
        assert again.entries == Ledger(path).entries == saved[:3]
        assert "restored 3 from the checkpoint; later ones are made again" in capfd.readouterr().err
    again.make_decision("rollback", lambda: {"step": 9, "to": 8, "skipped_rows": [8, 9]})
    again.restore(saved[:3])
    assert [entry["to"] for entry in Ledger(path).entries] == [0, 1, 2, 8]


@pytest.mark.parametrize(("max_skipped", "steps"), [(1, 2), (3, 2), (5, 4)])
def test_steps_without_detection(plain_config, max_skipped, steps):
    """Three losses must be high, so a checkpoint after two of them is not good for a rollback yet."""
    recovery_config = RecoveryConfig(max_skipped=max_skipped)
    assert recovery.undetected_steps(dataclasses.replace(plain_config, recovery=recovery_config)) == steps


def test_the_first_checkpoint_of_a_fork_is_good(config, tmp_path):
    """As the initial state of any run is; a fork begins at a later step."""
    ledger, patient = Ledger(tmp_path / "ledger.jsonl"), dataclasses.replace(config.recovery, stable_steps=9)
    plain = dataclasses.replace(config, recovery=patient)
    fork = dataclasses.replace(plain, start=StartConfig(source="runs/a@20"))
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(tmp_path), keep=9) as checkpoints:
        for step in (20, 22):
            cursor = dataclasses.asdict(Cursor(step=step, rows=8 * step))
            checkpoints.save(step, {"x": jnp.zeros(2)}, {"cursor": cursor})
        assert [recovery.trusted_until_step(23, one, ledger, checkpoints) for one in (plain, fork)] == [14, 20]
        assert recovery.record_rollback(DivergenceError(23, 23, "spike"), fork, checkpoints, ledger)[0] == 20


def test_a_rollback_of_corrupted_replicas_proves_no_checkpoint(config, tmp_path):
    """It goes to the newest checkpoint, skips no rows, and counts; a later divergence may go back further."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.make_decision("rollback", lambda: {"step": 9, "to": 4, "skipped_rows": (40, 80)})
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(tmp_path), keep=9) as checkpoints:
        for step in (4, 8, 12):
            cursor = dataclasses.asdict(Cursor(step=step, rows=8 * step, skipped=((40, 80),)))
            checkpoints.save(step, {"x": jnp.zeros(2)}, {"cursor": cursor})
        error = ReplicaError(14, 14, "a device")
        to, line = recovery.record_rollback(error, config, checkpoints, ledger)
        assert to == 12 and "Rolling back to step 12, no rows are skipped; rollback 2 of at most 2" in line
        recovery.apply_rollback(checkpoints, ledger)
        assert checkpoints.steps() == [12, 8, 4]
        assert ledger.entries[-1]["skipped_rows"] is None and Ledger(ledger.path).entries == ledger.entries
        trusted = [recovery.trusted_until_step(step, config, ledger, checkpoints) for step in (14, 6)]
        assert trusted == [14 - config.recovery.stable_steps, 4]
        assert recovery.with_skipped_rows(Cursor(), ledger).skipped == ((40, 80),)
        with pytest.raises(DivergedError, match=r"replicas of the parameters differ: a device\. The run was rolled"):
            recovery.record_rollback(error, config, checkpoints, ledger)
