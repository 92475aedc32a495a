"""The command of ``--on-event``: what it gets, and that a run goes on whatever it does."""

import _thread
import os
import time
from pathlib import Path

import jax
import pytest

from bert_jax.distributed.supervised import WORKER_ENV
from bert_jax.errors import PeerError, UserError
from bert_jax.training.monitoring import event_hook
from bert_jax.training.monitoring.event_hook import EventHook

SAY = 'echo "$BERT_JAX_EVENT|$BERT_JAX_STEP|$BERT_JAX_EXIT_CODE|$BERT_JAX_PROCESS|$BERT_JAX_MESSAGE" >> said'
HANG = f"{SAY}; echo $$ > shell; sleep 600 & echo $! > child; wait"


@pytest.fixture
def said(tmp_path, monkeypatch):
    """The lines that commands have written."""
    monkeypatch.chdir(tmp_path)
    return lambda: (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_events_are_run_in_order(said, tmp_path, monkeypatch):
    monkeypatch.setenv(WORKER_ENV, "{}")
    command = f'test -z "${WORKER_ENV}" && test "$BERT_JAX_WORKDIR" = {tmp_path} && {SAY}'
    with EventHook(command, tmp_path) as hook:
        hook.report("start", 4, "two\nlines $(exit) '")
        hook.report("stall", 5)
        hook.report("end", 6, "finished", 0)
    assert said() == ["start|4||0|two lines $(exit) '", "stall|5||0|", "end|6|0|0|finished"]


def test_other_processes_report_stalls_only(said, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    with EventHook(SAY, tmp_path) as hook:
        hook.report("start", 4)
        hook.report("stall", 5)
    assert said() == ["stall|5||3|"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("no corpus"), "error||2|0|error: no corpus"),
        (PeerError("gone"), "error||75|0|error: gone: the same command continues from the newest checkpoint"),
        (ZeroDivisionError("bug"), "error||1|0|ZeroDivisionError: bug"),
        (KeyboardInterrupt("saved"), "stop||130|0|saved"),
    ],
)
def test_what_ends_a_run_is_reported_with_its_exit_code(said, tmp_path, error, line):
    with pytest.raises(type(error)), EventHook(SAY, tmp_path):
        raise error
    assert said() == [line]


@pytest.mark.parametrize(
    ("command", "problem"), [("exit 3", "code 3"), ("no-such-command", "code 127"), ("kill -9 $$", "code -9")]
)
def test_a_command_that_fails_costs_one_line(said, tmp_path, capfd, command, problem):
    with EventHook(f"{SAY}; {command}", tmp_path) as hook:
        hook.report("start", 0)
        hook.report("end", 1)
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: --on-event, ")]
    assert len(said()) == len(warnings) == 2 and all(problem in line for line in warnings)


def test_without_a_shell(said, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with EventHook(SAY, tmp_path) as hook:
        hook.report("start", 0)
    assert "start: the command cannot be started (No such file" in capfd.readouterr().err and not said()


def test_a_command_that_hangs_is_killed_with_its_children(said, tmp_path, capfd, monkeypatch):
    """Nothing waits for it but the end; the next event is reported."""
    monkeypatch.setattr(event_hook, "HOOK_SECONDS", 0.5)
    with EventHook(HANG, tmp_path) as hook:
        hook.report("start", 0)
        hook.report("end", 1)
        wait_until((tmp_path / "child").exists)
    assert [line.split("|")[0] for line in said()] == ["start", "end"]
    assert capfd.readouterr().err.count("the command took longer than 0.5 s and was killed") == 2
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize("line", ["", "saved"])
def test_ctrl_c_while_the_end_waits(said, tmp_path, line):
    """It is not for the command, which is in a session of its own; the wait ends, and the command with it.

    After another Ctrl-C, the line about the save stays.
    """
    hook = EventHook(HANG, tmp_path)

    def interrupt() -> None:
        wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().endswith("\n"))
        shell = int((tmp_path / "shell").read_text())
        sessions.append(os.getsid(shell) == shell)
        _thread.interrupt_main()

    sessions: list[bool] = []
    with pytest.raises(KeyboardInterrupt, match=f"^{line}$"), hook:
        hook.report("end", 1)
        _thread.start_new_thread(interrupt, ())
        if line:
            raise KeyboardInterrupt(line)
    assert sessions == [True]
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))
