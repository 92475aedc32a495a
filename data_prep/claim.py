"""Who may work where: the scratch directory of a build, and what of an earlier run in it can be used."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator

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


def go_on(marks: epath.Path, directory: epath.Path, units: dict, decisions: dict) -> None:
    """Keeps what an earlier run left as far as it fits this one, and notes what this one is.

    Args:
      marks: the scratch directory.
      directory: of the corpus.
      units: what prepared units depend on, beside the input itself.
      decisions: what else the corpus depends on.

    Raises:
      UserError: the units are those of another build.
    """
    wanted = json.loads(json.dumps({"units": units, "decisions": decisions}))
    begun = marks / _BEGUN
    for leftover in (*marks.glob("*.partial"), *marks.glob("columns-*"), *marks.glob("writing-*")):
        leftover.rmtree() if leftover.is_dir() else leftover.unlink()
    if begun.exists():
        found = scratch.read_json(begun)
        if found["units"] != wanted["units"]:
            different = ", ".join(key for key in wanted["units"] if found["units"].get(key) != wanted["units"][key])
            places = directory if marks.parent == directory else f"{directory} and {marks}"
            raise UserError(
                f"{marks}: left by an unfinished build with other arguments ({different}); repeat that one to finish"
                f" it, or remove {places} to start this one"
            )
        if found == wanted:
            return
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
