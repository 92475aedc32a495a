"""A lock on a directory, on disk or in a store: a file that names the holder, which rewrites it while it is alive.

Object stores have no locks, and network file systems do not always have them, so no lock of the operating system is
used. Clocks of different hosts are not compared: a process of another host is alive if the file changes while this
process watches it. A process of this host is looked up by its id and its start time.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, TypedDict

from bert_jax.errors import UserError
from bert_jax.field_validation import from_json
from bert_jax.storage.failures import describe_full_disk
from bert_jax.storage.files import make_directory_if_local, write_atomic
from bert_jax.storage.json_files import parse_json
from bert_jax.storage.paths import StoredPath, file_system_and_name, is_remote

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS = 10.0
"""Interval between two rewrites of the file."""
STALE_SECONDS = 60.0
"""Without a change for this long, a process of another host counts as ended."""
SETTLE_SECONDS = 0.5
"""Between a write that may have raced with another process's, and reading it back."""


class _Owner(TypedDict):
    """What the file must hold."""

    host: str
    process: int
    since: str
    started: str | None
    id: str


_held: dict[str, StoredPath] = {}
"""Ids of the locks that this process holds -> their files."""


class InUseError(UserError):
    """A live process holds the lock of a directory."""


class DirectoryLock:
    """A lock on a directory. Use it in a ``with``, which releases it if it was acquired."""

    def __init__(self, directory: StoredPath):
        """Does not acquire the lock.

        Args:
          directory: to lock; it need not exist.
        """
        self._directory, self._path = directory, directory / LOCK_FILE
        self._owner: dict[str, Any] = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "machine": _machine_id(),
            "started": _start_time(os.getpid()),
            "id": uuid.uuid4().hex,
        }
        self._lost = ""
        self._confirmed = 0.0
        """When the file last named this lock as the holder; `time.monotonic` would stop while the host is suspended."""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, daemon=True)

    def acquire(self) -> None:
        """Acquire the lock, also one that an ended process left; creates the directory if it does not exist.

        It waits up to `STALE_SECONDS` to find out whether a process of another host is alive.

        Raises:
          InUseError: a live process holds it.
          UserError: the directory cannot be written.
        """
        try:
            make_directory_if_local(self._directory)
            while not self._try_acquire():
                pass
        except OSError as error:
            if full := describe_full_disk(error):
                raise UserError(full) from error
            raise UserError(
                f"cannot write to {self._directory}: {error.strerror or error}: choose another directory, or change "
                "its permissions"
            ) from error
        _held[self._owner["id"]] = self._path
        self._confirmed = time.time()
        self._thread.start()

    def check(self) -> None:
        """Raise if the lock was lost. Returns at once in processes that do not hold it.

        Raises:
          UserError: another process has taken over the lock because this one did not rewrite the file.
        """
        if self._owner["id"] not in _held:
            return
        # After a suspension this thread may run before the heartbeat's.
        if abs(time.time() - self._confirmed) > STALE_SECONDS:
            with contextlib.suppress(Exception):  # of any library: saving to an unreachable store raises by itself
                self._check_owner()
        if self._lost:
            raise UserError(f"{self._directory} was taken over by {self._lost}, which saw no heartbeat of this one")

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._owner["id"] not in _held:
            return
        self._released.set()
        self._thread.join()
        del _held[self._owner["id"]]
        try:
            _remove(self._path, self._owner["id"])
        except Exception as error:  # of any library: it must not hide the run's own exception
            print(f"warning: {self._path} cannot be removed ({error}): remove it", file=sys.stderr)

    def _try_acquire(self) -> bool:
        """Try once to acquire the lock; False: another process was faster."""
        existing, content = _read(self._path), json.dumps(self._owner).encode()
        if existing is not None:
            self._refuse_if_alive(existing)
            if _read(self._path) != existing:
                return False
            print(
                f"note: {self._directory} was left locked by {_describe(_parse(existing))}, which has ended",
                file=sys.stderr,
            )
            if not is_remote(self._path) and not _take_away(Path(self._path), existing):
                return False
        if existing is not None and is_remote(self._path):
            write_atomic(self._path, content)  # stores cannot rename
        else:
            try:
                _create(self._path, content)
            except FileExistsError:
                if Path(self._path).is_symlink():
                    raise UserError(f"{self._path} is a link to a file that does not exist: remove it") from None
                return False
        if is_remote(self._path):
            time.sleep(SETTLE_SECONDS)
        return _read(self._path) == content

    def _refuse_if_alive(self, content: bytes) -> None:
        """Return when the owner is not alive or has released the lock."""
        owner = _parse(content)
        alive = _is_alive(owner)
        if alive is None:
            print(
                f"note: {self._directory} is locked by {_describe(owner)}; waiting at most {STALE_SECONDS:g} s to see "
                "whether it is alive",
                file=sys.stderr,
            )
            deadline, latest = time.monotonic() + STALE_SECONDS, content
            while latest == content and time.monotonic() < deadline:
                time.sleep(STALE_SECONDS / 60)
                latest = _read(self._path)
            alive = latest not in (None, content) and _parse(latest).get("id") == owner.get("id")
        if alive:
            raise InUseError(
                f"{self._directory} is in use by {_describe(owner)}: wait until it ends, stop it, or use another "
                "directory"
            )

    def _check_owner(self) -> None:
        """Read the file, and note whether another process has taken over the lock."""
        owner = _parse(_read(self._path) or b"")
        if owner.get("id", self._owner["id"]) != self._owner["id"]:
            self._lost = _describe(owner)
        else:
            self._confirmed = time.time()

    def _send_heartbeats(self) -> None:
        """Rewrite the file until the lock is released or lost."""
        beats = 0
        while not self._released.wait(HEARTBEAT_SECONDS):
            beats += 1
            try:
                self._check_owner()
                if self._lost:
                    return
                write_atomic(self._path, json.dumps(self._owner | {"beats": beats}).encode())
            except Exception:  # of any library: a store may be unreachable for a while
                continue


