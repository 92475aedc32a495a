"""Files on disk and in object stores (gs://, s3://), and what differs between the two.

An object is written atomically. It can be neither renamed nor appended to, and there are no directories, only names
with slashes. docs/object_stores.md is the user's documentation.
"""

import contextlib
import os
from pathlib import Path

import fsspec
from etils import epath

from bert_jax.errors import OutageError, UserError, causes, install_command, short_repr
from bert_jax.storage.failures import describe_unreachable

StoredPath = Path | epath.Path
"""A path on disk, or in an object store; the latter is always an epath.Path."""

PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""Scheme -> the package for that store, and the extra of bert_jax that installs it."""
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
    file_system_and_name(path)
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


def file_system_and_name(path: str | os.PathLike) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec file system of a path in a store, and its name there; UserError if its package is missing."""
    scheme = os.fspath(path).partition("://")[0]
    try:
        return fsspec.core.url_to_fs(os.fspath(path))
    except ImportError as error:
        package, extra = PACKAGES.get(scheme, (f"of fsspec for {scheme}://", ""))
        install = install_command(extra) if extra else "install it"
        raise UserError(f"{path} needs the package {package}, which is missing: {install}") from error
