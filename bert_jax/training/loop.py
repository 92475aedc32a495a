"""The training loop: restore or initialise, then step, log, evaluate and save until the run is done."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from bert_jax import field_validation
from bert_jax.config import Config
from bert_jax.data.cursor import Cursor
from bert_jax.distributed.agreement import barrier, compute_and_broadcast, is_first
from bert_jax.distributed.device_errors import describing_device_errors
from bert_jax.distributed.stop_request import stop_request
from bert_jax.errors import UserError
from bert_jax.field_validation import CountOrZero
from bert_jax.objectives import masked_lm
from bert_jax.storage.paths import StoredPath
from bert_jax.training import recovery
from bert_jax.training.divergence import RollbackError
from bert_jax.training.micro_batch import TrainSteps
from bert_jax.training.monitoring.event_hook import OnEvent, ignore_event
from bert_jax.training.monitoring.prometheus import PrometheusServer
from bert_jax.training.monitoring.watchdog import Watchdog
from bert_jax.training.programs import Programs, put_seed, put_step_inputs
from bert_jax.training.replicas import ReplicaCheck
from bert_jax.training.reporter import Reporter
from bert_jax.training.run_directory import goodput as goodput_lib
from bert_jax.training.run_directory.checkpoint import Checkpoints, checkpoint_directory
from bert_jax.training.run_directory.goodput import GoodputRecorder
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.run_directory.local_copies import LocalCopies, open_local_copies
from bert_jax.training.run_directory.retention import SCORE, Score
from bert_jax.training.run_directory.workdir import LEDGER
from bert_jax.training.save_schedule import SaveSchedule, score_of
from bert_jax.training.sharding import put_rows
from bert_jax.training.state import Fork, InitialParams, TrainState
from bert_jax.training.time_budget import WallClockSchedule


@dataclass(frozen=True)
class Progress:
    """Progress of a run; saved with every checkpoint."""

    cursor: Cursor
    """Position of the next step in the stream."""
    phase: CountOrZero
    """Phase of the last step: the parameters have its depth."""
    tokens_seen: int
    """Tokens without padding in all steps so far."""
    skipped_steps: int
    """Steps so far whose loss or gradient was not finite."""
    metric_lines: int
    """Lines of metrics.jsonl so far."""
    evaluation: dict[str, float]
    """Latest held-out metrics."""
    ended: str = ""
    """Why the run has ended: "steps", "time" or "target"; empty while it has not."""


@dataclass(frozen=True)
class RunContext:
    """The constants of a run, which survive rollbacks."""

    programs: Programs
    workdir: StoredPath
    metadata: dict[str, Any]
    """JSON values to keep in every checkpoint."""
    initial: InitialParams | Fork | None
    """Initial parameters, or a checkpoint of another run to continue; None: random initialisation."""
    ledger: Ledger
    train_steps: TrainSteps
    profile: tuple[int, int] | None
    stop_requested: Callable[[], bool]
    """Called after every step: whether to save and stop; true after SIGTERM or Ctrl-C."""
    check: Callable[[], None]
    """Called after every step; raises if the run must not continue."""
    on_event: OnEvent
    """Called at a start, the cause of a rollback, a rollback and, from a thread, a stall; returns at once."""
    prometheus: PrometheusServer
    local_copies: LocalCopies | None


def train(
    programs: Programs,
    accumulations: Sequence[int | None],
    workdir: StoredPath,
    metadata: dict[str, Any],
    *,
    initial: InitialParams | Fork | None = None,
    profile: tuple[int, int] | None = None,
    start: float | None = None,
    check: Callable[[], None] = lambda: None,
    on_event: OnEvent = ignore_event,
) -> Progress:
    """Train to the end of the run, from its newest intact checkpoint if there is one.

    On SIGTERM to any process of the run, a checkpoint is saved after the current step and this returns; the same call
    continues the run. On Ctrl-C a checkpoint is saved, too, and this raises KeyboardInterrupt; a second Ctrl-C ends the
    process. All processes call this; the first one writes all files that are not part of a checkpoint. After divergence
    (training/divergence.py), or if replicas differ (training/replicas.py), the run rolls back and continues
    (training/recovery.py).

    Args:
      programs: the task, the mesh, and what is compiled for them.
      accumulations: of `micro_batch.choose_accumulations`, which must have been called.
      workdir: of the run, acquired for it (workdir.write_run_config).
      metadata: JSON values to keep in every checkpoint.
      initial: initial parameters and moments, or a checkpoint of another run to continue; None: random initialisation.
      profile: write a trace of steps [first, last) to workdir/profile.
      start: `time.perf_counter()` at the start of the process, for goodput.
      check: called after every step; an exception from it ends the run without a save.
      on_event: see `RunContext`.

    Returns:
      the progress of the run when it stopped.

    Raises:
      UserError: training diverges or is corrupted repeatedly, damaged checkpoints, a device out of memory, starts
        without a checkpoint.
      PeerError: another process is late.
      DeviceOrConnectionError: a device or a connection between processes failed.
    """
    config, ledger = programs.task.config, Ledger(workdir / LEDGER)
    steps = TrainSteps(programs, ledger, accumulations)
    with (
        stop_request() as stop_requested,
        PrometheusServer(config, workdir, ledger) as prometheus,
        open_local_copies(config, workdir) as copies,
    ):
        services = stop_requested, check, on_event, prometheus, copies
        run = RunContext(programs, workdir, metadata, initial, ledger, steps, profile, *services)
        progress = _train_with_rollbacks(run, start or time.perf_counter())
    if stop_requested.interrupted and not progress.ended:
        done = f"stopped and saved at step {progress.cursor.step} of {config.total_steps}"
        raise KeyboardInterrupt(f"{done}; the same command continues")
    return progress


def _train_with_rollbacks(run: RunContext, start: float) -> Progress:
    """Train to the end of the run or to SIGTERM; after a RollbackError, from the checkpoint that it rolls back to."""
    config = run.programs.task.config
    is_first_attempt = True
    while True:
        with (
            GoodputRecorder(run.workdir, start) as goodput,
            describing_device_errors(),
            _open_checkpoints(run) as saves,
        ):
            run.prometheus.begin_attempt(goodput, saves)
            recovery.apply_rollback(saves, run.ledger)
            if is_first_attempt:
                goodput.begin(_check_starts(run, saves))
            try:
                return _attempt(run, saves, goodput)
            except RollbackError as cause:
                goodput.write_totals(cause.last)
                run.on_event(cause.event, cause.last, cause.reason)
                run.on_event("rollback", *recovery.record_rollback(cause, config, saves, run.ledger))
        start, is_first_attempt = time.perf_counter(), False


def _open_checkpoints(run: RunContext) -> Checkpoints:
    settings = run.programs.task.config.checkpoint
    directory = checkpoint_directory(run.workdir)
    return Checkpoints(directory, settings.keep, settings.every, settings.keep_every, settings.keep_best)


def _check_starts(run: RunContext, checkpoints: Checkpoints) -> int:
    """Return the step of the newest checkpoint, or 0; raise if too many starts from it have not made another one."""
    config = run.programs.task.config
    limit = config.recovery.max_starts
    advice = f"set --recovery.max-starts {2 * limit}" if config.finetune is None else "delete its goodput.jsonl"
    step = max(checkpoints.steps(), default=0)
    if run.local_copies is not None:
        step = max(step, run.local_copies.newest_step())

    def check() -> None:
        before = goodput_lib.starts_without_checkpoint(run.workdir, step)
        if before >= limit:
            raise UserError(
                f"the last {before} starts of this run made no checkpoint after step {step}: see their error messages; "
                f"to try again, {advice}"
            )

    compute_and_broadcast("the number of starts", check)
    return step


def _attempt(run: RunContext, checkpoints: Checkpoints, goodput: GoodputRecorder) -> Progress:
    """Train from the newest checkpoint to the end, to SIGTERM, or to RollbackError."""
    task, mesh, programs = run.programs.task, run.programs.mesh, run.programs
    config, seed = task.config, put_seed(task.config.seed, mesh)
    schedule = WallClockSchedule(config, run.ledger)
    with Watchdog(run.workdir, goodput, config.recovery.stall_seconds, run.on_event), contextlib.ExitStack() as stack:
        state, progress = _restore_or_init(run, checkpoints)
        cursor, phase, evaluation = progress.cursor, progress.phase, progress.evaluation
        if ended := _ended(config, schedule, cursor, evaluation):
            goodput.write_totals(cursor.step, ended=ended)
            return dataclasses.replace(progress, ended=ended)
        with goodput.measure("compile"):
            run.train_steps.precompile(cursor.phase)
        so_far = cursor.step, progress.tokens_seen, progress.skipped_steps, progress.metric_lines
        report = stack.enter_context(Reporter(task, run.workdir, mesh, *so_far, goodput, run.profile, run.prometheus))
        batches = stack.enter_context(contextlib.closing(task.batches(cursor)))
        replicas = stack.enter_context(ReplicaCheck(programs, lambda: (cursor.step, state)))
        saving, previous_step = SaveSchedule(config.checkpoint, cursor.step, checkpoints.best_score()), None
        goodput.ready(cursor.step)
        run.on_event("start", cursor.step, f"training begins at step {cursor.step} of {config.total_steps}")
        for rows, size, following in report.timed_batches(batches):
            schedule.update_estimate(cursor.step)
            report.before_step(cursor.step)
            with goodput.measure("compile"):
                if cursor.phase != phase:
                    phase, state = cursor.phase, programs.enter_phase(state, cursor.phase)
                replicas.enter_phase(phase)
                train_step, row_count, micro_batches = run.train_steps.of_batch(phase, size)
                if train_step is not previous_step:  # its first collective gives a late process only 30 s (Gloo)
                    barrier("the first step of a program")
                    previous_step = train_step
            batch = put_rows(rows, mesh, row_count)
            rate = schedule.learning_rate(cursor.step)
            inputs = put_step_inputs(rate, micro_batches, seed, mesh, masked_lm.mask_counts_at(config, cursor.step))
            with jax.transfer_guard("disallow"):
                state, metrics = train_step(state, batch, inputs)
            report.add_step(following.step, size * config.phases[phase].seq_len, metrics)
            before, cursor, goodput.step = cursor, following, following.step
            replicas.add_step(cursor.step, state)
            due = _evaluation_due(config, before, cursor) or _ended(config, schedule, cursor, {}) != ""
            evaluation = _evaluate(run, report, goodput, state, cursor.step, phase) if due else evaluation
            score = score_of(config.checkpoint, evaluation) if due else None
            ended = _ended(config, schedule, cursor, evaluation)
            run.check()
            stop = run.stop_requested()  # called once: SIGTERM between save and break must not skip the save
            if saving.is_due(cursor.step, score) or ended or stop:
                report.flush()  # metrics up to a committed checkpoint must be on disk before it
                replicas.check(cursor.step, state)
                progress = Progress(cursor, phase, *report.counts, evaluation, ended)
                with goodput.measure("checkpoint"):
                    _save(run, checkpoints, state, progress, score)
                saving.mark_saved(cursor.step)
                goodput.write_totals(cursor.step)
            elif run.local_copies is not None and run.local_copies.is_due(cursor.step):
                report.report_pending()
                replicas.check(cursor.step, state)
                _save_locally(run, goodput, state, Progress(cursor, phase, *report.counts, evaluation))
            if ended or stop:
                break
    return progress


def _restore_or_init(run: RunContext, checkpoints: Checkpoints) -> tuple[TrainState, Progress]:
    config = run.programs.task.config

    def abstract(metadata: dict[str, Any]) -> TrainState:
        return run.programs.abstract_state(metadata["phase"])

    def is_of_this_run(metadata: dict[str, Any]) -> bool:
        """Whether a local copy has the run's first decisions, after which there was no rollback."""
        try:
            phase = _read_progress(metadata).phase
            count = len(field_validation.from_json(list[dict[str, Any]], metadata.get("ledger"), "ledger"))
        except UserError:
            return False
        before, later = run.ledger.entries[:count], run.ledger.entries[count:]
        no_rollback = all(entry["event"] != recovery.EVENT for entry in later)
        return phase < len(config.phases) and before == metadata["ledger"] and no_rollback

    restored = None
    if run.local_copies is not None:
        newest = max(checkpoints.steps(), default=0)
        restored = run.local_copies.restore_newest(newest, abstract, is_of_this_run)
    restored = restored or checkpoints.restore_newest(abstract)
    if restored is not None:
        state, saved = restored
        return state, _continued(run, saved, _read_progress(saved))
    if isinstance(run.initial, Fork):
        saved = run.initial.metadata
        run.ledger.restore(saved["ledger"], are_lost=False)
        state = checkpoints.restore(run.initial.checkpoint, run.programs.abstract_state(saved["phase"]))
        progress = dataclasses.replace(_read_progress(saved), cursor=run.initial.cursor, metric_lines=0)
        progress = _continued(run, saved, progress)
        _save(run, checkpoints, state, progress)  # a restart does not need the source again
        return state, progress
    progress = Progress(recovery.with_skipped_rows(Cursor(), run.ledger), 0, 0, 0, 0, {})
    if run.initial is None:
        if config.start.source is not None:
            raise UserError(f"{run.workdir} has no checkpoint left: run the same command again to restart")
        return run.programs.init_state(), progress
    state = run.programs.state_from_initial(run.initial)
    _save(run, checkpoints, state, progress)  # a restart does not need the source again
    return state, progress


