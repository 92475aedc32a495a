"""Checkpoints with checksums: Orbax writes the arrays; a commit file with the SHA-256 of all files is written last.

``checkpoints/00001000/`` has ``state/`` (Orbax), ``run.json`` (the position in the stream, the ledger so far, and the
run's metadata) and ``COMMIT.json``: the SHA-256 of every other file, written when all of them are complete. A directory
without it is not a checkpoint, whenever the process died. Orbax alone restores flipped bits without an error, so the
checksums are verified on every restore (commit.py).

Nothing is renamed, so that a run can be in an object store. Orbax writes only to disks and to gs://; its array store
rejects every other path. For other stores, s3:// included, it writes to a temporary directory of this host, from which
the files are copied in the background before the commit.
"""

import concurrent.futures
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from bert_jax.distributed.agreement import compute_and_broadcast, is_first
from bert_jax.distributed.supervised import announce_checkpoint
from bert_jax.errors import UserError
from bert_jax.storage.failures import FULL_OR_READ_ONLY, describe_full_disk
from bert_jax.storage.files import (
    StagedDirectory,
    download_if_needed,
    make_directory_if_local,
    needs_staging,
    write_atomic,
)
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath, check_reachable, is_remote
from bert_jax.training.run_directory.commit import (
    COMMIT_MARKER,
    find_damage,
    gather_checksums,
    is_intact,
    write_commit,
)
from bert_jax.training.run_directory.orbax_errors import OrbaxErrorBuffer
from bert_jax.training.run_directory.retention import Retention, best_step, read_score, read_scores

HAS_CHECKPOINTS = "has_checkpoints"
"""File of a work directory, beside checkpoints/: a checkpoint has been committed, so one must be there."""
OWN_NAME = re.compile(r"[0-9]{8}|[1-9][0-9]{8,}")
"""Names of the directories of checkpoints."""
OWN_FILES = re.compile(r"state(\..+)?|run\.json|COMMIT\.json(\..+\.partial)?|\.nfs.+")
"""Names of what is in them: complete, or left by a killed process."""
ORBAX_STORES = ("gs",)
"""Object stores that Orbax reads and writes directly."""
FORMAT_VERSION = 6


