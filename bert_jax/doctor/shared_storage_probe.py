"""Probe of the files of a run: each process reports what it sees, and process 0 compares the reports."""

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from etils import epath

from bert_jax.data.corpus import identity_of, read_manifest
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, check_reachable, is_remote
from bert_jax.storage import describe_error as describe_storage_error
from bert_jax.training.run_directory.workdir import PROBE_PREFIX


class StorageProbe(NamedTuple):
    """A file that was written and read back in the work directory, or in its nearest existing parent."""

    file: str
    """Path of the file; empty if it could not be written."""
    error: str
    """Reason of the failure; empty on success."""


def corpus_identities(paths: Sequence[str]) -> dict[str, str]:
    """`Corpus.identity` of each corpus by path, or the reason why the corpus cannot be read."""
    return {path: _identity(epath.Path(path)) for path in paths}


def _identity(directory: epath.Path) -> str:
    try:
        return identity_of(directory, read_manifest(directory))
    except (UserError, OSError) as error:
        return str(error)


def nearest_existing(directory: StoredPath) -> StoredPath:
    """The directory or its nearest existing parent; a path in a bucket is returned as it is."""
    if is_remote(directory):
        return directory
    directory = Path(directory).absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


@contextlib.contextmanager
def probe_file(workdir: StoredPath | None) -> Iterator[StorageProbe]:
    """Create a small file in the work directory or its nearest existing parent, and remove it on exit.

    No directory is created.
    """
    if workdir is None:
        yield StorageProbe("", "")
        return
    directory = nearest_existing(workdir)
    file = directory / f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    write_error = _write_and_read(directory, file)
    try:
        yield StorageProbe("" if write_error else str(file), write_error)
    finally:
        if not write_error:
            file.unlink()


def _write_and_read(directory: StoredPath, file: StoredPath) -> str:
    """Write a file and read it back; the reason of a failure, or an empty string."""
    try:
        check_reachable(directory)
        file.write_text(file.name)
        same = file.read_text() == file.name
    except UserError as error:
        return str(error)
    except Exception as error:
        if not isinstance(error, OSError) and describe_storage_error(error) is None:
            raise
        return f"cannot write to {directory}: {getattr(error, 'strerror', None) or error}"
    return "" if same else f"{directory} does not return the content that was written"
