"""Checkpoints that can be trusted: Orbax writes the arrays, a commit file with checksums comes last.

``checkpoints/00001000/`` holds ``state/`` (Orbax), ``run.json`` (the place in the stream, the ledger so far, and what
the run is) and ``COMMIT.json``: the SHA-256 of every other file, written when all of them are complete. A directory
without it does not count, wherever the process died. Orbax alone restores flipped bits without a word, so the sums are
checked on every restore.

Nothing is renamed, so that a run may lie in an object store. Orbax itself writes to disks and to gs:// alone, its array
store refuses every other path: elsewhere, and on s3:// too, it writes to a temporary directory of this host, from which
the files are copied in the background before the commit.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.distributed.agreement import broadcast_from_first, is_first
from bert_jax.errors import UserError
from bert_jax.storage import (
    StagedDirectory,
    StoredPath,
    check_reachable,
    describe_full_disk,
    download_if_needed,
    is_remote,
    make_directory,
    needs_staging,
    walk_files,
    write_atomic,
)

COMMIT = "COMMIT.json"
ORBAX_KNOWS = ("gs",)
"""Object stores that Orbax writes to and reads from by itself."""
FORMAT_VERSION = 4


class Checkpoints:
    """The checkpoints of one run, saved while training goes on."""

    def __init__(self, directory: epath.PathLike, keep: int):
        self.directory = epath.Path(directory)
        self.keep = keep
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._committer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._commit: concurrent.futures.Future | None = None

    def save(self, step: int, state: Any, about: dict[str, Any], good: int | None = None) -> None:
        """Start saving; returns once the arrays have left the device, so that their buffers may be donated.

        Waits for the save before it, and raises what went wrong there. All processes of a run call it; each writes
        what its devices hold, and the first one commits when all have.

        Args:
          step: updates done; names the directory.
          state: tree of arrays.
          about: JSON values to keep beside them.
          good: checkpoints of so many updates or fewer are good. The newest of them is kept, however many newer ones
            there are, and so is the oldest of the others, which will be good next. None: no difference is made.

        Raises:
          UserError: the disk is full; what was committed before is intact.
        """
        self.wait()
        target = self.directory / f"{step:08d}"
        with self._refusing_full_disks(target), contextlib.ExitStack() as in_vain:
            broadcast_from_first("a save", lambda: _clear(target))
            staged = in_vain.enter_context(contextlib.closing(StagedDirectory(target, ORBAX_KNOWS)))
            if is_first():
                text = json.dumps({"format_version": FORMAT_VERSION, **about}, indent=1)
                (staged.directory / "run.json").write_text(text)
            self._orbax.save(staged.directory / "state", args=ocp.args.StandardSave(state))
            in_vain.pop_all()  # the other thread closes it
        self._commit = self._committer.submit(self._finish, target, staged, good)

    @contextlib.contextmanager
    def _refusing_full_disks(self, target: epath.Path) -> Iterator[None]:
        """Say in one line that the disk is full, and leave nothing of the save behind."""
        try:
            yield
        except Exception as error:
            line = describe_full_disk(error)
            if line is None:
                raise
            if is_first():
                target.rmtree(missing_ok=True)
            raise UserError(f"cannot save {target}: {line}. Earlier checkpoints of the run are intact") from error

    def _finish(self, target: epath.Path, staged: StagedDirectory, good: int | None) -> None:
        with self._refusing_full_disks(target), contextlib.closing(staged):
            self._orbax.wait_until_finished()  # by all processes
            if not is_first():
                return
            staged.upload()
            write_commit(target, staged.directory)
        newest_first = list(committed(self.directory))
        needed: list[epath.Path] = []
        if good is not None:
            young = [save for save in newest_first if int(save.name) > good]
            needed = young[-1:] + newest_first[len(young) :][:1]
        self._delete([save for save in newest_first[self.keep :] if save not in needed])

    def _delete(self, saves: Iterable[epath.Path]) -> None:
        for save in saves:
            (save / COMMIT).unlink()  # first, so that a half-deleted checkpoint does not count
        for save in _saves(self.directory):  # those, and what kills left behind
            if not (save / COMMIT).exists():
                save.rmtree()

    def delete(self, steps: Iterable[int]) -> None:
        """Delete the checkpoints of these updates."""
        self.wait()
        chosen = set(steps)
        self._delete([save for save in committed(self.directory) if int(save.name) in chosen])

    def steps(self) -> list[int]:
        """Updates done, of every complete checkpoint, newest first."""
        self.wait()
        return [int(save.name) for save in committed(self.directory)]

    def about(self, step: int) -> dict[str, Any] | None:
        """What was said about a checkpoint; None if any of its files is damaged."""
        save = self.directory / f"{step:08d}"
        return None if find_damage(save) else read_about(save)

    def wait(self) -> None:
        """Until the last save is committed; raises what went wrong in it."""
        commit, self._commit = self._commit, None  # asked once: what went wrong is raised once
        if commit is not None:
            commit.result()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for the last save, and let go of the writer threads."""
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            self._orbax.close()

    def restore(self, abstract: Callable[[dict[str, Any]], Any]) -> tuple[Any, dict[str, Any]] | None:
        """The newest checkpoint whose files are all intact, with what was said about it; None if there is none.

        A damaged one is named on stderr and passed over for the one before.

        Args:
          abstract: from what was said about it, a tree of ShapeDtypeStruct with shardings: how to restore, not how
            it was saved.

        Raises:
          UserError: there are checkpoints, but all are damaged.
        """
        found = newest(self.directory)
        if found is None:
            return None
        about = read_about(found)
        with download_if_needed(found / "state", ORBAX_KNOWS) as state:
            return self._orbax.restore(state, args=ocp.args.StandardRestore(abstract(about))), about