class Checkpoints:
    """The checkpoints of one run, saved asynchronously."""

    def __init__(
        self,
        directory: epath.PathLike,
        keep: int,
        every: int = 1,
        keep_every: int | None = None,
        keep_best: str | None = None,
    ):
        self.directory, self.retention = epath.Path(directory), Retention(keep, every, keep_every, keep_best)
        self._errors, self._orbax = OrbaxErrorBuffer(), ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._committer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._commit: concurrent.futures.Future | None = None
        self.newest: tuple[int, float] | None = None  # step and date, in process 0 of what is committed or restored

    def save(self, step: int, state: Any, metadata: dict[str, Any], good: int | None = None) -> None:
        """Start saving; returns once the arrays are copied off the device, so that their buffers can be donated.

        Waits for the previous save and raises its error, if any. All processes of a run call this; each writes the
        arrays of its devices, and the first one commits when all have finished.

        Args:
          step: number of steps done; the name of the directory.
          state: tree of arrays.
          metadata: JSON values to save with them.
          good: see `Retention.kept_steps`.

        Raises:
          UserError: the disk is full or read-only; earlier checkpoints are intact.
        """
        self.wait()
        target = self.directory / f"{step:08d}"
        with self._disk_error_as_user_error(target), contextlib.ExitStack() as on_failure:
            compute_and_broadcast("a save", lambda: _clear(target))
            staged = on_failure.enter_context(contextlib.closing(StagedDirectory(target, ORBAX_STORES)))
            if is_first():
                text = json.dumps({"format_version": FORMAT_VERSION, **metadata}, indent=1)
                (staged.directory / "run.json").write_text(text)
            self._orbax.save(staged.directory / "state", args=ocp.args.StandardSave(state))
            on_failure.pop_all()  # the commit thread closes it
        self._commit = self._committer.submit(self._finish, target, staged, good)

    @contextlib.contextmanager
    def _disk_error_as_user_error(self, target: epath.Path) -> Iterator[None]:
        """Turn a full or read-only disk into a UserError of one line, and delete the incomplete save."""
        try:
            yield
        except Exception as error:
            line = describe_full_disk(error, FULL_OR_READ_ONLY)
            if line is None:
                raise
            if is_first():
                with contextlib.suppress(OSError):  # a read-only disk
                    target.rmtree(missing_ok=True)
            file = self._errors.move_to_temporary_file()
            details = f". Details are in {file}" if file else ""
            raise UserError(
                f"cannot save {target}: {line}. Earlier checkpoints of the run are intact{details}"
            ) from error

    def _finish(self, target: epath.Path, staged: StagedDirectory, good: int | None) -> None:
        with self._disk_error_as_user_error(target), contextlib.closing(staged):
            self._orbax.wait_until_finished()  # by all processes
            sums = gather_checksums(staged.directory)
            if is_first():
                staged.upload()
                write_commit(target, sums)
                self.newest = int(target.name), time.time()
            announce_checkpoint()
            if not is_first():
                return
        marker = self.directory.parent / HAS_CHECKPOINTS
        if not marker.exists():
            with contextlib.suppress(OSError):  # a full disk: the checkpoint is complete, and the next save writes it
                write_atomic(marker, f"{target.name}\n".encode())
        newest_first = list(committed_checkpoint_paths(self.directory))
        scores = read_scores(newest_first, self.retention.keep_best)
        kept = self.retention.kept_steps([int(save.name) for save in newest_first], good, scores)
        self._delete([save for save in newest_first if int(save.name) not in kept])

    def _delete(self, saves: Iterable[epath.Path]) -> None:
        for save in saves:
            (save / COMMIT_MARKER).unlink()  # first, so that a partly deleted checkpoint is not restored
        for save in _save_directories(self.directory):  # these, and incomplete ones of killed processes
            if not (save / COMMIT_MARKER).exists() and _is_save(save):
                save.rmtree()

    def delete(self, steps: Iterable[int]) -> None:
        """Delete the checkpoints of these steps."""
        self.wait()
        there, deleted = list(committed_checkpoint_paths(self.directory)), set(steps)
        if deleted >= {int(save.name) for save in there}:
            (self.directory.parent / HAS_CHECKPOINTS).unlink(missing_ok=True)  # first: then none can be missed
        self._delete([save for save in there if int(save.name) in deleted])

    def steps(self) -> list[int]:
        """The step of every complete checkpoint, newest first; all processes of a run call this."""
        self.wait()
        return [int(name) for name in _committed_names(self.directory)]

    def best_score(self) -> float | None:
        """The best score of a checkpoint in the metric `keep_best`; all processes of a run call this."""
        metric = self.retention.keep_best

        def find() -> float | None:
            scores = read_scores(committed_checkpoint_paths(self.directory), metric)
            return scores.get(best_step(metric, scores)) if metric is not None else None

        return None if metric is None else compute_and_broadcast("the best score", find)

    def metadata(self, step: int) -> dict[str, Any] | None:
        """The metadata of a checkpoint; None if any of its files is damaged. All processes of a run call this."""
        save = self.directory / f"{step:08d}"
        return None if find_damage(save) else read_metadata(save)

    def wait(self) -> None:
        """Wait until the last save is committed; raises its error, if any."""
        commit, self._commit = self._commit, None  # cleared first, so that an error is raised once
        if commit is not None:
            commit.result()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for the last save, and shut down the writer threads."""
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            self._orbax.close()
            self._errors.close()

    def restore_newest(self, abstract: Callable[[dict[str, Any]], Any]) -> tuple[Any, dict[str, Any]] | None:
        """The state and metadata of the newest checkpoint whose files are all intact; None if there is none.

        A damaged checkpoint is skipped with a warning on stderr. All processes of a run call this.

        Args:
          abstract: from metadata to a tree of ShapeDtypeStruct with the shardings to restore to; they may be others.

        Raises:
          UserError: there are checkpoints, but all are damaged.
        """
        checkpoint = newest_intact(self.directory)
        if checkpoint is None:
            return None
        metadata = read_metadata(checkpoint)
        self.newest = int(checkpoint.name), (checkpoint / COMMIT_MARKER).stat().mtime
        return self.restore(checkpoint, abstract(metadata)), metadata

    def restore(self, checkpoint: epath.PathLike, abstract: Any) -> Any:
        """The state of an intact checkpoint, also of another run; `abstract` as in `restore_newest`."""
        with download_if_needed(epath.Path(checkpoint) / "state", ORBAX_STORES) as state:
            return self._orbax.restore(state, args=ocp.args.StandardRestore(abstract))


def _clear(target: epath.Path) -> None:
    if target.exists():
        if not _is_save(target):
            raise UserError(f"{target} is needed for a checkpoint, and has other files: move them away")
        target.rmtree()  # an incomplete save, or a damaged checkpoint
    make_directory_if_local(target)


def _is_save(directory: epath.Path) -> bool:
    """Whether a directory with a checkpoint's name is one, complete or not: what a user put there is not deleted."""
    names = [path.name for path in directory.iterdir()]
    return not names or any(map(OWN_FILES.fullmatch, names))