def _read_progress(metadata: dict[str, Any]) -> Progress:
    """The progress in the metadata of a checkpoint, or of a local copy.

    Raises:
      UserError: the metadata has another form.
    """
    values = {one.name: metadata[one.name] for one in dataclasses.fields(Progress) if one.name in metadata}
    return field_validation.from_json(Progress, values, "the progress of a checkpoint")


def _continued(run: RunContext, saved: dict[str, Any], progress: Progress) -> Progress:
    """The progress to continue with from a checkpoint's metadata, whose ledger becomes that of the run."""
    run.ledger.restore(saved["ledger"])
    cursor = recovery.with_skipped_rows(progress.cursor, run.ledger)
    # The next phase, if the run was extended.
    cursor = cursor.in_phase(run.programs.task.config.locate_step(cursor.step)[0])
    if is_first():
        print(f"continuing from step {cursor.step}", file=sys.stderr)
    return dataclasses.replace(progress, cursor=cursor, ended="")


def _evaluate(
    run: RunContext, report: Reporter, goodput: GoodputRecorder, state: TrainState, step: int, phase: int
) -> dict[str, float]:
    report.flush()
    with goodput.measure("evaluation"):
        evaluation = run.programs.evaluate(state.evaluated_params, phase)
    report.add_evaluation(step, evaluation)
    return evaluation