def release_all() -> None:
    """Release all locks of this process, which is about to end without leaving their ``with``."""
    for owner, path in list(_held.items()):
        with contextlib.suppress(Exception):  # of any library: a lock that stays counts as an ended process's
            _remove(path, owner)


def _remove(path: StoredPath, owner: str) -> None:
    """Remove a lock file, unless another process has taken over the lock."""
    if _parse(_read(path) or b"").get("id") == owner:
        path.unlink(missing_ok=True)


def holder(directory: StoredPath) -> str | None:
    """Describe the process that holds a directory's lock; None if there is none, or it is known to have ended.

    For a lock of another host the process is named, whether or not it is alive.
    """
    content = _read(directory / LOCK_FILE)
    if content is None or _is_alive(_parse(content)) is False:
        return None
    return _describe(_parse(content))


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner of a lock is alive; None: it runs on another host, or is unknown."""
    if owner.get("machine") is None or owner["machine"] != _machine_id():
        return None
    if owner["process"] == os.getpid():
        return owner["id"] in _held
    return _start_time(owner["process"]) == owner["started"]


def _read(path: StoredPath) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _take_away(path: Path, content: bytes) -> bool:
    """Remove an ended process's lock file; False: another process has removed it, or replaced it with its own.

    However late this process is, only one can rename the file that it has read. A file that was renamed and is another
    one is the lock of a live process, and is put back; its owner would also write it again (`_send_heartbeats`).
    """
    taken = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.rename(taken)
    except FileNotFoundError:
        return False
    is_expected = _read(taken) == content
    if not is_expected:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(taken)  # unlike a rename, it replaces nothing
    taken.unlink(missing_ok=True)
    return is_expected


def _create(path: StoredPath, content: bytes) -> None:
    """Create the file; FileExistsError if it exists. A store without conditional writes may overwrite it."""
    if not is_remote(path):
        with Path(path).open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError as error:  # a full disk; an empty file would look like another process's
                Path(path).unlink()
                error.filename = os.fspath(path)
                raise
        return
    filesystem, name = file_system_and_name(path)
    try:
        filesystem.pipe_file(name, content, mode="create")
    except FileExistsError:
        raise
    except Exception as error:  # of any library: the file exists, no conditional writes, or the store fails
        if path.exists():
            raise FileExistsError(os.fspath(path)) from error
        write_atomic(path, content)  # raises if the store fails


def _parse(content: bytes) -> dict[str, Any]:
    """The owner; empty if the file is damaged or being written."""
    try:
        return from_json(_Owner, parse_json(content, LOCK_FILE, ""), LOCK_FILE)
    except UserError:
        return {}


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown process"
    return f"process {owner['process']} on {owner['host']} (since {owner['since']})"


def _machine_id() -> str | None:
    """Identifies a host, boot and PID namespace, in which process ids are comparable; None: unknown on this system."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start_time(process: int) -> str | None:
    """Start time of a process of this host, in clock ticks since boot; None if it has ended."""
    try:
        # After the name, which is in parentheses and may contain any character.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