def _clear(target: epath.Path) -> None:
    if target.exists():
        target.rmtree()  # a save that was cut short, or one that failed its checksums
    make_directory(target)


def restore_parts(checkpoint: epath.Path, shapes: dict[str, Any]) -> dict[str, Any]:
    """Parts of a checkpoint as numpy arrays, such as the parameters alone; the others are not read.

    Args:
      checkpoint: a verified one.
      shapes: trees of ShapeDtypeStruct, by the fields of the state.

    Raises:
      UserError: an array of the checkpoint has another shape: the run's config.json was changed.
    """
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    restore_args = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    with (
        download_if_needed(checkpoint / "state", ORBAX_KNOWS) as state,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax,
    ):
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
        restored = orbax.restore(state, args=arguments)
    for (path, leaf), expected in zip(jax.tree.leaves_with_path(restored), jax.tree.leaves(wanted), strict=True):
        if leaf.shape != expected.shape:
            raise UserError(
                f"{checkpoint}: {jax.tree_util.keystr(path, simple=True, separator='/')} has shape {leaf.shape}, the "
                f"run's config.json says {expected.shape}: restore the config.json that the run was started with"
            )
    return restored


def check_place(workdir: StoredPath) -> None:
    """See, before anything is done, that a run can be saved there.

    Raises:
      UserError: the store does not answer, or takes no checkpoint from several processes.
    """
    check_reachable(workdir)
    if jax.process_count() > 1 and needs_staging(workdir, ORBAX_KNOWS):
        raise UserError(
            f"{workdir}: several processes write one checkpoint together, which needs a directory that all of them "
            "see: use gs://, or a shared file system"
        )


def directory_of(workdir: epath.PathLike) -> epath.Path:
    """Where a run keeps its checkpoints: an absolute path, which Orbax insists on."""
    directory = epath.Path(workdir) / "checkpoints"
    return directory if is_remote(directory) else directory.absolute()


def read_about(checkpoint: epath.Path) -> dict[str, Any]:
    """What was said about a checkpoint when it was saved.

    Raises:
      UserError: it was written by another version of bert_jax, in another format.
    """
    about = json.loads((checkpoint / "run.json").read_text())
    version = about["format_version"]
    if version != FORMAT_VERSION:
        remedy = "update bert_jax" if version > FORMAT_VERSION else "use the version that wrote it"
        raise UserError(f"{checkpoint} has format {version}, and this bert_jax reads {FORMAT_VERSION}: {remedy}")
    return about


def committed(directory: epath.Path) -> Iterator[epath.Path]:
    """Complete checkpoints, newest first."""
    return (save for save in _saves(directory) if (save / COMMIT).exists())


def _saves(directory: epath.Path) -> list[epath.Path]:
    """What `Checkpoints.save` made, complete or not, newest first; whatever else lies there is somebody's."""
    if not directory.exists():
        return []
    ours = (path for path in directory.iterdir() if path.name.isdigit())
    return sorted(ours, key=lambda path: int(path.name), reverse=True)


def newest(directory: epath.Path) -> epath.Path | None:
    """What `verified` finds, to be asked by all processes of a run: the first one looks."""

    def look() -> str | None:
        found = verified(directory)
        return None if found is None else found.name

    name = broadcast_from_first("the newest checkpoint", look)
    return None if name is None else directory / name


def verified(directory: epath.Path) -> epath.Path | None:
    """The newest complete checkpoint whose files are intact; None if there is no complete one.

    Raises:
      UserError: all complete ones are damaged.
    """
    damage = None
    for path in committed(directory):
        damage = find_damage(path)
        if damage is None:
            return path
        print(f"warning: checkpoint {path} is damaged ({damage}); trying the one before", file=sys.stderr)
    if damage is not None:
        raise UserError(f"{directory}: every checkpoint is damaged; restore a copy, or start in another --workdir")
    return None


def write_commit(checkpoint: epath.Path, written: epath.Path | None = None) -> None:
    """Declare a checkpoint complete. The file appears whole or not at all.

    Args:
      checkpoint: all of its other files are there.
      written: where they were copied from, if they were; it is read instead.
    """
    text = json.dumps({"sha256": _sums(written or checkpoint)}, indent=1)
    write_atomic(checkpoint / COMMIT, text.encode())


def find_damage(checkpoint: epath.Path) -> str | None:
    """The first file that is missing, added or altered since the commit, with what is wrong; None if none is."""
    try:
        expected = json.loads((checkpoint / COMMIT).read_text())["sha256"]
        expected.keys()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{COMMIT} is incomplete"
    found = _sums(checkpoint)
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} was added later"
        if expected[name] != found[name]:
            return f"{name} has changed"
    return None


def _sums(checkpoint: epath.Path) -> dict[str, str]:
    sums = {}
    for path in walk_files(checkpoint):
        name = path.relative_to(checkpoint).as_posix()
        if name != COMMIT:
            with path.open("rb") as file:
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
