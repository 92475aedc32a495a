"""Files on disk and in object stores (gs://, s3://): what differs between the two has its place here.

An object appears whole or not at all. It can neither be renamed nor grow, and there are no directories: a name with
slashes is all there is. docs/object_stores.md says what a user has to know.
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from etils import epath

from bert_jax.errors import UserError, brief, install_command

StoredPath = Path | epath.Path
"""On disk, or in an object store: then always an epath.Path."""

BLOCK_BYTES = 1 << 22
THREADS = 8
"""Files on their way at once."""
EVERY_SECONDS = 30.0
"""So often at most is an object that grows written anew."""
PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""By scheme: the package that reaches the store, and the extra of bert_jax that brings it."""
DEEPEST = 50
"""Brackets inside brackets of a JSON file; more would exhaust the stack when it is written again."""
LIBRARIES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google.auth", "s3fs")

# One way to reach a store, whether or not TensorFlow is installed.
os.environ.setdefault("EPATH_USE_TF", "false")
# Other processes write, too: what a listing said a minute ago is no answer.
for _scheme in ("gcs", "gs", "s3"):
    fsspec.config.conf.setdefault(_scheme, {}).setdefault("use_listings_cache", False)


def path(text: str | os.PathLike) -> StoredPath:
    """A place on disk or in a bucket, as ``gs://bucket/corpus``; pathlib would take that for ``gs:/bucket``.

    Raises:
      UserError: a URL of no store that can be reached.
    """
    if not is_remote(text):
        return Path(text)
    scheme = os.fspath(text).partition("://")[0]
    if scheme not in ("az", *PACKAGES):
        raise UserError(f"{text}: {scheme}:// is no store that can be used: write gs://BUCKET/... or s3://BUCKET/...")
    return epath.Path(text)


def is_remote(place: str | os.PathLike) -> bool:
    """Whether a path leads to an object store."""
    return "://" in os.fspath(place)


def reach(place: StoredPath) -> None:
    """See that a path can be looked up; nothing needs to be there yet, but the bucket.

    Raises:
      UserError: a package is missing, or credentials, or the bucket; no network; no permission; an impossible name.
    """
    if not is_remote(place):
        try:
            place.exists()
        except OSError as error:
            raise UserError(f"{place}: {(error.strerror or str(error)).lower()}: choose another path") from error
        return
    scheme, _, rest = os.fspath(place).partition("://")
    bucket = rest.partition("/")[0]
    package, extra = PACKAGES.get(scheme, (f"of fsspec for {scheme}://", ""))
    try:
        # Not exists(): it takes a bucket that is not there for an empty one.
        with contextlib.suppress(FileNotFoundError):
            next(epath.Path(place).iterdir(), None)
            return
        found = epath.Path(f"{scheme}://{bucket}").exists()
    except ImportError as error:
        install = install_command(extra) if extra else "install it"
        raise UserError(f"{place} needs the package {package}, which is missing: {install}") from error
    except Exception as error:
        raise UserError(_unreachable(place, error)) from error
    if not found:
        raise UserError(f"{place}: there is no bucket '{bucket}', or you may not see it: make it first")


_AGAIN = "and start the same command again"
_FULL = {
    errno.ENOSPC: f"make room {_AGAIN}",
    errno.EDQUOT: f"make room {_AGAIN}",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`)",
}
_REMEDIES = {
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.ENOENT: "it is not there, or cannot be made",
    errno.ENOTDIR: "choose a directory, not something inside a file",
    errno.EISDIR: "choose a file, not a directory",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its symbolic links lead in a circle; mend them",
    errno.EIO: f"the disk could not read or write; check it {_AGAIN}",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n` or use fewer processes",
}


def trouble(error: BaseException) -> str | None:
    """One line for an error of a disk, or of a store's library; None for any other."""
    if line := full_disk(error):
        return line
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        where = error.filename2 or error.filename
        return f"{f'{where}: ' if where else ''}{error.strerror}; {_REMEDIES[error.errno]}"
    link: BaseException | None = error
    while link is not None:
        if type(link).__module__.startswith(LIBRARIES):
            return f"{_unreachable('the object store', error)}; the same command goes on where this one stopped"
        link = link.__cause__
    return None


def full_disk(error: BaseException) -> str | None:
    """One line for an error of a full disk or quota, whichever library was writing; None for any other error.

    Libraries that are not written in Python raise exceptions of their own, with the system's words in them.
    """
    link: BaseException | None = error
    while link is not None:
        number = link.errno if isinstance(link, OSError) else None
        for full, remedy in _FULL.items():
            if number == full or os.strerror(full) in str(link):
                file = getattr(link, "filename2", None) or getattr(link, "filename", None)
                return f"{f'{file}: ' if file else ''}{os.strerror(full)}; {remedy}"
        link = link.__cause__ or link.__context__
    return None


def _unreachable(what: object, error: BaseException) -> str:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return f"{what} cannot be reached ({reason}): see that credentials, permissions, endpoint and network are right"


