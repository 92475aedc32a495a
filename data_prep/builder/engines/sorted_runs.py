"""Runs grouped steps in processes of this machine; chunks between two steps are in files.

A call of a step writes files (runs) in which the chunks are sorted by group. The next step reads the chunks of its
group from all runs, in the order of their names. So nothing is sorted but the chunks of one run.
"""

import dataclasses
import io
import os
import pathlib
import pickle
import shutil
from collections.abc import Iterator

import numpy as np
import tqdm

from data_prep.duplicates.grouped_steps import Chunk, GroupedSteps, Step
from data_prep.parallel import WorkerPool

_SUFFIX = ".run"


def run_in_files(
    pool: WorkerPool, steps: GroupedSteps, directory: pathlib.Path, memory_bytes: int, bar: tqdm.tqdm
) -> Iterator[Chunk]:
    """Yields the chunks of the last step.

    Args:
      pool: the workers.
      steps: what to run.
      directory: an empty one, local.
      memory_bytes: of one worker, of which an eighth is used for chunks that are not written yet.
      bar: counts calls, see `count_calls`.
    """

    def run(number: int, keys: range, first_name: int, source: str | None) -> None:
        target = directory / f"step-{number}"
        target.mkdir(parents=True, exist_ok=True)
        groups = steps.groups[number] if number < len(steps.groups) else 1
        call = _Call(steps.steps[number], directory / source if source else None, target, groups, memory_bytes // 8)
        tasks = (_Task(call, key, first_name + key) for key in keys)
        for _ in pool.map_unordered(_run, tasks, lambda task: f"{steps.name}, group {task.key}"):
            bar.update()
        if source:
            shutil.rmtree(directory / source)

    for index, keys in enumerate(steps.passes):
        run(0, keys, 0, None)
        run(1, range(steps.groups[0]), index * steps.groups[0], "step-0")
    for number in range(2, len(steps.steps)):
        run(number, range(steps.groups[number - 1]), 0, f"step-{number - 1}")
    yield from read_group(directory / f"step-{len(steps.steps) - 1}", 0)


def count_calls(steps: GroupedSteps) -> int:
    """Number of calls of all steps."""
    return sum(map(len, steps.passes)) + len(steps.passes) * steps.groups[0] + sum(steps.groups[1:])


@dataclasses.dataclass(frozen=True)
class _Call:
    step: Step
    source: pathlib.Path | None
    """directory with the runs of the step before"""
    target: pathlib.Path
    groups: int
    buffer_bytes: int


@dataclasses.dataclass(frozen=True)
class _Task:
    call: _Call
    key: int
    name: int
    """of its runs: ascending in the order of the calls"""


def _run(task: _Task) -> None:
    call = task.call
    chunks = read_group(call.source, task.key) if call.source else iter(())
    writer = _RunWriter(call.target, task.name, call.groups, call.buffer_bytes)
    for group, chunk in call.step(task.key, chunks):
        writer.add(group, chunk)
    writer.flush()


class _RunWriter:
    """Collects chunks, and writes them as runs: int64 [groups + 1] with the place of each group, then the chunks."""

    def __init__(self, directory: pathlib.Path, name: int, groups: int, buffer_bytes: int):
        self._prefix = directory / f"{name:010d}"
        self._groups = groups
        self._room = self._buffer_bytes = buffer_bytes
        self._chunks: dict[int, list[bytes]] = {}
        self._runs = 0

    def add(self, group: int, chunk: Chunk) -> None:
        """Adds a chunk for a group."""
        data = pickle.dumps(chunk, 5)
        self._chunks.setdefault(group, []).append(data)
        self._room -= len(data)
        if self._room < 0:
            self.flush()

    def flush(self) -> None:
        """Writes a run, if there are chunks."""
        if not self._chunks:
            return
        offsets = np.zeros(self._groups + 1, np.int64)
        for group, chunks in self._chunks.items():
            offsets[group + 1] = sum(map(len, chunks))
        offsets = np.cumsum(offsets) + offsets.nbytes
        with open(f"{self._prefix}-{self._runs:06d}{_SUFFIX}", "wb") as file:  # noqa: PTH123 (buffered, and fast)
            file.write(offsets.tobytes())
            for group in sorted(self._chunks):
                file.writelines(self._chunks[group])
        self._runs += 1
        self._room, self._chunks = self._buffer_bytes, {}


def read_group(directory: pathlib.Path, group: int) -> Iterator[Chunk]:
    """The chunks of a group, in order; one run at a time is in memory."""
    for name in sorted(os.listdir(directory)):  # noqa: PTH208 (faster)
        file = os.open(directory / name, os.O_RDONLY)
        try:
            begin, end = np.frombuffer(os.pread(file, 16, 8 * group), np.int64).tolist()
            chunks = io.BytesIO(os.pread(file, end - begin, begin))
        finally:
            os.close(file)
        while chunks.tell() < end - begin:
            yield pickle.load(chunks)
