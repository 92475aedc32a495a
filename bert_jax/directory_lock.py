"""One process at a time writes in a directory, on disk or in a store: a file names it, and changes while it lives.

Object stores have no locks, and network file systems do not always have them, so none of the operating system is used.
Clocks of different hosts are not compared: a process of another host is alive if the file changes while one watches it.
A process of this host is looked up by its id and its start time.
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
from typing import Any

import fsspec

from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, is_remote, make_directory, write_whole

LOCK = "run.lock"
BEAT_SECONDS = 10.0
"""Between two changes of the file."""
STALE_SECONDS = 60.0
"""Without a change, after which a process of another host counts as ended."""
SETTLE_SECONDS = 0.5
"""After a write that could have met another one, until it is read back."""
FIELDS = {"host": str, "process": int, "since": str, "started": str | None, "id": str}
"""Of the file that are read again, and their types."""
_held: dict[str, StoredPath] = {}
"""Ids of the locks that this process holds, and their files."""


class DirectoryLock:
    """The right to write in a directory. Use it in a ``with``, which releases it if it was acquired."""

    def __init__(self, directory: StoredPath):
        """Does nothing yet.

        Args:
          directory: which; it need not exist.
        """
        self._directory, self._path = directory, directory / LOCK
        self._owner: dict[str, Any] = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "machine": _machine(),
            "started": _started(os.getpid()),
            "id": uuid.uuid4().hex,
        }
        self._lost = ""
        self._confirmed = 0.0
        """When the file was last known to be this lock's; `time.monotonic` stops while the host is suspended."""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def acquire(self) -> None:
        """Take the lock, from an ended process too; makes the directory if need be.

        It waits up to `STALE_SECONDS` to see whether a process of another host is alive.

        Raises:
          UserError: a process that is alive holds it, or the directory cannot be written.
        """
        try:
            make_directory(self._directory)
            while not self._try():
                pass
        except OSError as error:
            raise UserError(
                f"cannot write to {self._directory}: {error.strerror or error}: choose another directory, or change "
                "its permissions"
            ) from error
        _held[self._owner["id"]] = self._path
        self._confirmed = time.time()
        self._thread.start()

    def check(self) -> None:
        """Called now and then by the holder; of several processes of a run the others hold nothing, and see nothing.

        Raises:
          UserError: another process has taken the lock over, because this one made no progress for long.
        """
        if self._owner["id"] not in _held:
            return
        # After a suspension this thread may run before that of the heartbeat.
        if abs(time.time() - self._confirmed) > STALE_SECONDS:
            with contextlib.suppress(Exception):  # of any library: a save to a store out of reach raises by itself
                self._look()
        if self._lost:
            raise UserError(
                f"{self._directory} was taken over by {self._lost}, which saw no sign of life from this one"
            )

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
        except Exception as error:  # of any library; the run's own exception counts
            print(f"warning: {self._path} cannot be removed ({error}): remove it", file=sys.stderr)

    def _try(self) -> bool:
        """Whether the lock is this one's now; False: another process was faster, look again."""
        found, content = _read(self._path), json.dumps(self._owner).encode()
        exclusive = found is None and not is_remote(self._path)
        if found is None:
            try:
                _create(self._path, content)
            except FileExistsError:
                if Path(self._path).is_symlink():
                    raise UserError(f"{self._path} is a link to a file that does not exist: remove it") from None
                return False
        else:
            self._refuse_if_alive(found)
            if _read(self._path) != found:
                return False
            print(
                f"note: {self._directory} was left locked by {_named(_parsed(found))}, which has ended", file=sys.stderr
            )
            write_whole(self._path, content)
        if not exclusive:
            time.sleep(SETTLE_SECONDS)
        return _read(self._path) == content

    def _refuse_if_alive(self, found: bytes) -> None:
        """Returns when the owner is not alive, or the lock is not its own any more."""
        owner = _parsed(found)
        alive = _is_alive(owner)
        if alive is None:
            print(
                f"note: {self._directory} is locked by {_named(owner)}; waiting at most {STALE_SECONDS:g} s to see "
                "whether it is alive",
                file=sys.stderr,
            )
            end, now = time.monotonic() + STALE_SECONDS, found
            while now == found and time.monotonic() < end:
                time.sleep(STALE_SECONDS / 60)
                now = _read(self._path)
            alive = now not in (None, found) and _parsed(now).get("id") == owner.get("id")
        if alive:
            raise UserError(
                f"{self._directory} is in use by {_named(owner)}: wait for its end, stop it, or use another directory"
            )

    def _look(self) -> None:
        """Find out whether another process has taken the lock over."""
        owner = _parsed(_read(self._path) or b"")
        if owner.get("id", self._owner["id"]) != self._owner["id"]:
            self._lost = _named(owner)
        else:
            self._confirmed = time.time()

    def _keep(self) -> None:
        """Change the file again and again, until it is released or another process's."""
        beats = 0
        while not self._released.wait(BEAT_SECONDS):
            beats += 1
            try:
                self._look()
                if self._lost:
                    return
                write_whole(self._path, json.dumps(self._owner | {"beats": beats}).encode())
            except Exception:  # of any library: a store may be out of reach for a while
                continue


def release_held() -> None:
    """Remove the locks of this process, which is about to end without leaving their ``with``."""
    for owner, path in list(_held.items()):
        with contextlib.suppress(Exception):  # of any library: a lock that stays is one of an ended process
            _remove(path, owner)


def _remove(path: StoredPath, owner: str) -> None:
    """Remove a lock, unless another process has taken it over."""
    if _parsed(_read(path) or b"").get("id") == owner:
        path.unlink(missing_ok=True)


def holder(directory: StoredPath) -> str | None:
    """The process that holds a directory, for a message; None if it is known that there is none.

    A process of another host that left a lock is named, whether or not it is alive.
    """
    content = _read(directory / LOCK)
    if content is None or _is_alive(_parsed(content)) is False:
        return None
    return _named(_parsed(content))


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner of a lock is alive; None: it is of another host, or unknown."""
    if owner.get("machine") is None or owner["machine"] != _machine():
        return None
    if owner["process"] == os.getpid():
        return owner["id"] in _held
    return _started(owner["process"]) == owner["started"]


def _read(path: StoredPath) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _create(path: StoredPath, content: bytes) -> None:
    """Raises FileExistsError if it is there; a store without conditional writes may overwrite it."""
    if not is_remote(path):
        with Path(path).open("xb") as file:
            file.write(content)
        return
    filesystem, name = fsspec.core.url_to_fs(os.fspath(path))
    try:
        filesystem.pipe_file(name, content, mode="create")
    except FileExistsError:
        raise
    except Exception as error:  # of any library: the condition is not met, or not supported, or the store fails
        if path.exists():
            raise FileExistsError(os.fspath(path)) from error
        write_whole(path, content)  # raises if the store fails


def _parsed(content: bytes) -> dict[str, Any]:
    """Empty if it is damaged, or just being written."""
    try:
        owner = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    known = isinstance(owner, dict) and all(isinstance(owner.get(name), kind) for name, kind in FIELDS.items())
    return owner if known else {}


def _named(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown process"
    return f"process {owner['process']} on {owner['host']} (since {owner['since']})"


def _machine() -> str | None:
    """What processes share that can look each other up by their ids; None: not known on this system."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(process: int) -> str | None:
    """When a process of this host began, in ticks since the host's start; None if it has ended."""
    try:
        fields = (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        )  # after the name, with any characters
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
