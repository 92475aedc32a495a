"""What a process sees of the files of a run: each says so to process 0, which compares."""

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


class Mark(NamedTuple):
    """A file that was written, and read back, where the work directory is or will be."""

    file: str
    """Its path; empty if it could not be written."""
    trouble: str
    """Why not; empty if it could."""


def corpora(paths: Sequence[str]) -> dict[str, str]:
    """`Corpus.identity` of each corpus by path; of one that cannot be read, why."""
    return {path: _identity(epath.Path(path)) for path in paths}


def _identity(directory: epath.Path) -> str:
    try:
        return identity_of(directory, read_manifest(directory))
    except (UserError, OSError) as error:
        return str(error)


def nearest(place: StoredPath) -> StoredPath:
    """A directory, or the nearest one above it that exists; in a bucket there are none to be made."""
    if is_remote(place):
        return place
    place = Path(place).absolute()
    while not place.exists():
        place = place.parent
    return place


@contextlib.contextmanager
def marked(workdir: StoredPath | None) -> Iterator[Mark]:
    """Leave a small file where a work directory is or will be, and take it away again; no directory is made."""
    if workdir is None:
        yield Mark("", "")
        return
    place = nearest(workdir)
    file = place / f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    trouble = _write(place, file)
    try:
        yield Mark("" if trouble else str(file), trouble)
    finally:
        if not trouble:
            file.unlink()


def _write(place: StoredPath, file: StoredPath) -> str:
    """Write a file and read it back; why that cannot be done, or nothing."""
    try:
        check_reachable(place)
        file.write_text(file.name)
        same = file.read_text() == file.name
    except UserError as error:
        return str(error)
    except Exception as error:
        if not isinstance(error, OSError) and describe_storage_error(error) is None:
            raise
        return f"cannot write to {place}: {getattr(error, 'strerror', None) or error}"
    return "" if same else f"{place} does not give back what was written"