def restore_parts(checkpoint: epath.Path, shapes: dict[str, Any]) -> dict[str, Any]:
    """Parts of a checkpoint as numpy arrays, such as only the parameters; other parts are not read.

    Args:
      checkpoint: an intact one.
      shapes: trees of ShapeDtypeStruct, by field of the state.

    Raises:
      UserError: an array of the checkpoint has another shape, because the run's config.json was changed.
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    restore_args = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray), abstract)
    with (
        download_if_needed(checkpoint / "state", ORBAX_STORES) as state,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax,
    ):
        arguments = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=True)
        restored = orbax.restore(state, args=arguments)
    for (path, leaf), expected in zip(jax.tree.leaves_with_path(restored), jax.tree.leaves(abstract), strict=True):
        if leaf.shape != expected.shape:
            raise UserError(
                f"{checkpoint}: {jax.tree_util.keystr(path, simple=True, separator='/')} has shape {leaf.shape}, not "
                f"{expected.shape} as in the run's config.json: restore the config.json that the run was started with"
            )
    return restored


def check_checkpoint_storage(workdir: StoredPath, processes: int) -> None:
    """Check before training that a run of this number of processes can save checkpoints in its work directory.

    Raises:
      UserError: the store does not respond, or does not support checkpoints of several processes.
    """
    check_reachable(workdir)
    if processes > 1 and needs_staging(workdir, ORBAX_STORES):
        raise UserError(
            f"{workdir}: several processes write one checkpoint together, which needs a directory that all of them "
            "can access: use gs:// or a shared file system"
        )


def checkpoint_directory(workdir: epath.PathLike) -> epath.Path:
    """The directory of a run's checkpoints: an absolute path, which Orbax requires."""
    directory = epath.Path(workdir) / "checkpoints"
    return directory if is_remote(directory) else directory.absolute()


def read_metadata(checkpoint: epath.Path) -> dict[str, Any]:
    """The metadata that was saved with a checkpoint.

    Raises:
      UserError: another version of bert_jax wrote the checkpoint in another format.
    """
    return read_json_as(checkpoint / "run.json", dict[str, Any], "use the version that wrote it", FORMAT_VERSION)


def committed_checkpoint_paths(directory: epath.Path) -> Iterator[epath.Path]:
    """Complete checkpoints, newest first."""
    return (save for save in _save_directories(directory) if (save / COMMIT_MARKER).exists())


def _save_directories(directory: epath.Path) -> list[epath.Path]:
    """Directories that `Checkpoints.save` made, complete or not, newest first; other files belong to the user."""
    if not directory.exists():
        return []
    saves = (path for path in directory.iterdir() if OWN_NAME.fullmatch(path.name))
    return sorted(saves, key=lambda path: int(path.name), reverse=True)


def _committed_names(directory: epath.Path) -> list[str]:
    """Names of the complete checkpoints that process 0 finds, newest first, in all processes."""
    return compute_and_broadcast(
        "the checkpoints", lambda: [path.name for path in committed_checkpoint_paths(directory)]
    )


def newest_intact(directory: epath.Path) -> epath.Path | None:
    """The newest complete checkpoint whose files are intact; None if there is no complete one.

    All processes of a run call this, and get the same checkpoint. Damaged ones are named on stderr.

    Raises:
      UserError: all complete checkpoints are damaged.
    """
    damage = None
    for name in _committed_names(directory):
        damage = find_damage(directory / name)
        if damage is None:
            return directory / name
        if is_first():
            print(
                f"warning: checkpoint {directory / name} is damaged ({damage}); trying the one before", file=sys.stderr
            )
    if damage is not None:
        raise UserError(f"{directory}: every checkpoint is damaged; restore a copy, or start in another --workdir")
    return None


def best_checkpoint_step(directory: epath.Path) -> int:
    """The step of the best checkpoint in the metric of the newest one that has a score. All processes call this.

    Raises:
      UserError: no checkpoint has a score.
    """

    def find() -> int | None:
        saves = list(committed_checkpoint_paths(directory))
        metric = next((score["metric"] for score in map(read_score, saves) if score), None)
        return None if metric is None else best_step(metric, read_scores(saves, metric))

    best = compute_and_broadcast("the best checkpoint", find)
    if best is None:
        raise UserError(
            f"{directory} has no best checkpoint: train with --checkpoint.keep-best METRIC, or give the step of one"
        )
    return best


def newest_with_metadata(directory: epath.Path) -> epath.Path | None:
    """The newest complete checkpoint whose run.json is intact; the other files are not read."""
    for save in committed_checkpoint_paths(directory):
        with contextlib.suppress(UserError, OSError):  # damaged: `newest_intact` names it
            if is_intact(save, "run.json"):
                return save
    return None
