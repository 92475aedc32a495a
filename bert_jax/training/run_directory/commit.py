"""The commit of a checkpoint: a file with the SHA-256 of all other files, written last, and what has changed since.

In a run of several processes each one computes the checksums of the files that it has written, and verifies those of
its index.
"""

import hashlib
import json
import re
from collections.abc import Callable
from typing import TypedDict

import jax
from etils import epath

from bert_jax.distributed.agreement import all_gather, gather_to_first, is_first
from bert_jax.distributed.shared_directory import becomes_visible
from bert_jax.errors import UserError
from bert_jax.storage.files import walk_files, write_atomic
from bert_jax.storage.json_files import read_json_as

COMMIT_MARKER = "COMMIT.json"
WRITTEN_BY = re.compile(r"state/(?:ocdbt\.|array_metadatas/)process_([0-9]+)(?:/.*)?")
"""Names of the files that the process with this index writes; process 0 also writes all others."""


class _Commit(TypedDict):
    sha256: dict[str, str]


def gather_checksums(checkpoint: epath.Path) -> dict[str, str]:
    """Checksums of all files in process 0, from the processes that have written them; all processes call this."""
    becomes_visible(checkpoint / "state")  # process 0 has renamed it
    gathered = gather_to_first("the checksums of a checkpoint", checksums_of_this_process(checkpoint))
    sums = {name: sha256 for one in gathered for name, sha256 in one.items()}
    if is_first():  # on a network file system, a process may not see its files under their new names yet
        sums |= {name: _sha256(checkpoint / name) for name in _file_names(checkpoint).difference(sums)}
    return dict(sorted(sums.items()))


def write_commit(checkpoint: epath.Path, sums: dict[str, str]) -> None:
    """Mark a checkpoint as complete. The file is written atomically.

    Args:
      checkpoint: with all of its other files.
      sums: their checksums by name.
    """
    text = json.dumps({"sha256": sums}, indent=1)
    write_atomic(checkpoint / COMMIT_MARKER, text.encode())


def is_intact(checkpoint: epath.Path, name: str) -> bool:
    """Whether one file of a complete checkpoint is as it was committed.

    Raises:
      UserError, OSError: the commit or the file cannot be read.
    """
    return read_json_as(checkpoint / COMMIT_MARKER, _Commit, "")["sha256"][name] == _sha256(checkpoint / name)


def find_damage(checkpoint: epath.Path) -> str | None:
    """The first file that is missing, added or changed since the commit, and how; None if there is none.

    All processes of a run call this, and get the same answer: each verifies the files of its index.
    """
    found = all_gather("the files of a checkpoint", _find_own_damage(checkpoint))
    return next((f"{name} {how}" for name, how in sorted(filter(None, found))), None)


def _find_own_damage(checkpoint: epath.Path) -> tuple[str, str] | None:
    """The first damaged one of the files that this process verifies: its name, and how it is damaged."""
    try:
        commit = read_json_as(checkpoint / COMMIT_MARKER, _Commit, "")["sha256"]
    except UserError:
        return COMMIT_MARKER, "is incomplete"
    expected = {name: sha256 for name, sha256 in commit.items() if _is_own(name)}
    actual = checksums_of_this_process(checkpoint)
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            return name, "is missing"
        if name not in expected:
            return name, "was added later"
        if expected[name] != actual[name]:
            return name, "has changed"
    return None


def _is_own(name: str) -> bool:
    """Whether this process computes the checksum of a file. The one that wrote it does, or if the number of processes
    has changed, the one whose index is the same modulo that number.
    """
    match = WRITTEN_BY.fullmatch(name)
    return (int(match[1]) % jax.process_count() if match else 0) == jax.process_index()


def checksums_of_this_process(checkpoint: epath.Path) -> dict[str, str]:
    """Checksums of the files that this process has written; directories of other processes are not listed."""
    names = _file_names(checkpoint, lambda name: bool(WRITTEN_BY.fullmatch(name)) and not _is_own(name))
    return {name: _sha256(checkpoint / name) for name in sorted(names) if _is_own(name)}


def _file_names(checkpoint: epath.Path, skip: Callable[[str], bool] = lambda name: False) -> set[str]:
    files = walk_files(checkpoint, lambda path: skip(path.relative_to(checkpoint).as_posix()))
    return {path.relative_to(checkpoint).as_posix() for path in files} - {COMMIT_MARKER}


def _sha256(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
