"""train(task): build, restore, then step, log, evaluate and save until the run is done."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.config import Config
from bert_jax.data.cursor import Cursor
from bert_jax.distributed.agreement import is_first
from bert_jax.distributed.stop_request import stop_request
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath
from bert_jax.training import recovery
from bert_jax.training.compiled_steps import Programs, make_evaluator, micro_batches_of
from bert_jax.training.divergence import TroubleError
from bert_jax.training.micro_batch import Asked, given
from bert_jax.training.reporter import Reporter
from bert_jax.training.run_directory.checkpoint import Checkpoints, directory_of, newest, read_about, restore_parts
from bert_jax.training.run_directory.goodput import Goodput
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.run_directory.workdir import LEDGER
from bert_jax.training.sharding import check_heads, check_processes, check_rows, make_mesh, put_rows
from bert_jax.training.state import InitialParams, TrainState, abstract_state, enter_phase, init_state, state_from
from bert_jax.training.step import put_dials
from bert_jax.training.task import Task
from bert_jax.training.time_budget import Budget


@dataclass(frozen=True)
class Place:
    """Where a run stands; saved with every checkpoint."""

    cursor: Cursor
    """What the next update reads."""
    phase: int
    """Of the last update: the parameters have its depth."""
    tokens_seen: int
    """Real tokens in all updates so far."""
    evaluation: dict[str, float]
    """Newest held-out metrics."""
    ended: str = ""
    """Why the run is over: after its "steps", its "time", or at its "target"; empty while it is not."""


@dataclass(frozen=True)
class Run:
    """What stays the same while a run goes on, and back."""

    task: Task
    mesh: Mesh
    workdir: StoredPath
    about: dict[str, Any]
    """JSON values to keep in every checkpoint."""
    start: InitialParams | None
    """What to start from; None: parameters are drawn."""
    ledger: Ledger
    programs: Programs
    profile: tuple[int, int] | None
    stopping: Callable[[], bool]
    """Called after every step: whether to save and stop; true after SIGTERM or Ctrl-C."""
    check: Callable[[], None]
    """Raises if the run must not go on."""


def train(
    task: Task,
    workdir: StoredPath,
    about: dict[str, Any],
    *,
    start: InitialParams | None = None,
    profile: tuple[int, int] | None = None,
    micro_batch: Asked = None,
    begun: float | None = None,
    check: Callable[[], None] = lambda: None,
) -> Place:
    """Run the task to its end, from its newest intact checkpoint if there is one.

    On SIGTERM, to any process of the run, it is saved after the current update and this returns; the same call
    continues it. On Ctrl-C it is saved, too, and this raises KeyboardInterrupt; a second one ends the process.
    All processes call this; the first one writes what is not part of a checkpoint. After trouble
    (training/divergence.py) it goes back and on by itself (training/recovery.py).

    Args:
      task: what to train.
      workdir: of the run, claimed for it (workdir.claim).
      about: JSON values to keep in every checkpoint.
      start: parameters and moments to start from; None: parameters are drawn.
      profile: write a trace of updates [first, last) to workdir/profile.
      micro_batch: rows at a time on each device, "auto", or None for what the config says.
      begun: `time.time()` when the process began its work, for goodput.
      check: called after every step; what it raises ends the run without a save.

    Returns:
      where the run stands.

    Raises:
      UserError: a batch that the mesh cannot split, training that diverges again and again, damaged checkpoints.
      PeerError: another process is late.
    """
    mesh, ledger = checked_mesh(task, micro_batch), Ledger(workdir / LEDGER)
    programs, begun = Programs(task, mesh, ledger, micro_batch), begun or time.time()
    with stop_request() as stopping:
        run = Run(task, mesh, workdir, about, start, ledger, programs, profile, stopping, check)
        while True:
            with Checkpoints(directory_of(workdir), task.config.checkpoint.keep) as checkpoints:
                recovery.carry_out(checkpoints, ledger)
                with contextlib.closing(Goodput(workdir, begun)) as goodput:
                    try:
                        place = _attempt(run, checkpoints, goodput)
                        break
                    except TroubleError as trouble:
                        goodput.record(trouble.last)
                        recovery.decide(trouble, task.config, checkpoints, ledger)
            begun = time.time()
    if stopping.interrupted and not place.ended:
        done, total = place.cursor.step, task.config.total_steps
        raise KeyboardInterrupt(f"stopped and saved at update {done} of {total}; the same command continues")
    return place


def _attempt(run: Run, checkpoints: Checkpoints, goodput: Goodput) -> Place:
    """From the newest checkpoint to the end, to SIGTERM, or to TroubleError."""
    config, budget = run.task.config, Budget(run.task.config, run.ledger)
    with contextlib.ExitStack() as stack:
        state, place = _restore_or_init(run, checkpoints)
        cursor, phase, evaluation = place.cursor, place.phase, place.evaluation
        if ended := _ended(config, budget, cursor, evaluation):
            return dataclasses.replace(place, ended=ended)
        with goodput.spending("compile"):
            run.programs.fit_memory(cursor.phase)
        so_far = cursor.step, place.tokens_seen
        report = stack.enter_context(Reporter(run.task, run.workdir, run.mesh, *so_far, goodput, run.profile))
        batches = stack.enter_context(contextlib.closing(run.task.batches(cursor)))
        goodput.ready(cursor.step)
        for rows, size, following in report.timed(batches):
            budget.look(cursor.step)
            report.before(cursor.step)
            with goodput.spending("compile"):
                if cursor.phase != phase:
                    phase = cursor.phase
                    state = enter_phase(state, run.task.at(phase), run.mesh)
                update, accumulation = run.programs.update(phase)
            batch = put_rows(rows, run.mesh, config.phases[phase].batch_size)
            turns = micro_batches_of(config.phases[phase], size, accumulation)
            dials = put_dials(budget.rate(cursor.step), turns, run.mesh)
            with jax.transfer_guard("disallow"):
                state, metrics = update(state, batch, dials)
            report.push(following.step, size * config.phases[phase].seq_len, metrics)
            before, cursor = cursor, following
            if _evaluation_due(config, before, cursor) or _ended(config, budget, cursor, {}):
                report.flush()
                with goodput.spending("evaluation"):
                    evaluation = run.programs.evaluator(phase)(state.params)
                report.held_out(cursor.step, evaluation)
            ended = _ended(config, budget, cursor, evaluation)
            run.check()
            stop = run.stopping()  # called once: SIGTERM between save and break must not skip the save
            if ended or stop or cursor.step % config.checkpoint.every == 0:
                report.flush()  # the lines that a committed checkpoint covers must be on disk before it
                place = Place(cursor, phase, report.tokens_seen, evaluation, ended)
                with goodput.spending("checkpoint"):
                    _save(run, checkpoints, state, place)
                goodput.record(cursor.step)
            if ended or stop:
                break
    return place


def _restore_or_init(run: Run, checkpoints: Checkpoints) -> tuple[TrainState, Place]:
    restored = checkpoints.restore(lambda about: abstract_state(run.task.at(about["phase"]), run.mesh))
    if restored is not None:
        state, saved = restored
        run.ledger.recover(saved["ledger"])
        cursor = recovery.with_skipped(Cursor.from_dict(saved["cursor"]), run.ledger)
        cursor = cursor.in_phase(run.task.config.place_of(cursor.step)[0])  # one more, if the run was lengthened
        if is_first():
            print(f"continuing from update {cursor.step}", file=sys.stderr)
        return state, Place(cursor, saved["phase"], saved["tokens_seen"], saved["evaluation"])
    place = Place(recovery.with_skipped(Cursor(), run.ledger), 0, 0, {})
    if run.start is None:
        if run.task.config.start.source is not None:
            raise UserError(f"{run.workdir} has no checkpoint left: give the command again, to start anew")
        return init_state(run.task.at(0), run.mesh), place
    state = state_from(run.task.at(0), run.mesh, run.start)
    _save(run, checkpoints, state, place)  # so that what it started from is not needed again
    return state, place


def _save(run: Run, checkpoints: Checkpoints, state: TrainState, place: Place) -> None:
    config, step = run.task.config, place.cursor.step
    # Skipped updates up to here may be the beginning of trouble that is not noticed yet.
    good = recovery.trusted(step - config.rescue.max_skipped + 1, config, run.ledger)
    checkpoints.save(step, state, dataclasses.asdict(place) | {"ledger": run.ledger.entries} | run.about, good)


def _evaluation_due(config: Config, before: Cursor, behind: Cursor) -> bool:
    """Whether to evaluate behind an update: by rows if there is a target, else by updates."""
    if config.target.mlm_accuracy is not None:
        every = config.target.rows_between(config.phases[before.phase].batch_size)
        return before.rows // every < behind.rows // every
    every = config.evaluation.every
    return every > 0 and behind.step % every == 0


def _ended(config: Config, budget: Budget, cursor: Cursor, evaluation: dict[str, float]) -> str:
    """Why the run is over at a cursor with its newest evaluation; empty if it is not."""
    goal = config.target.mlm_accuracy
    if goal is not None and evaluation.get("mlm_accuracy", 0.0) >= goal:
        return "target"
    if cursor.step >= config.total_steps:
        return "steps"
    return "time" if cursor.step >= budget.end else ""


def checked_mesh(task: Task, micro_batch: Asked = None) -> Mesh:
    """The mesh of the task's config, on which all its phases can be trained.

    Raises:
      UserError: see `check_mesh`.
    """
    mesh = make_mesh(task.config.mesh)
    check_mesh(task, mesh, jax.process_count(), micro_batch)
    return mesh


def check_mesh(task: Task, mesh: Mesh | AbstractMesh, processes: int, micro_batch: Asked = None) -> None:
    """See that a task can be trained and scored on a mesh by so many processes.

    Raises:
      UserError: batches that cannot be split, patterns that match no parameter.
    """
    check_processes(mesh, processes)
    check_phases(task, mesh, micro_batch)


def check_phases(task: Task, mesh: Mesh | AbstractMesh, micro_batch: Asked = None) -> None:
    """Raise UserError unless all phases of the task can be trained on the mesh."""
    check_heads(task.config.model, mesh)
    for i, phase in enumerate(task.config.phases):
        accumulation = given(phase, i, mesh, micro_batch) or phase.fewest_micro_batches
        first = phase.batch_size_at(0)  # later ones are multiples of it
        name = "start_batch_size" if phase.start_batch_size else "batch_size"
        check_rows(first, micro_batches_of(phase, first, accumulation), mesh, f"phases.{i}.{name}")
        abstract_state(task.at(i), mesh)  # reads the patterns


def evaluate_newest(task: Task, workdir: StoredPath) -> dict[str, float]:
    """Held-out metrics of the newest intact checkpoint of a run, on the mesh of the task's config.

    Raises:
      UserError: there is none.
    """
    mesh = make_mesh(task.config.mesh)  # training batches need not divide over it
    found = newest(directory_of(workdir))
    if found is None:
        raise UserError(f"{workdir} has no finished checkpoint yet: train it further with bert-jax pretrain")
    task = task.at(read_about(found)["phase"])
    abstract = abstract_state(task, mesh).params
    params = restore_parts(found, {"params": abstract})["params"]
    on_mesh = jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), params, abstract)
    return make_evaluator(task, mesh)(on_mesh)
