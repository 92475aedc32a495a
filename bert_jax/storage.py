"""Files on disk and in object stores (gs://, s3://), and what differs between the two.

An object is written atomically. It can be neither renamed nor appended to, and there are no directories, only names
with slashes. docs/object_stores.md is the user's documentation.
"""

import concurrent.futures
import contextlib
import errno
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import fsspec
from etils import epath

from bert_jax import field_validation
from bert_jax.errors import OutageError, UserError, causes, install_command, short_repr

StoredPath = Path | epath.Path
"""A path on disk, or in an object store; the latter is always an epath.Path."""

COPY_THREADS = 8
"""Files copied at the same time."""
UPLOAD_INTERVAL_SECONDS = 30.0
"""Minimum interval between two uploads of a growing object."""
PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""Scheme -> the package for that store, and the extra of bert_jax that installs it."""
MAX_JSON_DEPTH = 50
"""Nesting of a JSON file; deeper nesting would exhaust the stack when it is written again."""
STORE_LIBRARIES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google.auth", "s3fs")
CONNECTION_ERRORS = {"ConnectionError", "HTTPClientError", "ClientConnectionError", "TransportError"}
"""Classes of botocore, aiohttp and google.auth, and of Python."""

# The same access to stores whether or not TensorFlow is installed.
os.environ.setdefault("EPATH_USE_TF", "false")
# Other processes write too, which makes cached listings stale.
for _scheme in ("gcs", "gs", "s3"):
    fsspec.config.conf.setdefault(_scheme, {}).setdefault("use_listings_cache", False)
# Connections at the same time; botocore's 10 leave many requests of a batch waiting.
fsspec.config.conf["s3"].setdefault("config_kwargs", {}).setdefault("max_pool_connections", 64)


def to_path(text: str | os.PathLike) -> StoredPath:
    """Return a path on disk or in a bucket; pathlib would turn ``gs://bucket/corpus`` into ``gs:/bucket/corpus``.

    A leading ``~`` is the home directory, as in shells, which do not replace it in ``--workdir=~/run``.

    Raises:
      UserError: a URL with an unsupported scheme, or a name that is not UTF-8.
    """
    try:
        os.fspath(text).encode()
    except UnicodeEncodeError as error:  # libraries in C++ refuse it
        raise UserError(f"{short_repr(os.fspath(text))}: the name is not UTF-8; choose another path") from error
    if not is_remote(text):
        return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises for unknown users)
    scheme = os.fspath(text).partition("://")[0]
    if scheme not in ("az", *PACKAGES):
        raise UserError(f"{text}: {scheme}:// is not supported: write gs://BUCKET/... or s3://BUCKET/...")
    return epath.Path(text)


def is_remote(path: str | os.PathLike) -> bool:
    """Whether a path is in an object store."""
    return "://" in os.fspath(path)


def check_reachable(path: StoredPath) -> None:
    """Check that a path can be looked up. The path itself need not exist, its bucket must.

    Raises:
      OutageError: the store cannot be connected to.
      UserError: a package, the credentials or the bucket are missing; no permission; an invalid name or scheme.
    """
    to_path(path)  # checks the scheme
    if not is_remote(path):
        try:
            path.exists()
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or str(error)).lower()}: choose another path") from error
        return
    scheme, _, rest = os.fspath(path).partition("://")
    bucket = rest.partition("/")[0]
    file_system(path)
    try:
        # Not exists(), which does not distinguish a missing bucket from an empty one.
        with contextlib.suppress(FileNotFoundError):
            next(epath.Path(path).iterdir(), None)
            return
        bucket_exists = epath.Path(f"{scheme}://{bucket}").exists()
    except Exception as error:
        kinds = {kind.__name__ for link in causes(error) for kind in type(link).__mro__}
        raise (OutageError if kinds & CONNECTION_ERRORS else UserError)(describe_unreachable(path, error)) from error
    if not bucket_exists:
        raise UserError(f"{path}: there is no bucket '{bucket}', or you have no permission to list it: create it first")


def unwritable_parent(path: StoredPath) -> Path | None:
    """The closest existing parent of a path on disk, if nothing can be made in it; otherwise None."""
    parent = next(parent for parent in Path(path).parents if os.path.lexists(parent))
    return None if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK) else parent


def check_writable(path: StoredPath) -> None:
    """Raise UserError if a file on disk cannot be made, as far as this is known before it is written."""
    if is_remote(path) or (parent := unwritable_parent(path)) is None:
        return
    if not parent.is_dir():
        raise UserError(f"{parent}: is a file, not a directory; choose another path")
    raise UserError(f"{parent}: you may not write there; choose another path, or change its permissions")


def file_system(path: str | os.PathLike) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec file system of a path in a store, and its name there; UserError if its package is missing."""
    scheme = os.fspath(path).partition("://")[0]
    try:
        return fsspec.core.url_to_fs(os.fspath(path))
    except ImportError as error:
        package, extra = PACKAGES.get(scheme, (f"of fsspec for {scheme}://", ""))
        install = install_command(extra) if extra else "install it"
        raise UserError(f"{path} needs the package {package}, which is missing: {install}") from error


