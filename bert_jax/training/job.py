"""The job of a task in a work directory: lock it, write its identity, run the loop; read its newest parameters."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from bert_jax.directory_lock import DirectoryLock
from bert_jax.distributed.agreement import barrier, compute_and_broadcast, is_first
from bert_jax.distributed.shared_directory import check_shared_directory
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath
from bert_jax.training import continuation, loop
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory import workdir
from bert_jax.training.run_directory.checkpoint import (
    checkpoint_directory,
    committed_checkpoint_paths,
    newest_intact,
    read_metadata,
    restore_parts,
)
from bert_jax.training.sharding import put_equal
from bert_jax.training.state import InitialParams
from bert_jax.training.task import Params


class RunData(NamedTuple):
    """What a run is trained on; part of its identity."""

    shares: dict[str, float]
    """Share of the rows of each corpus or data set, by identity; they sum to 1."""
    paths: list[str]
    """Their directories, which may be others when the run is continued."""
    tokenizer_text: str
    """Content of tokenizer.json."""
    tokenizer_fingerprint: str


def has_checkpoint(directory: StoredPath) -> bool:
    """Whether the run in a directory has a committed checkpoint, so that it needs no initial parameters."""
    return compute_and_broadcast(
        "a first checkpoint", lambda: any(committed_checkpoint_paths(checkpoint_directory(directory)))
    )


def newest_params(programs: Programs, directory: StoredPath) -> tuple[Params, int]:
    """The parameters of a run's newest intact checkpoint, on the mesh, and the phase whose depth they have.

    Raises:
      UserError: there is no intact checkpoint.
    """
    checkpoint = newest_intact(checkpoint_directory(directory))
    if checkpoint is None:
        raise UserError(f"{directory} has no finished checkpoint yet: train it further with bert-jax pretrain")
    phase = read_metadata(checkpoint)["phase"]
    abstract = programs.abstract_state(phase).params
    params = restore_parts(checkpoint, {"params": abstract})["params"]
    return put_equal(params, jax.tree.map(lambda x: x.sharding, abstract), checkpoint), phase


def run_job(
    programs: Programs,
    accumulations: Sequence[int | None],
    directory: StoredPath,
    data: RunData,
    *,
    initial: InitialParams | None = None,
    announce: Callable[[], None] = lambda: None,
    profile: tuple[int, int] | None = None,
    start_time: float | None = None,
) -> loop.Progress:
    """Train in a work directory, or continue its run.

    Args:
      programs: the task, the mesh, and what is compiled for them.
      accumulations: of `micro_batch.check_run`, which must have been called.
      directory: work directory of the run.
      data: what it is trained on.
      initial: initial parameters and moments; None: random initialisation.
      announce: called in the first process after all checks, before compilation.
      profile, start_time: see `loop.train`.

    Raises:
      UserError: the work directory cannot be used, or another process trains in it. Nothing is written before.
    """
    config = programs.task.config
    identity = config, data.shares, data.paths
    with DirectoryLock(directory) as lock:

        def acquire() -> None:
            workdir.matching_config(directory, *identity)  # raises before anything is written
            lock.acquire()

        compute_and_broadcast("the lock", acquire)
        before = workdir.matching_config(directory, *identity)  # a run that has ended since may have replaced it
        if jax.process_count() > 1:
            check_shared_directory(directory)
        if before is not None:
            continuation.check_phase_changes(directory, before, config)
        compute_and_broadcast(
            "the work directory",
            lambda: workdir.write_run_config(directory, before, *identity, data.tokenizer_text),
        )
        if is_first():
            announce()
        metadata = {"tokenizer_fingerprint": data.tokenizer_fingerprint}
        progress = loop.train(
            programs,
            accumulations,
            directory,
            metadata,
            initial=initial,
            profile=profile,
            start_time=start_time,
            check=lock.check,
        )
        barrier("the end")  # the other processes wait for the files of the first one
    return progress
