"""The lock of a directory: refused while its holder is alive, taken over afterwards, on disk and in a store."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from bert_jax.errors import UserError
from bert_jax.storage import lock as lock_lib
from bert_jax.storage.lock import LOCK_FILE, DirectoryLock
from tests.stores import MemoryStore, memory_store

HOLD = """
import sys, time
from pathlib import Path
from bert_jax.storage.lock import DirectoryLock
with DirectoryLock(Path(sys.argv[1])) as lock:
    lock.acquire()
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock_lib, "SETTLE_SECONDS", 0.0)


@pytest.fixture(params=["disk", "store"])
def place(request, tmp_path):
    return tmp_path / "run" if request.param == "disk" else memory_store() / "run"


def names(place) -> list[str]:
    return [path.name for path in place.iterdir()] if place.exists() else []


def test_one_at_a_time(place):
    with DirectoryLock(place) as first, DirectoryLock(place) as second:
        first.acquire()
        words = rf"run is in use by process {os.getpid()} on .* \(since 20.*UTC\): wait until it ends"
        with pytest.raises(UserError, match=words):
            second.acquire()
        first.check()
        second.check()  # process 0 of a run holds the lock; all processes call `check`
        assert names(place) == [LOCK_FILE]
        lock_lib.release_all()  # before os._exit
        assert names(place) == []
    with DirectoryLock(place) as first:
        first.acquire()
    assert names(place) == []


@pytest.mark.slow
def test_a_second_process(tmp_path, capfd):
    """Refused while the first is alive; after a SIGKILL the lock is free at once."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with DirectoryLock(tmp_path) as lock:
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
            lock.acquire()
        holder.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, whose id is not free
        lock.acquire()
        assert f"was left locked by process {holder.pid} on " in capfd.readouterr().err
    holder.communicate()


def leave_lock(place, **changes) -> dict:
    """A lock file of a process that did not release it."""
    owner = DirectoryLock(place)._owner | changes
    lock_lib.make_directory_if_local(place)
    (place / LOCK_FILE).write_bytes(json.dumps(owner).encode())
    return owner


def test_two_processes_find_a_dead_lock(tmp_path, monkeypatch):
    """One of them stops between reading it and replacing it, while the other acquires the lock."""
    leave_lock(tmp_path, process=2**22 + 1, started="1")
    with DirectoryLock(tmp_path) as first, DirectoryLock(tmp_path) as late:
        entered = []

        def acquire_first(*words, **_) -> None:
            entered.append(words)
            if len(entered) == 1:
                first.acquire()

        monkeypatch.setattr(lock_lib, "print", acquire_first, raising=False)
        with pytest.raises(UserError, match="is in use by process"):
            late.acquire()
        first.check()
        assert json.loads((tmp_path / LOCK_FILE).read_text())["id"] == first._owner["id"]
        assert names(tmp_path) == [LOCK_FILE]
        assert not lock_lib._take_away(tmp_path / "another", b"")


class Clock:
    """Replaces the module `time`: sleeping takes no time and calls a function."""

    def __init__(self, on_sleep):
        self.now, self.on_sleep = 0.0, on_sleep
        self.strftime, self.gmtime, self.time = time.strftime, time.gmtime, time.time

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


def test_a_process_of_another_host(place, monkeypatch, capfd):
    """Its clock does not matter, only whether the file changes."""
    owner = leave_lock(place, machine="elsewhere", host="node7", process=3, since="2001")
    changed = json.dumps(owner | {"beats": 1}).encode()
    changes = iter([lambda: (place / LOCK_FILE).write_bytes(changed)])
    monkeypatch.setattr(lock_lib, "time", Clock(lambda: next(changes, lambda: None)()))
    with DirectoryLock(place) as lock:
        with pytest.raises(UserError, match=r"in use by process 3 on node7 \(since 2001\)"):
            lock.acquire()
        lock.acquire()  # it does not change any more
        stderr = capfd.readouterr().err
        assert "waiting at most 60 s" in stderr
        assert "was left locked by process 3 on node7 (since 2001), which has" in stderr
        lock.check()


def test_a_holder_notices_that_it_was_taken_over(place, monkeypatch):
    """As after a suspension. The file stays the other's."""
    monkeypatch.setattr(lock_lib, "HEARTBEAT_SECONDS", 0.02)
    with DirectoryLock(place) as lock:
        lock.acquire()
        end = time.monotonic() + 60
        while b"beats" not in (place / LOCK_FILE).read_bytes() and time.monotonic() < end:
            time.sleep(0.01)
        lock.check()
        with pytest.raises(UserError, match="was taken over by process 3 on node7"):
            while time.monotonic() < end:
                taker = leave_lock(place, host="node7", process=3)  # again, if a heartbeat was written over it
                lock.check()
                time.sleep(0.01)
    assert json.loads((place / LOCK_FILE).read_bytes()) == taker


