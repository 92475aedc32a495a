"""Runs a build in processes of this machine."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

import tqdm

from bert_jax.progress import progress_bar
from data_prep.build.engines import Engine, IndexedInput
from data_prep.build.engines.run_files import count_calls, run_in_files
from data_prep.build.prepare import BlockPreparer, PrepareJob, Task, block_tasks
from data_prep.build.write_shards import Assembler
from data_prep.duplicates.grouped_steps import Chunk, GroupedSteps
from data_prep.parallel import WorkerPool

DEFAULT_MEMORY_BYTES = 256 << 20
"""of each worker, for grouped steps"""
_FEW_CALLS = 20
"""of grouped steps, which need no progress bar"""
_preparer: BlockPreparer | None = None


class LocalEngine(Engine):
    """This process reads and splits the input, `workers` processes do the rest; with one worker, it does everything."""

    def __init__(self, workers: int = 1, memory_bytes: int | None = None):
        """`memory_bytes` of all workers together is used for grouped steps, in addition to their libraries."""
        self.memory_bytes = memory_bytes // workers if memory_bytes else DEFAULT_MEMORY_BYTES
        self._count = workers
        self._stack = contextlib.ExitStack()
        self._workers: WorkerPool | None = None

    def __exit__(self, *error) -> None:
        self._stack.close()

    def prepare(self, job: PrepareJob, inputs: Sequence[IndexedInput]) -> None:
        """Phase 1; a few blocks per worker are in memory at a time."""
        self._workers = self._stack.enter_context(WorkerPool(self._count, _initialize, (job,)))
        with progress_bar("preparing", sum(part.size for _, _, part in inputs), "B") as bar:
            for size in self._workers.map(_prepare, _tasks(job, inputs, bar), _origin):
                bar.update(size)

    def run_steps(self, steps: GroupedSteps, scratch: str, local: pathlib.Path) -> Iterator[Chunk]:
        """Phase 2: chunks are in files of this machine between two steps."""
        if self._workers is None:
            self._workers = self._stack.enter_context(WorkerPool(self._count, _initialize, (None,)))
        with (
            tempfile.TemporaryDirectory(prefix=f"{steps.name}-", dir=local) as directory,
            progress_bar(steps.name, count_calls(steps), "group", shown=count_calls(steps) > _FEW_CALLS) as bar,
        ):
            yield from run_in_files(self._workers, steps, pathlib.Path(directory), self.memory_bytes, bar)

    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3; each worker writes one shard at a time."""
        with progress_bar("writing", len(plans), "shard") as bar:
            for _ in self._workers.map(assembler, plans, str):
                bar.update()


def _tasks(job: PrepareJob, inputs: Sequence[IndexedInput], bar: tqdm.tqdm) -> Iterator[Task]:
    for source, index, part in inputs:
        for task in block_tasks(job, source, index, part):
            if task.done:
                bar.update(task.block.size)
            else:
                yield task


def _origin(task: Task) -> str:
    return task.block.origin


def _initialize(job: PrepareJob | None) -> None:
    global _preparer
    _preparer = BlockPreparer(job) if job else None


def _prepare(task: Task) -> int:
    _preparer(task)
    return task.block.size
