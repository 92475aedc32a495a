"""When Ctrl-C saves, and when it ends the process."""

import signal
import subprocess
import sys
import threading

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_a_stop_after_the_step(number):
    before, threads = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)], threading.active_count()
    with stop_request() as stopping:
        assert not stopping()
        signal.raise_signal(number)
        assert stopping() and stopping.interrupted == (number == signal.SIGINT)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    assert threading.active_count() == threads and signal.set_wakeup_fd(-1) == -1


def test_an_ignored_ctrl_c_stays_ignored():
    """As for a command that a script starts with `&`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_request() as stopping:
            signal.raise_signal(signal.SIGINT)
            assert not stopping() and not stopping.interrupted
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
