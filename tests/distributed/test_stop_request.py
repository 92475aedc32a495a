"""When Ctrl-C saves, and when it ends the process."""

import os
import pty
import signal
import subprocess
import sys
import threading

import jax
import pytest

from bert_jax.distributed.stop_request import stop_request

RUN = """
import sys, time
from bert_jax.distributed.stop_request import stop_request
with stop_request() as stopping:
    for _ in range(int(sys.argv[1])):
        assert not stopping()
    print("ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(60)  # no step is completed
"""


@pytest.mark.parametrize("steps", [0, 3])
def test_ctrl_c_ends_the_process(steps):
    """The first one before the first step, the second one afterwards, although no further step is completed."""
    run = subprocess.Popen([sys.executable, "-c", RUN, str(steps)], stdout=-1, stderr=-1, text=True)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    if steps:
        lines = [run.stderr.readline().strip() for _ in range(2)]
        assert lines == ["", "Ctrl-C: saving after this step; a second Ctrl-C stops at once without saving"]
        run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 130
    assert stderr.strip() == "stopped without saving; the same command continues from the newest checkpoint, if any"


STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop_after_the_step(number):
    before, threads = [signal.getsignal(one) for one in STOP_SIGNALS], threading.active_count()
    with stop_request() as stopping:
        assert not stopping()
        signal.raise_signal(number)
        assert stopping() and stopping.interrupted == (number == signal.SIGINT)
    assert [signal.getsignal(one) for one in STOP_SIGNALS] == before
    assert threading.active_count() == threads and signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number):
    """As for a command that a script starts with `&`, or under nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_request() as stopping:
            signal.raise_signal(number)
            assert not stopping() and not stopping.interrupted
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_in_several_processes_sighup_becomes_the_sigterm_that_jax_handles(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    received = []
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, lambda number, frame: received.append(number)) for one in numbers]
    try:
        with stop_request():
            signal.raise_signal(signal.SIGHUP)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert received == [signal.SIGTERM]


HANGUP = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal is that of this session
pipe = int(sys.argv[1])
from bert_jax.distributed.stop_request import stop_request
with stop_request() as stopping:
    os.write(pipe, b"r")
    while not stopping():
        pass
    for _ in range(9):  # the progress of the last steps
        print("step", file=sys.stderr, flush=True)
        print("step", flush=True)
os.write(pipe, b"saved")
"""


def test_a_terminal_that_is_gone():
    """Its processes get SIGHUP, and writing to it fails."""
    (ours, theirs), (reader, writer) = pty.openpty(), os.pipe()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "pass_fds": (writer,), "start_new_session": True}
    run = subprocess.Popen([sys.executable, "-c", HANGUP, str(writer)], **streams)
    os.close(theirs)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read(1) == b"r"
        os.close(ours)
        assert pipe.read() == b"saved"
    assert run.wait(timeout=60) == 0
