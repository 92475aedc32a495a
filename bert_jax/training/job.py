"""The job of a task in a work directory: lock it, write its identity, run the loop; read its parameters."""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from etils import epath

from bert_jax.config import Config, ModelConfig
from bert_jax.distributed.agreement import barrier, compute_and_broadcast, is_first
from bert_jax.distributed.shared_directory import check_shared_directory
from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic
from bert_jax.storage.lock import DirectoryLock
from bert_jax.storage.paths import StoredPath
from bert_jax.training import continuation, loop
from bert_jax.training.kernel_check import check_kernels
from bert_jax.training.monitoring.event_hook import OnEvent, ignore_event
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory import workdir
from bert_jax.training.run_directory.checkpoint import (
    HAS_CHECKPOINTS,
    best_checkpoint_step,
    checkpoint_directory,
    committed_checkpoint_paths,
    newest_intact,
    newest_with_metadata,
    read_metadata,
    restore_parts,
)
from bert_jax.training.run_directory.commit import COMMIT_MARKER, find_damage
from bert_jax.training.run_directory.local_copies import RUN_ID
from bert_jax.training.run_directory.lost_checkpoints import check_no_lost_checkpoints, has_lost_checkpoints
from bert_jax.training.run_directory.retention import BEST
from bert_jax.training.run_directory.run_tokenizer import load_tokenizer
from bert_jax.training.sharding import put_equal
from bert_jax.training.state import Fork, InitialParams
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


def run_directory_of(source: StoredPath) -> StoredPath:
    """The work directory of ``RUN/checkpoints/STEP`` or ``RUN/checkpoints/best``; another path is returned as it is."""
    run, names_one = source.parent.parent, source.name.isdigit() or source.name == BEST
    return run if names_one and source.parent.name == "checkpoints" and (run / workdir.CONFIG).exists() else source


def intact_checkpoint(source: StoredPath) -> epath.Path:
    """The newest intact checkpoint of a work directory, or the one that ``RUN/checkpoints/STEP`` (or ``best``) names.

    All processes of a run call this.

    Raises:
      UserError: there is no intact checkpoint, or the named one is not complete and intact.
    """
    directory = run_directory_of(source)
    if directory == source:
        newest = newest_intact(checkpoint_directory(directory))
        if newest is None:
            raise UserError(f"{directory} has no finished checkpoint yet: train it further with bert-jax pretrain")
        return newest
    saves = checkpoint_directory(directory)
    save = saves / (f"{best_checkpoint_step(saves):08d}" if source.name == BEST else source.name)
    if not (save / COMMIT_MARKER).exists():
        raise UserError(f"{save} is not a finished checkpoint: give another one, or the run's directory")
    if damage := find_damage(save):
        raise UserError(f"{save} is damaged ({damage}): give another one, or the run's directory")
    return save


def params_and_phase(programs: Programs, checkpoint: epath.Path) -> tuple[Params, int]:
    """The evaluated parameters of a run's intact checkpoint, on the mesh, and the phase whose depth they have."""
    phase = read_metadata(checkpoint)["phase"]
    state = programs.abstract_state(phase)
    abstract, part = state.evaluated_params, "params" if state.average is None else "average"
    params = restore_parts(checkpoint, {part: abstract})[part]
    return put_equal(params, jax.tree.map(lambda x: x.sharding, abstract), checkpoint), phase


def run_job(
    programs: Programs,
    accumulations: Sequence[int | None],
    directory: StoredPath,
    data: RunData,
    *,
    initial: InitialParams | Fork | None = None,
    announce: Callable[[], None] = lambda: None,
    profile: tuple[int, int] | None = None,
    start: float | None = None,
    restart: bool = False,
    on_event: OnEvent = ignore_event,
) -> loop.Progress:
    """Train in a work directory, or continue its run.

    Args:
      programs: the task, the mesh, and what is compiled for them.
      accumulations: of `micro_batch.choose_accumulations`, which must have been called.
      directory: work directory of the run.
      data: what it is trained on.
      announce: called in the first process after all checks, before compilation.
      restart: begin again at step 0 if the run has lost its checkpoints.
      initial, profile, start, on_event: see `loop.train`.

    Raises:
      UserError: the work directory cannot be used, or another process trains in it; without `restart`, its checkpoints
        are lost; kernels of attention compute something else on this device. Nothing is written before.
    """
    config = programs.task.config
    check_kernels(*_attention_models(config))
    identity = config, data.shares, data.paths
    with DirectoryLock(directory) as lock:

        def acquire() -> None:
            if workdir.matching_config(directory, *identity) is not None and not restart:
                check_no_lost_checkpoints(directory)
            lock.acquire()

        compute_and_broadcast("the lock", acquire)
        before = workdir.matching_config(directory, *identity)  # a run that has ended since may have replaced it
        if jax.process_count() > 1:
            check_shared_directory(directory)
        if before is not None:
            continuation.check_phase_changes(directory, before, config)
        compute_and_broadcast("the work directory", lambda: _prepare(directory, before, config, data))
        if is_first():
            announce()
        progress = loop.train(
            programs,
            accumulations,
            directory,
            {"tokenizer_fingerprint": data.tokenizer_fingerprint},
            initial=initial,
            profile=profile,
            start=start,
            check=lock.check,
            on_event=on_event,
        )
        barrier("the end")  # the other processes wait for the files of the first one
    return progress


def _attention_models(config: Config) -> list[ModelConfig | None]:
    """A model of each direction that the phases have, and the generator."""
    models = map(config.model_of, range(len(config.phases)))
    return [*{model.direction: model for model in models}.values(), config.generator_of(-1)]


def _prepare(directory: StoredPath, before: Config | None, config: Config, data: RunData) -> None:
    """Write the files of a run that are not there; remove what refers to lost checkpoints.

    Args:
      directory: work directory, whose lock is held.
      before: the config in it, if it holds this run.
      config: of the run.
      data: of the run.

    Raises:
      UserError: the directory is not writable, or see `_restore_tokenizer`.
    """
    if before is not None and has_lost_checkpoints(directory):  # metrics are replaced when the loop begins
        print(f"warning: {directory} has no checkpoint left: the run begins again at step 0", file=sys.stderr)
        write_atomic(directory / workdir.LEDGER, b"")
        for name in (HAS_CHECKPOINTS, RUN_ID):
            (directory / name).unlink(missing_ok=True)
    if before is not None:
        _restore_tokenizer(directory, data)
    workdir.write_run_config(directory, before, config, data.shares, data.paths, data.tokenizer_text)


def _restore_tokenizer(directory: StoredPath, data: RunData) -> None:
    """Write tokenizer.json again if it is missing.

    Raises:
      UserError: it, or if it is missing that of the corpora, is not the tokenizer of the newest checkpoint.
    """
    path, newest = directory / workdir.TOKENIZER, newest_with_metadata(checkpoint_directory(directory))
    if path.exists():
        load_tokenizer(directory, newest)
        return
    if newest is not None and read_metadata(newest)["tokenizer_fingerprint"] != data.tokenizer_fingerprint:
        raise UserError(f"{path} is missing, and {', '.join(data.paths)} has another tokenizer: restore a copy of it")
    write_atomic(path, data.tokenizer_text.encode())
    print(f"warning: {path} was missing: restored from {', '.join(data.paths)}", file=sys.stderr)