def read_object(place: StoredPath, advice: str, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object that a file of JSON holds.

    Args:
      place: the file.
      advice: what the user is to do about a bad one; the end of the message.
      missing_ok: whether a missing file counts as an empty object.

    Raises:
      UserError: the file is missing, cannot be read, or `parse_json` refuses its content.
    """
    try:
        content = place.read_bytes()
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise UserError(f"{place} is missing: {advice}") from error
    except OSError as error:
        raise UserError(f"{place} cannot be read ({(error.strerror or str(error)).lower()}): {advice}") from error
    return parse_json(content, place, advice)


def parse_json(content: bytes | str, origin: object, advice: str, kind: type = dict) -> Any:
    """A JSON object, or with `kind` list an array, that somebody else wrote; `origin` is what messages begin with.

    Raises:
      UserError: it is not JSON, not of this kind, or nested too deeply.
    """
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise UserError(f"{origin} is nested too deeply: {advice}") from error
    except ValueError as error:
        raise UserError(f"{origin} is not JSON ({error}): {advice}") from error
    if not isinstance(found, kind):
        name = "object" if kind is dict else "array"
        raise UserError(f"{origin} is not a JSON {name}, but {brief(found)}: {advice}")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [child for value in level for child in _children(value)]
    if level:
        raise UserError(f"{origin} is nested too deeply: {advice}")
    return found


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def make_directory(place: StoredPath) -> None:
    """On disk, a directory and its parents. A store needs none; asked for one, it might make a bucket."""
    if not is_remote(place):
        place.mkdir(parents=True, exist_ok=True)


def write_whole(place: StoredPath, content: bytes) -> None:
    """Write a file that appears whole or not at all, in place of one that may be there."""
    if is_remote(place):
        place.write_bytes(content)
        return
    # Of several writers in threads, processes and containers, each needs a name of its own.
    partial = place.parent / f"{place.name}.{uuid.uuid4().hex}.partial"
    try:
        partial.write_bytes(content)
        partial.replace(place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def copy_tree(source: StoredPath, target: StoredPath) -> None:
    """Copy all files below a directory, several at a time; one of the two is in an object store."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        copies = []
        for file in files_below(epath.Path(source)):
            copy = epath.Path(target) / file.relative_to(source).as_posix()
            make_directory(copy.parent)
            copies.append(pool.submit(file.copy, copy, overwrite=True))
        for copied in copies:
            copied.result()


def files_below(directory: epath.Path) -> Iterator[epath.Path]:
    """All files of a directory, and of those in it."""
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from files_below(entry)
        else:
            yield entry


class Staged:
    """A directory for libraries that write to disks only; what they wrote is then sent to where it belongs.

    Attributes:
      directory: to write in; the target itself, if that can be written to.
    """

    def __init__(self, target: StoredPath, known: tuple[str, ...] = ()):
        """Makes a temporary directory if it needs one.

        Args:
          target: where it belongs.
          known: schemes that the library knows besides.
        """
        self._target, self._temporary = target, None
        self.directory: epath.Path = epath.Path(target)
        if needs_copy(target, known):
            self._temporary = tempfile.TemporaryDirectory(prefix="bert_jax-")
            self.directory = epath.Path(self._temporary.name)

    def send(self) -> None:
        """Copy what is there now to where it belongs."""
        if self._temporary is not None:
            copy_tree(self.directory, self._target)

    def close(self) -> None:
        """Remove the temporary directory."""
        if self._temporary is not None:
            self._temporary.cleanup()


@contextlib.contextmanager
def fetched(source: StoredPath, known: tuple[str, ...] = ()) -> Iterator[epath.Path]:
    """A directory as libraries can read it that know disks only, and `known` schemes: itself, or a copy meanwhile."""
    if not needs_copy(source, known):
        yield epath.Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as local:
        copy_tree(source, Path(local))
        yield epath.Path(local)


def needs_copy(place: StoredPath, known: tuple[str, ...]) -> bool:
    """Whether a path leads to an object store, and not to one of the known schemes."""
    return is_remote(place) and os.fspath(place).partition("://")[0] not in known


def cache() -> Path:
    """Where copies of a store's files are kept on this host: $BERT_JAX_CACHE, or a folder of the user's."""
    return Path(os.environ.get("BERT_JAX_CACHE") or Path.home() / ".cache" / "bert_jax")


def on_this_host(place: StoredPath, sha256: str) -> str:
    """A local path of a file; one from a store is copied once, for all processes of this host and later ones.

    Args:
      place: the file.
      sha256: of its content, in hex: the copy's name, and what the copy is checked against.

    Raises:
      UserError: the content has another checksum.
      FileNotFoundError: there is no such object.
    """
    if not is_remote(place):
        return os.fspath(place)
    local = cache() / sha256
    if not local.exists():
        local.parent.mkdir(parents=True, exist_ok=True)
        with local.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not local.exists():
                _copy_checked(place, local, sha256)
    return os.fspath(local)


def _copy_checked(place: StoredPath, local: Path, sha256: str) -> None:
    digest, partial = hashlib.sha256(), local.with_suffix(".partial")
    with place.open("rb") as source, partial.open("wb") as target:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
            target.write(block)
    if digest.hexdigest() != sha256:
        partial.unlink()
        raise UserError(f"{place}: damaged, its SHA-256 is not the recorded one; copy the corpus again or rebuild it")
    partial.replace(local)


class Uploads:
    """Sends something that grows, again and again, in a thread of its own: nobody waits for the network.

    What goes wrong there is raised by the next call of any method.
    """

    def __init__(self, send: Callable[[], None]):
        """Starts nothing yet; `send` writes all that there is by then."""
        self._send, self._last, self._unsent = send, time.monotonic(), False
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._sending: concurrent.futures.Future | None = None

    def grown(self) -> None:
        """There is more than before: begin to send, if that was not done for a while."""
        self._unsent = True
        if self._sending is not None and not self._sending.done():
            return
        self._wait()
        if time.monotonic() - self._last >= EVERY_SECONDS:
            self._begin()

    def flush(self) -> None:
        """Send what has grown since the last time, and wait until all is in the store."""
        self._wait()
        if self._unsent:
            self._begin()
            self._wait()

    def close(self) -> None:
        """The same for the last time."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _begin(self) -> None:
        self._last, self._unsent = time.monotonic(), False
        self._sending = self._thread.submit(self._send)

    def _wait(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            self._unsent = self._unsent or sending.exception() is not None
            sending.result()