def _save(
    run: RunContext, checkpoints: Checkpoints, state: TrainState, progress: Progress, score: Score | None = None
) -> None:
    config, step = run.programs.task.config, progress.cursor.step
    good = recovery.trusted_until_step(step - recovery.undetected_steps(config), config, run.ledger, checkpoints)
    checkpoints.save(step, state, _metadata(run, progress) | ({} if score is None else {SCORE: score}), good)


def _save_locally(run: RunContext, goodput: GoodputRecorder, state: TrainState, progress: Progress) -> None:
    assert run.local_copies is not None
    metadata = _metadata(run, progress)
    with goodput.measure("checkpoint"):
        run.local_copies.save(progress.cursor.step, state, metadata)


def _metadata(run: RunContext, progress: Progress) -> dict[str, Any]:
    """What is saved with the state."""
    return dataclasses.asdict(progress) | {"ledger": list(run.ledger.entries)} | run.metadata


def _evaluation_due(config: Config, before: Cursor, after: Cursor) -> bool:
    """Whether to evaluate after a step: by rows if there is a target, else by steps."""
    if config.target.mlm_accuracy is not None:
        every = config.target.rows_between_evaluations(config.phases[before.phase].batch_size)
        return before.rows // every < after.rows // every
    every = config.evaluation.every
    return every > 0 and after.step % every == 0


def _ended(config: Config, schedule: WallClockSchedule, cursor: Cursor, evaluation: dict[str, float]) -> str:
    """Why the run ends at this cursor with this latest evaluation; empty if it continues."""
    target = config.target.mlm_accuracy
    if target is not None and evaluation.get("mlm_accuracy", 0.0) >= target:
        return "target"
    if cursor.step >= config.total_steps:
        return "steps"
    return "time" if cursor.step >= schedule.end_step else ""
