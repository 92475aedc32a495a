"""Runs a build in processes of this machine."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from bert_jax.command.progress import progress_bar
from data_prep.builder.engines import Engine, IndexedInput
from data_prep.builder.engines.sorted_runs import count_calls, run_in_files
from data_prep.builder.prepare import BlockPreparer, PrepareJob, prepare_input
from data_prep.builder.write_shards import Assembler
from data_prep.duplicates.grouped_steps import Chunk, GroupedSteps
from data_prep.parallel import SharedProgress, WorkerPool

DEFAULT_MEMORY_BYTES = 256 << 20
"""of each worker, for grouped steps"""
_FEW_CALLS = 20
"""of grouped steps, which need no progress bar"""

_preparer: BlockPreparer | None = None
_progress: SharedProgress | None = None


class LocalEngine(Engine):
    """`workers` processes read the input and do the rest; with one worker, this process does everything."""

    def __init__(self, workers: int = 1, memory_bytes: int | None = None):
        """`memory_bytes` of all workers together is used for grouped steps, in addition to their libraries."""
        self.memory_bytes = memory_bytes // workers if memory_bytes else DEFAULT_MEMORY_BYTES
        self.workers = workers
        self._stack = contextlib.ExitStack()
        self._workers: WorkerPool | None = None

    def __exit__(self, *error) -> None:
        self._stack.__exit__(*error)  # workers stop after an exception

    def prepare(self, job: PrepareJob, inputs: Sequence[IndexedInput]) -> None:
        """Phase 1; each worker has one input, and a block of it in memory."""
        progress = SharedProgress()
        self._workers = self._stack.enter_context(WorkerPool(self.workers, _initialize, (job, progress)))
        with progress.shown("preparing", sum(part.size for _, _, part in inputs)):
            for _ in self._workers.map_unordered(_prepare, inputs, _origin):
                pass

    def run_steps(self, steps: GroupedSteps, scratch: str, local: pathlib.Path) -> Iterator[Chunk]:
        """Phase 2: chunks are in files of this machine between two steps."""
        if self._workers is None:
            self._workers = self._stack.enter_context(WorkerPool(self.workers, _initialize, (None, None)))
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


def _origin(place: IndexedInput) -> str:
    return place[2].origin


def _initialize(job: PrepareJob | None, progress: SharedProgress | None) -> None:
    global _preparer, _progress
    _preparer, _progress = BlockPreparer(job) if job else None, progress


def _prepare(place: IndexedInput) -> None:
    for size in prepare_input(_preparer, *place):
        _progress.add(size)
