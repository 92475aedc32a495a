"""train(task): build, restore, then step, log, evaluate and save until the run is done."""

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from bert_jax.training.checkpoint import Checkpoints, directory_of, restore_params, verified
from bert_jax.training.reporter import Reporter
from bert_jax.training.sharding import check_processes, check_rows, make_mesh, put_rows
from bert_jax.training.state import TrainState, abstract_state, init_state
from bert_jax.training.step import make_eval_step, make_train_step
from bert_jax.training.task import Params, Task


@dataclass(frozen=True)
class Place:
    """Where a run stands; saved with every checkpoint."""

    cursor: Cursor
    """What the next update reads."""
    tokens_seen: int
    """Real tokens in all updates so far."""
    evaluation: dict[str, float]
    """Newest held-out metrics."""


def train(task: Task, workdir: Path, about: dict[str, Any], profile: tuple[int, int] | None = None) -> Place:
    """Run the task to its end, from its newest intact checkpoint if there is one.

    On SIGTERM the run is saved after the current update and this returns; the same call continues it.

    Args:
      task: what to train.
      workdir: of the run, claimed for it (workdir.claim).
      about: JSON values to keep in every checkpoint.
      profile: write a trace of updates [first, last) to workdir/profile.

    Returns:
      where the run stands; it is finished if the cursor's step is the config's total.

    Raises:
      UserError: a batch that the mesh cannot split, a loss that is not finite, damaged checkpoints.
    """
    config, mesh = task.config, checked_mesh(task)
    compiled: dict[tuple[int, int], Any] = {}  # by phase and rows: each has its own shapes
    evaluate = make_evaluator(task, mesh)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(directory_of(workdir), config.checkpoint.keep))
        state, place = _restore_or_init(task, mesh, checkpoints)
        cursor, evaluation = place.cursor, place.evaluation
        devices = list(mesh.devices.flat)
        report = stack.enter_context(Reporter(task, workdir, devices, cursor.step, place.tokens_seen, profile))
        stopping = stack.enter_context(_sigterm())
        batches = stack.enter_context(contextlib.closing(task.batches(cursor)))
        for rows, size, following in report.timed(batches):
            phase, shapes = config.phases[cursor.phase], (cursor.phase, size)
            report.before(cursor.step)
            batch = put_rows(rows, mesh, size)
            if shapes not in compiled:
                train_step = make_train_step(task, mesh, phase.accumulation_of(size))
                compiled[shapes] = train_step.lower(state, batch).compile()
            with jax.transfer_guard("disallow"):
                state, metrics = compiled[shapes](state, batch)
            report.push(following.step, size * phase.seq_len, metrics)
            cursor = following
            last = cursor.step == config.total_steps
            if last or _due(cursor.step, config.evaluation.every):
                report.flush()
                evaluation = evaluate(state.params)
                report.held_out(cursor.step, evaluation)
            stop = stopping.is_set()  # asked once: SIGTERM between save and break must not skip the save
            if last or stop or _due(cursor.step, config.checkpoint.every):
                report.flush()  # the lines that a committed checkpoint covers must be on disk before it
                place = Place(cursor, report.tokens_seen, evaluation)
                checkpoints.save(cursor.step, state, dataclasses.asdict(place) | about)
            if stop:
                break
    return place


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def checked_mesh(task: Task) -> Mesh:
    """The mesh of the task's config, on which all its batches can be split (else UserError)."""
    mesh = make_mesh(task.config.mesh)
    check_processes(mesh)
    for i, phase in enumerate(task.config.phases):
        first = phase.batch_size_at(0)  # later ones are multiples of it
        name = "start_batch_size" if phase.start_batch_size else "batch_size"
        check_rows(first, phase.accumulation_of(first), mesh, f"phases.{i}.{name}")
    check_rows(task.config.evaluation.batch_size, 1, mesh, "evaluation.batch_size")
    return mesh


def _restore_or_init(task: Task, mesh: Mesh, checkpoints: Checkpoints) -> tuple[TrainState, Place]:
    restored = checkpoints.restore(abstract_state(task, mesh))
    if restored is None:
        return init_state(task, mesh), Place(Cursor(), 0, {})
    state, saved = restored
    place = Place(Cursor.from_dict(saved["cursor"]), saved["tokens_seen"], saved["evaluation"])
    print(f"continuing from update {place.cursor.step}", file=sys.stderr)
    return state, place


def make_evaluator(task: Task, mesh: Mesh) -> Callable[[Params], dict[str, float]]:
    """Held-out metrics as a function of parameters that are on the mesh."""
    eval_step = make_eval_step(task, mesh)
    rows = task.config.evaluation.batch_size

    def evaluate(params: Params) -> dict[str, float]:
        return task.evaluate(lambda batch: jax.device_get(eval_step(params, put_rows(batch, mesh, rows))))

    return evaluate


def evaluate_newest(task: Task, workdir: Path) -> dict[str, float]:
    """Held-out metrics of the newest intact checkpoint of a run.

    Raises:
      UserError: there is none.
    """
    mesh = checked_mesh(task)
    found = verified(directory_of(workdir))
    if found is None:
        raise UserError(f"{workdir} has no finished checkpoint yet: train it further with bert-jax pretrain")
    abstract = abstract_state(task, mesh).params
    params = restore_params(found, abstract)
    on_mesh = jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), params, abstract)
    return make_evaluator(task, mesh)(on_mesh)


@contextlib.contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process."""
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
