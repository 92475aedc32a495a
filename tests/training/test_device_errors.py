"""Runs that end by an error of the runtime, and runs that are started again and again."""

import dataclasses
import json

import jax
import pytest

from bert_jax.command import dispatch
from bert_jax.config import CheckpointConfig, RecoveryConfig
from bert_jax.distributed import device_errors
from bert_jax.errors import TRY_AGAIN, DeviceOrConnectionError, OutageError, PeerError, UserError
from bert_jax.training import loop
from bert_jax.training.run_directory import goodput
from tests.runs import assert_same_run

RuntimeFailure = jax.errors.JaxRuntimeError


def fail_at(step: int, error: Exception):
    """A hook that raises in this step of a start, counted from 1."""

    def hook(count, state):
        if count == step:
            raise error
        return state

    return hook


@pytest.fixture(scope="module")
def config(plain_config):
    """6 steps, a checkpoint every 3."""
    phase = dataclasses.replace(plain_config.phases[0], steps=6, warmup_steps=0)
    recovery = RecoveryConfig(max_starts=2)
    return dataclasses.replace(plain_config, phases=(phase,), checkpoint=CheckpointConfig(every=3), recovery=recovery)


@pytest.fixture(scope="module")
def undisturbed(config, train, tmp_path_factory):
    """The work directory of a whole run."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config, workdir)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            "UNKNOWN: Gloo\nfailed" + "x" * 1000,
            DeviceOrConnectionError,
            "processes failed (UNKNOWN: Gloo failedx",
        ),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes", UserError, "lower --micro-batch"),
    ],
)
def test_a_step_that_fails(config, undisturbed, train, tmp_path, error, kind, words):
    """One line; the next start continues, with the same result."""
    with pytest.raises(kind) as caught:
        train(config, tmp_path / "run", after_step=fail_at(5, RuntimeFailure(error)))
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed, config)


def test_errors_of_the_compiler_are_bugs(monkeypatch):
    def refuse(lowered):
        raise RuntimeFailure("INTERNAL: no such thing")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(RuntimeFailure, match="no such thing"), device_errors.describing_device_errors():
        device_errors.compile_program(jax.jit(lambda x: x + 1).trace(1))


def test_errors_at_barriers_of_orbax():
    """They are TimeoutError with the runtime's error as their cause, also when a peer has ended."""
    with pytest.raises(DeviceOrConnectionError, match="UNAVAILABLE: closed"), device_errors.describing_device_errors():
        raise TimeoutError("Timeout waiting at barrier") from RuntimeFailure("UNAVAILABLE: closed")
    with pytest.raises(TimeoutError, match="a disk"), device_errors.describing_device_errors():
        raise TimeoutError("a disk")


@pytest.mark.slow
def test_a_run_that_makes_no_checkpoint_is_not_started_for_ever(config, train, tmp_path):
    """After 2 starts in vain here. A checkpoint, and the end of the run, begin a new count."""
    workdir = tmp_path / "run"
    for step in (2, 4, 5, 5):
        with pytest.raises(DeviceOrConnectionError):
            train(config, workdir, after_step=fail_at(step, RuntimeFailure("INTERNAL: broken")))
    lines = (workdir / "goodput.jsonl").read_text()
    with pytest.raises(UserError, match=r"the last 2 starts .* after step 3: .*--recovery.max-starts 4"):
        train(config, workdir)
    assert (workdir / "goodput.jsonl").read_text() == lines
    more = dataclasses.replace(config, recovery=RecoveryConfig(max_starts=4))
    assert train(more, workdir).ended == "steps"
    for _ in range(3):
        assert train(config, workdir).ended == "steps"
    starts = [line["step"] for line in map(json.loads, lines.splitlines()) if line.get("start")]
    assert starts == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("error", "kind", "counts"),
    [
        (RuntimeFailure("INTERNAL: broken"), DeviceOrConnectionError, True),
        (OutageError("the store is away"), OutageError, True),
        (RuntimeFailure("RESOURCE_EXHAUSTED: Out of memory"), UserError, False),
    ],
)
def test_starts_that_end_before_there_are_parameters(config, train, tmp_path, monkeypatch, error, kind, counts):
    """They count, unless a user's mistake ended them, which no launcher repeats."""

    def fail(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_restore_or_init", fail)
        for _ in range(3):
            with pytest.raises((kind, UserError)) as caught:
                train(config, tmp_path / "run")
    assert ("the last 2 starts of this run made no checkpoint" in str(caught.value)) == counts
    if not counts:
        assert train(config, tmp_path / "run").ended == "steps"
        assert goodput.summarize(tmp_path / "run")["lost"] == 0


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            DeviceOrConnectionError("a device failed"),
            TRY_AGAIN,
            "a device failed: the same command continues from the newest",
        ),
        (PeerError("process 1 is late"), TRY_AGAIN, "process 1 is late: the same command continues from the newest"),
        (UserError("no such file"), 2, "error: no such file"),
        (OSError(28, "No space left on device", "a"), 2, "free some space"),
    ],
)
def test_exit_codes(error, code, words, capsys):
    def fail():
        raise error

    assert dispatch.run_guarded(fail) == code
    assert words in capsys.readouterr().err
