"""Who may work where: the scratch directory of a build, and what of an earlier run in it can be used."""

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
from bert_jax.storage import is_remote, make_directory
from data_prep.build import scratch, writer

_BEGUN = "build.json"
_LOCK = "build.lock"


def scratch_directory(directory: epath.Path, name: str, parent: os.PathLike | str | None) -> epath.Path:
    """Where a build to `directory` keeps what is not finished: in it, or in a folder of its own below `parent`.

    Raises:
      UserError: the directory holds something that no build has left.
    """
    scratch_dir = writer.acquire_directory(directory)
    if parent is not None:
        scratch_dir = epath.Path(parent) / f"{name}.incomplete"
        make_directory(scratch_dir)
    return scratch_dir


@contextlib.contextmanager
def exclusive_build(directory: epath.Path, scratch_dir: epath.Path) -> Iterator[None]:
    """Refuses a second build on this machine to the same directory, or with the same scratch directory.

    Raises:
      UserError: another one is at work, or the directory has become a corpus.
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
        raise UserError(f"{place}: another build is at work here; wait for it, or stop it")


@contextlib.contextmanager
def remove_if_nothing_prepared(scratch_dir: epath.Path, directory: epath.Path, existed: bool) -> Iterator[None]:
    """Removes the scratch directory of a build that fails before it has prepared anything, and a directory it made."""
    try:
        yield
    except BaseException:
        if next(scratch_dir.glob("unit-*"), None) is None:
            remove_scratch(scratch_dir, directory)
            if not existed and not any(directory.iterdir()):
                directory.rmdir()
        raise


def resume_or_start(scratch_dir: epath.Path, directory: epath.Path, arguments: dict, keys: Sequence[str]) -> None:
    """Keeps what an earlier run left as far as it fits this one, and notes what this one is.

    Args:
      scratch_dir: the scratch directory.
      directory: of the corpus.
      arguments: all that the corpus depends on, beside the content of its sources; JSON values.
      keys: of the units of this build.

    Raises:
      UserError: the scratch directory holds something that no build has left.
    """
    wanted = json.loads(json.dumps(arguments))
    begun = scratch_dir / _BEGUN
    for leftover in (*scratch_dir.glob("*.partial"), *scratch_dir.glob("columns-*"), *scratch_dir.glob("writing-*")):
        leftover.rmtree() if leftover.is_dir() else leftover.unlink()
    if begun.exists():
        if scratch.read_json(begun) == wanted:
            return
        if any(path.name.split("-")[1] not in keys for path in scratch_dir.glob("unit-*")):
            print(
                f"note: {scratch_dir} also keeps what an unfinished build with other arguments has prepared, until this one"
                " is finished",
                file=sys.stderr,
            )
    elif scratch_dir.exists() and any(path.name != _LOCK for path in scratch_dir.iterdir()):
        raise UserError(f"{scratch_dir}: is not empty and was not left by a build; choose another directory")
    remove_decisions(scratch_dir, directory)
    scratch.write_json(begun, wanted)


def remove_decisions(scratch_dir: epath.Path, directory: epath.Path) -> None:
    """Removes plans and shards; units stay."""
    (scratch_dir / scratch.PLANS).unlink(missing_ok=True)  # first: without it the rest does not count
    for path in (*scratch_dir.glob("plan-*"), *scratch_dir.glob("shard-*"), *directory.glob("*.array_record-*")):
        path.unlink()


def remove_scratch(scratch_dir: epath.Path, directory: epath.Path) -> None:
    """Removes what a finished build needs no more."""
    scratch_dir.rmtree(missing_ok=True)
    if scratch_dir != directory / INCOMPLETE:
        (directory / INCOMPLETE).rmtree(missing_ok=True)  # a store has no empty directories
