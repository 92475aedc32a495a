"""Copies of files from a store: verified, within a limit, shared by processes, the oldest removed first."""

import concurrent.futures
import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax.errors import UserError
from bert_jax.storage import cache as cache_lib
from bert_jax.storage.cache import LocalCache
from tests.stores import memory_store

HOLD = """
import sys, time
from bert_jax.storage.cache import LocalCache
assert LocalCache(sys.argv[1]).use_existing(sys.argv[2])
print("used", flush=True)
time.sleep(600)
"""
KILLED = """
import os, signal, sys
from bert_jax.storage import cache as cache_lib
from bert_jax.storage.cache import LocalCache
cache_lib.is_remote = lambda path: True
def killed(path, size):
    yield b"ha"
    os.kill(os.getpid(), signal.SIGKILL)
cache_lib.read_blocks = killed
LocalCache(sys.argv[1], 4e-9).local_path("az://bucket/x", sys.argv[2], 4)
"""


@pytest.fixture
def bucket():
    return memory_store()


@pytest.fixture
def directory(tmp_path):
    yield tmp_path / "cache"
    release()


def release() -> None:
    """This process no longer uses any copy, as if it had ended."""
    while cache_lib._used:
        os.close(cache_lib._used.popitem()[1])


def put(bucket, name: str, content: bytes) -> tuple:
    """Arguments of `local_path` for an object."""
    (bucket / name).write_bytes(content)
    return bucket / name, hashlib.sha256(content).hexdigest(), len(content)


def kept(directory: Path) -> set[str]:
    return {path.read_text() for path in directory.iterdir() if not path.suffix}


def test_a_file_is_copied_once_per_host(bucket, directory):
    cache, file = LocalCache(str(directory)), put(bucket, "shard", os.urandom(10_000_000))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        (local,) = set(pool.map(lambda _: cache.local_path(*file), range(8)))
    assert Path(local).read_bytes() == file[0].read_bytes() and Path(local).parent == directory
    file[0].unlink()
    assert cache.local_path(bucket / "elsewhere", *file[1:]) == local
    assert cache.local_path(Path("here"), *file[1:]) == "here"
    assert {path.name for path in directory.iterdir()} == {file[1], cache_lib.DIRECTORY_LOCK}


def test_a_damaged_copy_is_not_kept(bucket, directory):
    cache = LocalCache(str(directory))
    path, sha256, _ = put(bucket, "shard", b"good")
    path.write_bytes(b"baad")
    with pytest.raises(UserError, match="az://bucket/shard: damaged, its SHA-256 is not the recorded one"):
        cache.local_path(path, sha256, 4)
    assert kept(directory) == set() and not list(directory.glob("*.partial"))
    path.write_bytes(b"good")
    assert Path(cache.local_path(path, sha256, 4)).read_bytes() == b"good"
    with pytest.raises(FileNotFoundError):
        cache.local_path(bucket / "nothing", "0" * 64, 4)


def test_the_oldest_unused_copies_are_removed(bucket, directory):
    cache = LocalCache(str(directory), limit_gb=10e-9)
    files = {name: put(bucket, name, name.encode() * 4) for name in "abc"}
    for age, name in enumerate("ba"):
        os.utime(cache.local_path(*files[name]), (age, age))
    assert cache.path_if_room(*files["c"]) is None, "this process uses both"
    with pytest.raises(UserError, match=r"cache: no room for a copy of az://bucket/c .*: the limit of 1e-08 GB"):
        cache.local_path(*files["c"])
    assert kept(directory) == {"aaaa", "bbbb"}
    release()
    cache.local_path(*files["c"])
    assert kept(directory) == {"aaaa", "cccc"}
    release()
    os.utime(directory / files["a"][1], (0, 0))
    cache.local_path(*files["a"])  # its age is that of its last use
    release()
    os.utime(directory / files["c"][1], (1, 1))
    cache.local_path(*files["b"])
    assert kept(directory) == {"aaaa", "bbbb"}
    assert cache.path_if_room(*put(bucket, "large", b"x" * 11)) is None


def test_several_processes_share_the_limit(bucket, directory):
    """A copy that another process uses remains, also after that process was stopped; it is free when that has ended."""
    cache = LocalCache(str(directory), limit_gb=4e-9)
    first, second = put(bucket, "a", b"aaaa"), put(bucket, "b", b"bbbb")
    cache.local_path(*first)
    release()
    words = [sys.executable, "-c", HOLD, str(directory), first[1]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout.readline() == "used\n"
        found = cache.path_if_room(*second)
        user.send_signal(signal.SIGKILL)
    assert found is None
    cache.local_path(*second)
    assert kept(directory) == {"bbbb"}


def test_a_killed_copy_leaves_nothing_that_counts(bucket, directory):
    path, sha256, size = put(bucket, "a", b"haha")
    words = [sys.executable, "-c", KILLED, str(directory), sha256]
    assert subprocess.run(words).returncode == -signal.SIGKILL
    assert len(list(directory.glob("*.partial"))) == 1 and kept(directory) == set()
    cache = LocalCache(str(directory), limit_gb=4e-9)
    assert Path(cache.local_path(path, sha256, size)).read_bytes() == b"haha"
    assert not list(directory.glob("*.partial"))


def test_a_file_system_without_locks(bucket, directory, monkeypatch):
    def fail(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cache_lib.fcntl, "flock", fail)
    with pytest.raises(UserError, match=r"has no file locks \(flock: No locks available\): set --data.cache-dir"):
        LocalCache(str(directory)).local_path(*put(bucket, "a", b"aaaa"))
    assert not list(directory.iterdir())


def test_a_tenth_of_the_disk_remains_free(bucket, directory, monkeypatch):
    file = put(bucket, "a", b"aaaa")
    usage = cache_lib.shutil.disk_usage("/")
    for free, fits in ((usage.total // 10 + 3, False), (usage.total // 10 + 5, True)):
        monkeypatch.setattr(cache_lib.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert (LocalCache(str(directory)).path_if_room(*file) is not None) == fits