_FULL = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`)",
}
FULL_OR_READ_ONLY = _FULL | {errno.EROFS: "mount it for writing and run the same command again"}
_LIMITS = {errno.EMFILE: "raise the limit of open files (`ulimit -n`)"}
_NOT_BUGS = {
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, *_LIMITS),
}


def describe_error(error: BaseException) -> str | None:
    """Describe an error of a disk or of a store's library in one line; None for any other error."""
    if line := describe_full_disk(error):
        return line
    if isinstance(error, OSError) and error.errno in _NOT_BUGS:
        advice = _LIMITS.get(error.errno, "choose another path, or check its permissions and its disk")
        return f"{_file_of(error)}{error.strerror}; {advice}"
    if is_outage(error):
        return f"{describe_unreachable('the object store', error)}; the same command continues where this one stopped"
    return None


def is_outage(error: BaseException) -> bool:
    """Whether the library of an object store raised an error."""
    return any(type(link).__module__.startswith(STORE_LIBRARIES) for link in causes(error))


def describe_full_disk(error: BaseException, remedies: dict[int, str] = _FULL) -> str | None:
    """Describe an error of a full disk or quota in one line, whichever library was writing; None for any other error.

    Libraries that are not written in Python raise exceptions of their own, with the system's message in them.
    """
    link: BaseException | None = error
    while link is not None:
        number = link.errno if isinstance(link, OSError) else None
        for known, remedy in remedies.items():
            if number == known or os.strerror(known) in str(link):
                return f"{_file_of(link)}{os.strerror(known)}; {remedy}"
        link = link.__cause__ or link.__context__
    return None


def _file_of(error: BaseException) -> str:
    file = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return f"{file}: " if file else ""


def describe_unreachable(target: object, error: BaseException) -> str:
    """Describe in one line why a store cannot be reached."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return f"{target} cannot be reached ({reason}): check credentials, permissions, endpoint and network"


def read_json_object(path: StoredPath, advice: str, *, missing_ok: bool = False) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
      path: the file.
      advice: what the user should do about a bad file; the end of the message.
      missing_ok: whether a missing file counts as an empty object.

    Raises:
      UserError: the file is missing, cannot be read, or `parse_json` refuses its content.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise UserError(f"{path} is missing: {advice}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}): {advice}") from error
    return parse_json(content, path, advice)


class _Versioned(TypedDict):
    format_version: int


def read_json_as(path: StoredPath, kind: Any, advice: str, version: int | None = None) -> Any:
    """Read a file that holds a JSON object, as a dataclass or TypedDict.

    Args:
      path: the file.
      kind: see `field_validation.from_json`.
      advice: what the user should do about a bad file, or one of an earlier format.
      version: the value that its `format_version` must have; None: it has none.

    Raises:
      UserError: the file has another version, or see `read_json_object` and `field_validation.from_json`.
    """
    value = read_json_object(path, advice)
    if version is not None:
        written = field_validation.from_json(_Versioned, value, path, advice)["format_version"]
        if written != version:
            remedy = "update bert_jax" if written > version else advice
            raise UserError(f"{path} has format version {written}, and this bert_jax reads {version}: {remedy}")
    return field_validation.from_json(kind, value, path, advice)


def parse_json(content: bytes | str, origin: object, advice: str, kind: type = dict) -> Any:
    """Parse a JSON object, or with `kind` list an array, from outside; messages begin with `origin`.

    Raises:
      UserError: the content is not JSON, not of this kind, or nested too deeply.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise UserError(f"{origin} is nested too deeply: {advice}") from error
    except ValueError as error:
        raise UserError(f"{origin} is not JSON ({error}): {advice}") from error
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise UserError(f"{origin} is nested too deeply: {advice}")
    if not isinstance(value, kind):
        name = "object" if kind is dict else "array"
        raise UserError(f"{origin} is not a JSON {name}, but {short_repr(value)}: {advice}")
    return value


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


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
