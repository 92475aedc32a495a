"""Work in several processes: order, errors, and no remaining processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_jax.errors import UserError
from data_prep.parallel import SharedProgress, WorkerPool, ordered_map


def double(task):
    return 2 * task


def fail_at_five(task):
    if task == 5:
        raise ZeroDivisionError("five")
    return task


def die_at_five(task):
    if task == 5:
        os._exit(1)
    return task


def nothing():
    pass


@pytest.mark.parametrize("workers", [1, 2])
def test_order_and_laziness(workers):
    taken = []

    def tasks():
        for task in range(100):
            taken.append(task)
            yield task

    results = ordered_map(double, tasks(), workers, str, nothing)
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    assert len(taken) <= 3 + 3 * workers
    assert list(results) == [2 * task for task in range(3, 100)]


begun = 0


def begin():
    global begun
    begun += 1


def times_begun(task):
    return task, os.getpid(), begun


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_are_begun_once_for_all_their_work(workers, monkeypatch):
    monkeypatch.setattr(f"{__name__}.begun", 0)
    with WorkerPool(workers, begin) as processes:
        results = [*processes.map(times_begun, range(20), str), *processes.map(times_begun, range(20), str)]
    assert [task for task, _, _ in results] == 2 * list(range(20))
    assert {count for _, _, count in results} == {1}
    assert len({pid for _, pid, _ in results}) <= workers


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_comes_back(workers):
    with pytest.raises(ZeroDivisionError, match="five"):
        list(ordered_map(fail_at_five, range(20), workers, str, nothing))


def test_a_dead_worker_is_reported():
    with pytest.raises(UserError, match=r"a worker process died at or after task \d"):
        list(ordered_map(die_at_five, range(20), 2, lambda task: f"task {task}", nothing))


LONELY = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from data_prep.parallel import ordered_map

def work(seconds):
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece
    time.sleep(seconds)

if __name__ == "__main__":
    list(ordered_map(work, [600, 600], 2, str, int))
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "lonely.py"
    script.write_text(LONELY)
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, str(script), root], stdout=subprocess.PIPE, text=True) as process:
        try:
            workers = [int(process.stdout.readline()) for _ in range(2)]
            assert all(Path(f"/proc/{pid}").exists() for pid in workers)
        finally:
            process.kill()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


progress = None


def begin_with(shared):
    global progress
    progress = shared


def fail_or_work(task):
    """The task that fails does so when the other one, which takes long, is under way."""
    path, fails = task
    while fails and not path.exists():
        time.sleep(0.01)
    if fails:
        raise ZeroDivisionError
    path.write_text("begun")
    for _ in range(1000):
        progress.add(1)
        time.sleep(0.01)
    path.write_text("finished")


def test_after_an_error_tasks_end_early(tmp_path):
    tasks = [(tmp_path / "file", fails) for fails in (True, False)]
    with pytest.raises(ZeroDivisionError), WorkerPool(2, begin_with, (SharedProgress(),)) as processes:
        list(processes.map_unordered(fail_or_work, tasks, str))
    assert (tmp_path / "file").read_text() == "begun"


def blocked_signals(_):
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_workers_start_with_ctrl_c_blocked():
    here = blocked_signals(None)
    assert signal.SIGINT not in here
    assert list(ordered_map(blocked_signals, [0, 1], 2, str, nothing)) == [here | {signal.SIGINT, signal.SIGHUP}] * 2


STARTING = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from data_prep.parallel import ordered_map
signal.signal(signal.SIGTERM, signal.default_int_handler)
print("ready", flush=True)
try:
    list(ordered_map(abs, range(10**9), 2, str, int))
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_silently_while_workers_start(number):
    root = str(Path(__file__).parents[2])
    for tenths in range(6):
        command = [sys.executable, "-c", STARTING, root]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, start_new_session=True, **pipes) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.03 + tenths / 20)
            os.killpg(process.pid, number)
            output, errors = process.communicate(timeout=60)
        assert (output, errors) == ("stopped\n", "")
