"""Runs a build in processes of this machine."""

import dataclasses
from collections.abc import Iterator, Sequence

import tqdm

from bert_jax.progress import progress
from data_prep.assemble import Assembler
from data_prep.engines import PlacedInput
from data_prep.parallel import ordered_map
from data_prep.prepare import Job, Preparer, Task, cut

_preparer: Preparer | None = None


@dataclasses.dataclass(frozen=True)
class LocalEngine:
    """This process reads and cuts, `workers` processes do the rest; with one worker, this process does all."""

    workers: int = 1

    def prepare(self, job: Job, inputs: Sequence[PlacedInput]) -> None:
        """Phase 1; a few blocks for each worker are in memory at a time."""
        with progress("preparing", sum(part.size for _, _, part in inputs), "B") as bar:
            sizes = ordered_map(_prepare, _tasks(job, inputs, bar), self.workers, _origin, _initialize, (job,))
            for size in sizes:
                bar.update(size)

    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3, a shard at a time in each worker."""
        with progress("writing", len(plans), "shard") as bar:
            workers = min(self.workers, len(plans))
            for _ in ordered_map(assembler, plans, workers, str, _nothing, ()):
                bar.update()


def _tasks(job: Job, inputs: Sequence[PlacedInput], bar: tqdm.tqdm) -> Iterator[Task]:
    for source, index, part in inputs:
        for task in cut(job, source, index, part):
            if task.done:
                bar.update(task.block.size)
            else:
                yield task


def _origin(task: Task) -> str:
    return task.block.origin


def _initialize(job: Job) -> None:
    global _preparer
    _preparer = Preparer(job)


def _prepare(task: Task) -> int:
    _preparer(task)
    return task.block.size


def _nothing() -> None:
    """Workers that write shards need no preparation."""
