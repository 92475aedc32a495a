"""Who may work where: the scratch directory of a build, and what of an earlier run in it can be used."""

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax.data.corpus import INCOMPLETE
from bert_jax.errors import UserError
from bert_jax.storage import is_remote, make_directory
from data_prep import scratch, writer

_BEGUN = "build.json"
_LOCK = "build.lock"


def scratch_directory(directory: epath.Path, name: str, parent: os.PathLike | str | None) -> epath.Path:
    """Where a build to `directory` keeps what is not finished: in it, or in a folder of its own below `parent`.

    Raises:
      UserError: the directory holds something that no build has left.
    """
    marks = writer.claim_directory(directory)
    if parent is not None:
        marks = epath.Path(parent) / f"{name}.incomplete"
        make_directory(marks)
    return marks


@contextlib.contextmanager
def only_one(marks: epath.Path) -> Iterator[None]:
    """Keeps a second build on this machine away from the same directory.

    Raises:
      UserError: another one is at work.
    """
    if is_remote(marks):
        yield
        return
    with (marks / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{marks}: another build is at work here; wait for it, or stop it") from error
        yield


@contextlib.contextmanager
def nothing_left(marks: epath.Path, directory: epath.Path, existed: bool) -> Iterator[None]:
    """Removes the scratch directory of a build that fails before it has prepared anything, and a directory it made."""
    try:
        yield
    except BaseException:
        if next(marks.glob("unit-*"), None) is None:
            clear(marks, directory)
            if not existed and not any(directory.iterdir()):
                directory.rmdir()
        raise


def go_on(marks: epath.Path, directory: epath.Path, arguments: dict, keys: Sequence[str]) -> None:
    """Keeps what an earlier run left as far as it fits this one, and notes what this one is.

    Args:
      marks: the scratch directory.
      directory: of the corpus.
      arguments: all that the corpus depends on, beside the content of its sources; JSON values.
      keys: of the units of this build.

    Raises:
      UserError: the scratch directory holds something that no build has left.
    """
    wanted = json.loads(json.dumps(arguments))
    begun = marks / _BEGUN
    for leftover in (*marks.glob("*.partial"), *marks.glob("columns-*"), *marks.glob("writing-*")):
        leftover.rmtree() if leftover.is_dir() else leftover.unlink()
    if begun.exists():
        if scratch.read_json(begun) == wanted:
            return
        if any(path.name.split("-")[1] not in keys for path in marks.glob("unit-*")):
            print(
                f"note: {marks} also keeps what an unfinished build with other arguments has prepared, until this one"
                " is finished",
                file=sys.stderr,
            )
    elif marks.exists() and any(path.name != _LOCK for path in marks.iterdir()):
        raise UserError(f"{marks}: is not empty and was not left by a build; choose another directory")
    forget_decisions(marks, directory)
    scratch.write_json(begun, wanted)


def forget_decisions(marks: epath.Path, directory: epath.Path) -> None:
    """Removes plans and shards; units stay."""
    (marks / scratch.PLANS).unlink(missing_ok=True)  # first: without it the rest does not count
    for path in (*marks.glob("plan-*"), *marks.glob("shard-*"), *directory.glob("*.array_record-*")):
        path.unlink()


def clear(marks: epath.Path, directory: epath.Path) -> None:
    """Removes what a finished build needs no more."""
    marks.rmtree()
    if marks != directory / INCOMPLETE:
        (directory / INCOMPLETE).rmtree(missing_ok=True)  # a store has no empty directories
