"""A process that hangs writes the stacks of its threads, says what it waits for, and ends."""

import json
import os
import signal
import threading
import time

import pytest

from bert_jax.command import stacks
from bert_jax.training.monitoring import watchdog
from bert_jax.training.monitoring.watchdog import Stall, Watchdog, describe_late, stall_limit
from bert_jax.training.run_directory.goodput import Activity, GoodputRecorder


@pytest.mark.parametrize(("longest", "limit"), [(None, float("inf")), (0.01, 300.0), (15.0, 300.0), (20.0, 400.0)])
def test_limits_are_those_of_the_history(longest, limit):
    assert stall_limit(300.0, longest) == limit


def stall(process: int, step: int, activity: str = "step") -> Stall:
    return {"process": process, "host": f"host{process}", "step": step, "activity": activity, "seconds": 9.0}


@pytest.mark.parametrize(
    ("stalls", "text"),
    [
        ([stall(0, 8), stall(1, 8), stall(2, 8)], ""),
        ([stall(0, 8), stall(1, 7), stall(2, 8)], "late: process 1 (host1) is waiting for the step, step 7"),
        ([stall(0, 8), stall(1, 8, "data_wait"), stall(2, 8)], "late: process 1 (host1) is reading the rows, step 8"),
        ([stall(2, 8, "data_wait")], "late: process 2 (host2) is reading the rows, step 8"),
        ([stall(0, 8), stall(2, 8)], "process(es) 1 wrote no stacks: stopped, or cut off from the disk"),
    ],
)
def test_who_is_late(stalls, text):
    assert describe_late(stalls, 3) == text


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def exit_codes() -> list[int]:
    """Codes that the process would have ended with."""
    return []


@pytest.fixture
def events() -> list[tuple]:
    """What the watchdog has reported."""
    return []


@pytest.fixture
def watch(tmp_path, monkeypatch, exit_codes, events):
    """A watchdog of a loop in one activity, with its history. Its thread waits instead of ending the process."""

    def make(activity: str, longest: dict[str, float], stall_seconds: float | None) -> Watchdog:
        goodput = GoodputRecorder(tmp_path, time.perf_counter())
        goodput.activity = Activity(activity, time.perf_counter(), 0.0)
        goodput.longest, goodput.step = longest, 7
        made = Watchdog(tmp_path, goodput, stall_seconds, lambda *event: events.append(event))
        monkeypatch.setattr(watchdog.os, "_exit", lambda code: exit_codes.append(code) or made._closed.wait())
        return made

    return make


def test_a_read_that_hangs(watch, tmp_path, exit_codes, events, capfd):
    with watch("data_wait", {"data_wait": 0.001}, 0.2):
        wait_until(lambda: exit_codes)
    assert exit_codes == [75]
    ((event, step, line),) = events
    assert (event, step) == ("stall", 7) and "reading the rows for 0 s" in line
    text = (tmp_path / "stacks" / "process0.txt").read_text()
    assert "step 7: reading the rows for 0 s, and at most 0.001 s before" in text
    assert "in wait_until" in text and "in _watch" in text
    found = json.loads((tmp_path / "stacks" / "process0.json").read_text())
    assert (found["step"], found["activity"]) == (7, "data_wait") and found["seconds"] >= 0.2
    err = capfd.readouterr().err
    assert err.count("warning: ") == err.count("error: ") == 1 and "the same command continues" in err


def full_disk(closed: threading.Event) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("write", "problem"),
    [(threading.Event.wait, "longer than 0.1 s"), (full_disk, "OSError: [Errno 28] No space left")],
)
def test_a_disk_that_hangs_or_is_full_is_not_waited_for(watch, exit_codes, capfd, monkeypatch, write, problem):
    closed = threading.Event()
    monkeypatch.setattr(watchdog, "write_atomic", lambda *_: write(closed))
    monkeypatch.setattr(watchdog, "WRITE_SECONDS", 0.1)
    with watch("checkpoint", {"checkpoint": 0.001}, 0.2):
        wait_until(lambda: exit_codes)
    closed.set()
    err = capfd.readouterr().err
    assert exit_codes == [75] and f"stacks cannot be written ({problem}" in err.replace("it takes ", "")
    assert "in wait_until" in err


def test_without_a_directory_for_temporary_files(watch, exit_codes, capfd, monkeypatch):
    def refuse(**_: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(stacks.tempfile, "mkdtemp", refuse)
    with watch("data_wait", {"data_wait": 0.001}, 0.2):
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: exit_codes)
    assert exit_codes == [75] and "warning: process 0 of 1" in capfd.readouterr().err


@pytest.mark.parametrize(("activity", "longest"), [("compile", {"compile": 0.0}), ("step", {"data_wait": 0.0})])
def test_compilation_and_the_first_of_a_kind_have_no_bound(watch, tmp_path, exit_codes, activity, longest):
    with watch(activity, longest, 0.05):
        time.sleep(0.3)
    assert not exit_codes and not (tmp_path / "stacks").exists()


def test_sigusr1_writes_stacks_and_ends_nothing(watch, tmp_path, exit_codes, capfd):
    file = tmp_path / "stacks" / "process0.txt"
    with watch("step", {}, None):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(file.exists)
            assert "in wait_until" in file.read_text() or "in test_sigusr1" in file.read_text()
            file.unlink()
    assert not exit_codes and f"stacks are in {file}" in capfd.readouterr().err
