"""Copies of files from object stores on a disk of this host, within a limit; the oldest unused ones are removed.

Processes of a host share the directory. A copy is named by the SHA-256 of its content, and gets its name only when its
content has this checksum. A process holds a shared lock (flock) on every copy that it uses until it ends, however it
ends; a copy on which nobody has a lock may be removed, those first whose last use is longest ago.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath, is_remote
from bert_jax.storage.ranges import read_blocks

DIRECTORY_LOCK = "cache.lock"
"""Held while sizes are added up and copies are removed."""
FREE_SHARE = 0.1
"""Without a limit, copies are made while at least this share of the disk remains free."""
PARTIAL = ".partial"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

_used: dict[str, int] = {}
"""Copies that this process uses -> file descriptors, which hold their locks."""
_used_lock = threading.Lock()


@dataclass(frozen=True)
class LocalCache:
    """Where copies are kept on this host, and how much of them."""

    directory: str | None = None
    """None: $BERT_JAX_CACHE, or else ~/.cache/bert_jax."""
    limit_gb: float | None = None
    """Largest size of all copies together, in units of 10^9 bytes. None: a tenth of the disk remains free."""

    @property
    def path(self) -> Path:
        """The directory."""
        chosen = self.directory or os.environ.get("BERT_JAX_CACHE")
        return Path(os.path.expanduser(chosen)) if chosen else Path.home() / ".cache" / "bert_jax"  # noqa: PTH111

    def local_path(self, path: StoredPath, sha256: str, size: int) -> str:
        """A local path of a file, which is copied if it is in a store.

        Args:
          path: of the file.
          sha256: of its content, in hex.
          size: of the file, in bytes.

        Raises:
          UserError: the content has another checksum, or there is no room for the copy.
          FileNotFoundError: there is no such object.
        """
        local = self.path_if_room(path, sha256, size)
        if local is None:
            limit = "the disk" if self.limit_gb is None else f"the limit of {self.limit_gb:g} GB (data.cache_limit_gb)"
            raise UserError(
                f"{self.path}: no room for a copy of {path} ({size / 1e9:.3g} GB): {limit} is full, and processes use"
                " what it holds; raise the limit, free space, or choose another data.cache_dir"
            )
        return local

    def path_if_room(self, path: StoredPath, sha256: str, size: int) -> str | None:
        """As `local_path`, but None if there is no room for a copy."""
        if not is_remote(path):
            return os.fspath(path)
        local = self.path / sha256
        if self.use_existing(sha256):
            return os.fspath(local)
        self.path.mkdir(parents=True, exist_ok=True)
        with _locked(local.with_suffix(".lock"), remove=True):
            if self.use_existing(sha256):
                return os.fspath(local)
            reserved = self._reserve(sha256, size)
            if reserved is None:
                return None
            partial, descriptor = reserved
            try:
                _copy_verified(path, descriptor, sha256, size)
                partial.replace(local)
            except BaseException:
                partial.unlink(missing_ok=True)
                os.close(descriptor)
                raise
            _flock(descriptor, fcntl.LOCK_SH)
            _keep(local, descriptor)
        return os.fspath(local)

    def use_existing(self, sha256: str) -> bool:
        """Whether there is a copy; from now on it remains until this process ends."""
        local = self.path / sha256
        with _used_lock:
            if os.fspath(local) in _used and local.exists():
                return True
        try:
            descriptor = os.open(local, os.O_RDONLY)
        except FileNotFoundError:
            return False
        _flock(descriptor, fcntl.LOCK_SH)
        if not os.fstat(descriptor).st_nlink:  # removed before it was locked
            os.close(descriptor)
            return False
        os.utime(descriptor)
        _keep(local, descriptor)
        return True

    def _reserve(self, sha256: str, size: int) -> tuple[Path, int] | None:
        """A new file of this size with a name of its own, and its locked descriptor; None: there is no room."""
        partial = self.path / f"{sha256}.{uuid.uuid4().hex}{PARTIAL}"
        with _locked(self.path / DIRECTORY_LOCK):
            if not self._make_room(size):
                return None
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            _flock(descriptor, fcntl.LOCK_EX)
            os.truncate(descriptor, size)
        return partial, descriptor

    def _make_room(self, size: int) -> bool:
        """Removes what killed processes left, and unused copies, the oldest first, until `size` bytes fit."""
        copies = []
        for entry in os.scandir(self.path):
            if entry.name.endswith(PARTIAL) and _remove_if_unused(entry.path):
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                copies.append((stat.st_mtime, stat.st_size, entry))
        used = sum(copy_size for _, copy_size, _ in copies)
        if self.limit_gb is None:
            disk = shutil.disk_usage(self.path)
            limit = used + disk.free - FREE_SHARE * disk.total
        else:
            limit = self.limit_gb * 1e9
        for _, copy_size, entry in sorted(copies, key=lambda copy: copy[0]):
            if used + size <= limit:
                break
            if _is_copy(entry.name) and _remove_if_unused(entry.path):
                used -= copy_size
        return used + size <= limit


def _flock(file: int | TextIO, operation: int) -> None:
    """Lock a file of the cache; UserError if its file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise UserError(
                f"the file system of the cache has no file locks (flock: {error.strerror}): set --data.cache-dir or "
                "BERT_JAX_CACHE to a directory on a disk of this host"
            ) from error
        raise


def _is_copy(name: str) -> bool:
    return len(name) == 64 and not set(name) - set("0123456789abcdef")


def _keep(local: Path, descriptor: int) -> None:
    with _used_lock:
        earlier = _used.pop(os.fspath(local), None)
        if earlier is not None:
            os.close(earlier)
        _used[os.fspath(local)] = descriptor


def _remove_if_unused(path: str) -> bool:
    """Removes a file on which no process has a lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(path).unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def _locked(path: Path, *, remove: bool = False) -> Iterator[None]:
    """Holds an exclusive lock; with `remove`, the file is removed afterwards, as all who wait first look for a copy."""
    with path.open("w") as lock:
        try:
            _flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            if remove:
                path.unlink(missing_ok=True)


def _copy_verified(path: StoredPath, descriptor: int, sha256: str, size: int) -> None:
    digest, at = hashlib.sha256(), 0
    for block in read_blocks(path, size):
        digest.update(block)
        while block:
            written = os.pwrite(descriptor, block, at)
            at, block = at + written, block[written:]
    if digest.hexdigest() != sha256:
        raise UserError(f"{path}: damaged, its SHA-256 is not the recorded one; copy the corpus again or rebuild it")
