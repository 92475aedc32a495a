"""Locks and resumes builds: the scratch directory of a build, and the work of an earlier run in it."""

import contextlib
import fcntl
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax.data.corpus import INCOMPLETE
from bert_jax.errors import UserError
from bert_jax.storage import check_reachable, is_remote, make_directory_if_local
from data_prep.build import scratch, writer

_ARGUMENTS = "build.json"
_LOCK = "build.lock"
_LEFTOVERS = ("*.partial", "columns-*", "rows-*", "found-*", "writing-*")
"""Files and directories of a killed build that are made again"""


def make_scratch_directory(directory: epath.Path, name: str, parent: os.PathLike | str | None) -> epath.Path:
    """The directory for unfinished work of a build to `directory`: inside it, or a folder of its own below `parent`.

    Raises:
      UserError: the directory contains other files, or its store cannot be reached.
    """
    check_reachable(directory)
    if directory.exists():
        if not directory.is_dir():
            raise UserError(f"{directory}: is a file; choose another --out")
        writer.check_not_finished(directory)
        if not (directory / INCOMPLETE).exists() and any(directory.iterdir()):
            raise UserError(f"{directory}: is not empty and holds no corpus; choose another --out")
    scratch_dir = directory / INCOMPLETE
    make_directory_if_local(scratch_dir)
    if parent is not None:
        scratch_dir = epath.Path(parent) / f"{name}.incomplete"
        make_directory_if_local(scratch_dir)
    return scratch_dir


@contextlib.contextmanager
def exclusive_build(directory: epath.Path, scratch_dir: epath.Path) -> Iterator[None]:
    """Locks out a second build on this machine to the same directory or with the same scratch directory.

    Raises:
      UserError: another build is running, or the directory has become a corpus.
    """
    with contextlib.ExitStack() as locks:
        for place in dict.fromkeys((directory / INCOMPLETE, scratch_dir)):
            if not is_remote(place):
                _lock(place, locks)
        writer.check_not_finished(directory)
        yield


def _lock(place: epath.Path, locks: contextlib.ExitStack) -> None:
    """Acquires the lock of a directory until `locks` is closed."""
    path = place / _LOCK
    try:
        file = locks.enter_context(path.open("w"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.path.samestat(os.fstat(file.fileno()), pathlib.Path(path).stat())
    except (BlockingIOError, FileNotFoundError):  # locked, or removed by a build that has just ended
        is_current = False
    if not is_current:
        raise UserError(f"{place}: another build is running here; wait for it, or stop it")


@contextlib.contextmanager
def cleanup_on_early_failure(scratch_dir: epath.Path, directory: epath.Path, existed: bool) -> Iterator[None]:
    """If a build fails before any block is prepared, removes its scratch directory and the directory it created."""
    try:
        yield
    except BaseException:
        if next(scratch_dir.glob("unit-*"), None) is None:
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
    current = json.loads(json.dumps(arguments))
    recorded = scratch_dir / _ARGUMENTS
    for pattern in _LEFTOVERS:
        for leftover in scratch_dir.glob(pattern):
            leftover.rmtree() if leftover.is_dir() else leftover.unlink()
    if recorded.exists():
        if scratch.read_json(recorded) == current:
            return
        if any(path.name.split("-")[1] not in keys for path in scratch_dir.glob("unit-*")):
            print(
                f"note: {scratch_dir} also keeps the work of an unfinished build with other arguments, until this build"
                " is finished",
                file=sys.stderr,
            )
    elif scratch_dir.exists() and any(path.name != _LOCK for path in scratch_dir.iterdir()):
        raise UserError(f"{scratch_dir}: is not empty and not from an unfinished build; choose another directory")
    _remove_decisions(scratch_dir, directory)
    scratch.write_json(recorded, current)


def _remove_decisions(scratch_dir: epath.Path, directory: epath.Path) -> None:
    """Removes plans and shards; keeps prepared blocks."""
    (scratch_dir / scratch.PLANS).unlink(missing_ok=True)  # first: the others are ignored without it
    for path in (*scratch_dir.glob("plan-*"), *scratch_dir.glob("shard-*"), *directory.glob("*.array_record-*")):
        path.unlink()


def remove_scratch(scratch_dir: epath.Path, directory: epath.Path) -> None:
    """Removes the scratch directory of a finished build."""
    scratch_dir.rmtree(missing_ok=True)
    if scratch_dir != directory / INCOMPLETE:
        (directory / INCOMPLETE).rmtree(missing_ok=True)  # object stores have no empty directories