def test_an_error_of_the_store_does_not_hide_that_of_the_run(place, monkeypatch, capfd):
    def fail(path):
        raise ConnectionError("no route")

    with pytest.raises(ValueError, match="of the run"), DirectoryLock(place) as lock:
        lock.acquire()
        monkeypatch.setattr(lock_lib, "_read", fail)
        raise ValueError("of the run")
    assert f"warning: {place / LOCK_FILE} cannot be removed (no route): remove it" in capfd.readouterr().err


def test_after_a_suspension_the_file_is_read_at_once(place, monkeypatch):
    """The heartbeat's thread may run later than the one that saves a checkpoint."""
    with DirectoryLock(place) as lock:
        lock.acquire()
        leave_lock(place, host="node7", process=3)
        lock.check()
        monkeypatch.setattr(lock_lib, "STALE_SECONDS", -1.0)
        with pytest.raises(UserError, match="was taken over by process 3 on node7"):
            lock.check()


def test_a_damaged_file_or_a_process_id_that_was_reused_does_not_lock(place, monkeypatch):
    monkeypatch.setattr(lock_lib, "time", Clock(lambda: None))
    reused = json.dumps(leave_lock(place, process=os.getppid(), started="0")).encode()
    for content in (reused, b"", b"{", b"3", b"{}", b"[" * 100_000, reused.replace(b'"0"', b"0")):
        (place / LOCK_FILE).write_bytes(content)
        with DirectoryLock(place) as lock:
            lock.acquire()


@pytest.mark.parametrize("faster", [False, True])
def test_a_store_that_refuses_conditional_writes(monkeypatch, faster):
    """The file is written and read back, unless another process has written one."""
    place, other = memory_store() / "run", os.getppid()

    def refuse(self, path, value, mode="overwrite", **_):
        if faster:
            leave_lock(place, process=other, started=lock_lib._start_time(other))
        raise OSError(errno.ENOSYS, "A header is not implemented")

    monkeypatch.setattr(MemoryStore, "pipe_file", refuse)
    with DirectoryLock(place) as lock:
        if faster:
            with pytest.raises(UserError, match=f"in use by process {other} on "):
                lock.acquire()
        else:
            lock.acquire()
            assert names(place) == [LOCK_FILE]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"cannot write to .*file/run: .*: choose another directory, or change"),
        DirectoryLock(tmp_path / "file" / "run") as lock,
    ):
        lock.acquire()


def test_a_dangling_link_is_refused_at_once(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "nowhere")
    with DirectoryLock(tmp_path) as lock, pytest.raises(UserError, match="a link to a file that does not exist"):
        lock.acquire()


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    """An empty file would count as the lock of an unknown process, and the next start would wait."""
    (tmp_path / "run").mkdir()
    full = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115

    def open_full(self, mode="r", **options):
        return FullFile(real(self, mode, **options)) if self.name == LOCK_FILE and "x" in mode else real(self, mode)

    class FullFile:
        def __init__(self, file):
            file.close()

        def __enter__(self):
            return full

        def __exit__(self, *_):
            full.close()

    real = pathlib.Path.open
    monkeypatch.setattr(pathlib.Path, "open", open_full)
    with pytest.raises(UserError, match=r"run/run\.lock: No space left on device; free some space"):
        DirectoryLock(tmp_path / "run").acquire()
    assert names(tmp_path / "run") == []
