"""Files written, copied and uploaded whole."""

import concurrent.futures
import contextlib
import os
import resource
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath, is_remote

COPY_THREADS = 8
"""Files copied at the same time."""
UPLOAD_INTERVAL_SECONDS = 30.0
"""Minimum interval between two uploads of a growing object."""


def allow_open_files(count: int) -> None:
    """Raise this process' limit of open files, often 1,024, by a number, as far as the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_directory_if_local(path: StoredPath) -> None:
    """Create a directory on disk, with its parents. Does nothing in a store, which might create a bucket instead."""
    if not is_remote(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"{error.filename}: is a file, not a directory; choose another path") from error


def write_atomic(path: StoredPath, content: bytes) -> None:
    """Write or replace a file atomically; an OSError names the file."""
    if is_remote(path):
        path.write_bytes(content)
        return
    # Unique, since threads, processes and containers may write the same file.
    partial = path.parent / f"{path.name}.{uuid.uuid4().hex}.partial"
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(path)
        raise


def copy_tree(source: StoredPath, target: StoredPath) -> None:
    """Copy all files of a directory tree in threads; source or target is in an object store."""
    with concurrent.futures.ThreadPoolExecutor(COPY_THREADS) as pool:
        copies = []
        for file in walk_files(epath.Path(source)):
            copy = epath.Path(target) / file.relative_to(source).as_posix()
            make_directory_if_local(copy.parent)
            copies.append(pool.submit(file.copy, copy, overwrite=True))
        for future in copies:
            future.result()


def walk_files(directory: epath.Path, skip: Callable[[epath.Path], bool] = lambda path: False) -> Iterator[epath.Path]:
    """Yield all files of a directory tree, without those files and directories for which `skip` is true."""
    for entry in directory.iterdir():
        if not skip(entry):
            yield from walk_files(entry, skip) if entry.is_dir() else [entry]


class StagedDirectory:
    """A directory for libraries that write only to disks; `upload` copies it to its target.

    Attributes:
      directory: to write to; the target itself if the library can write there.
    """

    def __init__(self, target: StoredPath, native_schemes: tuple[str, ...] = ()):
        """Creates a temporary directory if one is needed.

        Args:
          target: of the upload.
          native_schemes: schemes of stores that the library can write to.
        """
        self._target = target
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="bert_jax-") if needs_staging(target, native_schemes) else None
        )
        self.directory = epath.Path(self._temporary.name if self._temporary else target)

    def upload(self) -> None:
        """Copy the current content to the target."""
        if self._temporary is not None:
            copy_tree(self.directory, self._target)

    def close(self) -> None:
        """Remove the temporary directory."""
        if self._temporary is not None:
            self._temporary.cleanup()


@contextlib.contextmanager
def download_if_needed(source: StoredPath, native_schemes: tuple[str, ...] = ()) -> Iterator[epath.Path]:
    """Yield a directory that a library for disks and `native_schemes` can read: the source, or a temporary copy."""
    if not needs_staging(source, native_schemes):
        yield epath.Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as local:
        copy_tree(source, Path(local))
        yield epath.Path(local)


def needs_staging(path: StoredPath, native_schemes: tuple[str, ...]) -> bool:
    """Whether a path is in an object store whose scheme is not native to a library."""
    return is_remote(path) and os.fspath(path).partition("://")[0] not in native_schemes


class BackgroundUpload:
    """Uploads growing content repeatedly in a thread, so that the caller does not wait for the network.

    An exception in the thread is raised by the next call of any method.
    """

    def __init__(self, send: Callable[[], None]):
        """Does not upload yet; `send` writes the whole current content."""
        self._send, self._last_upload, self._changed = send, time.monotonic(), False
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._upload: concurrent.futures.Future | None = None

    def content_changed(self) -> None:
        """Start an upload if none is running and the last one began `UPLOAD_INTERVAL_SECONDS` ago or earlier."""
        self._changed = True
        if self._upload is not None and not self._upload.done():
            return
        self._wait()
        if time.monotonic() - self._last_upload >= UPLOAD_INTERVAL_SECONDS:
            self._start()

    def flush(self) -> None:
        """Upload changed content, and wait until it is in the store."""
        self._wait()
        if self._changed:
            self._start()
            self._wait()

    def close(self) -> None:
        """Flush, and end the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _start(self) -> None:
        self._last_upload, self._changed = time.monotonic(), False
        self._upload = self._thread.submit(self._send)

    def _wait(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            self._changed = self._changed or upload.exception() is not None
            upload.result()
