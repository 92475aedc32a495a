"""Locks and resumes builds: the scratch directory of a build, and the work of an earlier run in it."""

import contextlib
import fnmatch
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

from etils import epath

from bert_jax.data.manifest import INCOMPLETE, MANIFEST
from bert_jax.errors import UserError
from bert_jax.storage.files import make_directory_if_local
from bert_jax.storage.listing import matching_entries
from bert_jax.storage.lock import LOCK_FILE, DirectoryLock
from bert_jax.storage.paths import check_reachable, is_remote
from data_prep.builder import scratch, writer

_ARGUMENTS = "build.json"
_LEFTOVERS = ("*.partial", "columns-*", "rows-*", "found-*", "writing-*")
"""Files and directories of a killed build that are made again"""


def scratch_place(directory: epath.Path, name: str, parent: os.PathLike | str | None) -> epath.Path:
    """The directory for unfinished work of a build to `directory`: inside it, or a folder of its own below `parent`.

    Raises:
      UserError: the store of one of them cannot be reached.
    """
    check_reachable(directory)
    if parent is None:
        return directory / INCOMPLETE
    check_reachable(epath.Path(parent))
    return epath.Path(parent) / f"{name}.incomplete"


def finish_removal(scratch_dir: epath.Path, directory: epath.Path, arguments: dict) -> bool:
    """Removes what is left of a build with these arguments that wrote its corpus and was killed while it cleaned up.

    Returns:
      whether there was such a build.
    """
    recorded = scratch_dir / _ARGUMENTS
    is_corpus = (directory / MANIFEST).exists()
    was_finished = is_corpus and recorded.exists() and scratch.read_json(recorded) == _as_json(arguments)
    if was_finished:
        remove_scratch(scratch_dir, directory)
    return was_finished


def make_scratch_directory(scratch_dir: epath.Path, directory: epath.Path) -> None:
    """Makes the scratch directory of a build, and `directory`.

    Raises:
      UserError: the directory contains other files.
    """
    if directory.exists():
        if not directory.is_dir():
            raise UserError(f"{directory}: is a file; choose another --out")
        writer.check_not_finished(directory)
        if not (directory / INCOMPLETE).exists() and any(directory.iterdir()):
            raise UserError(f"{directory}: is not empty and holds no corpus; choose another --out")
    for place in dict.fromkeys((directory / INCOMPLETE, scratch_dir)):
        make_directory_if_local(place)


@contextlib.contextmanager
def exclusive_build(directory: epath.Path, scratch_dir: epath.Path, existed: bool) -> Iterator[Callable[[], None]]:
    """Locks out a second build to the same directory or with the same scratch directory, on any host.

    If it is refused, the directory is left as it was; `existed` tells whether it was there.

    Yields:
      a function that raises UserError if another build has taken over a lock, because this process was suspended.

    Raises:
      UserError: another build is running, a directory cannot be written, or the directory has become a corpus.
    """
    locks = [DirectoryLock(place) for place in dict.fromkeys((directory / INCOMPLETE, scratch_dir))]
    with contextlib.ExitStack() as held:
        try:
            for lock in locks:
                held.enter_context(lock).acquire()
            writer.check_not_finished(directory)
        except UserError:
            held.close()
            for place in (scratch_dir, directory / INCOMPLETE, *(() if existed else (directory,))):
                if place.exists() and not any(place.iterdir()):
                    place.rmdir()
            raise
        yield lambda: [lock.check() for lock in locks] and None


@contextlib.contextmanager
def cleanup_on_early_failure(scratch_dir: epath.Path, directory: epath.Path, existed: bool) -> Iterator[None]:
    """If a build fails before any block is prepared, removes its scratch directory and the directory it created."""
    try:
        yield
    except BaseException:
        if not scratch.prepared_blocks(scratch_dir):
            remove_scratch(scratch_dir, directory)
            if not existed and not any(directory.iterdir()):
                directory.rmdir()
        raise


def resume_or_start(scratch_dir: epath.Path, directory: epath.Path, arguments: dict, keys: Sequence[str]) -> None:
    """Keeps the work of an earlier run that this build can use, and records the arguments of this build.

    Args:
      scratch_dir: the scratch directory.
      directory: of the corpus.
      arguments: everything that the corpus depends on, except the content of its sources; JSON values.
      keys: of the prepared blocks of this build.

    Raises:
      UserError: the scratch directory contains files that are not from a build.
    """
    current = _as_json(arguments)
    recorded = scratch_dir / _ARGUMENTS
    for leftover in _leftovers(scratch_dir):
        leftover.rmtree() if leftover.is_dir() else leftover.unlink()
    if recorded.exists():
        if scratch.read_json(recorded) == current:
            return
        if any(scratch.source_key(name) not in keys for name in scratch.prepared_blocks(scratch_dir)):
            print(
                f"note: {scratch_dir} also keeps the work of an unfinished build with other arguments, until this build"
                " is finished",
                file=sys.stderr,
            )
    elif scratch_dir.exists() and any(path.name != LOCK_FILE for path in scratch_dir.iterdir()):
        raise UserError(f"{scratch_dir}: is not empty and not from an unfinished build; choose another directory")
    _remove_decisions(scratch_dir, directory)
    scratch.write_json(recorded, current)


def _as_json(arguments: dict) -> dict:
    """The arguments as they are read from a file."""
    return json.loads(json.dumps(arguments))


def _leftovers(scratch_dir: epath.Path) -> list[epath.Path]:
    if not scratch_dir.exists():
        return []
    left = [path for path in scratch_dir.iterdir() if any(fnmatch.fnmatch(path.name, one) for one in _LEFTOVERS)]
    if not is_remote(scratch_dir):  # a store has no unfinished objects
        left += map(epath.Path, pathlib.Path(scratch_dir).glob(f"{scratch.UNITS}/*/*.partial"))
    return left


def _remove_decisions(scratch_dir: epath.Path, directory: epath.Path) -> None:
    """Removes plans and shards; keeps prepared blocks."""
    (scratch_dir / scratch.PLANS).unlink(missing_ok=True)  # first: the others are ignored without it
    made = [(scratch_dir, "plan-*"), (scratch_dir, "shard-*"), (directory, "*.array_record-*")]
    for path in itertools.chain.from_iterable(itertools.starmap(matching_entries, made)):
        path.unlink()


def remove_scratch(scratch_dir: epath.Path, directory: epath.Path) -> None:
    """Removes the scratch directory of a finished build, the record of its arguments last, for `finish_removal`."""
    if scratch_dir != directory / INCOMPLETE:
        (directory / INCOMPLETE).rmtree(missing_ok=True)  # object stores have no empty directories
    for path in scratch_dir.iterdir() if scratch_dir.exists() else ():
        if path.name != _ARGUMENTS:
            path.rmtree() if path.is_dir() else path.unlink(missing_ok=True)
    scratch_dir.rmtree(missing_ok=True)
