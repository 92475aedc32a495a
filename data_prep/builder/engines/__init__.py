"""Engines run the phases of a build: in processes of this machine (`local`), or on a cluster (`beam`).

An earlier run may have done part of the work of phase 1 or 3.
"""

import abc
import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from data_prep.builder.prepare import PrepareJob
from data_prep.builder.write_shards import Assembler
from data_prep.duplicates.grouped_steps import Chunk, GroupedSteps
from data_prep.sources.base import Input

IndexedInput = tuple[int, int, Input]
"""Index of the source, index within the source, the input"""


class Engine(contextlib.AbstractContextManager):
    """Runs the tasks of one build; a context manager."""

    memory_bytes: int
    """that a worker uses for grouped steps, in addition to its libraries"""
    workers: int
    """processes of this machine that read evaluation texts"""

    def __exit__(self, *error) -> None:
        """Releases the workers."""

    @abc.abstractmethod
    def prepare(self, job: PrepareJob, inputs: Sequence[IndexedInput]) -> None:
        """Phase 1: prepares every block of every input."""

    @abc.abstractmethod
    def run_steps(self, steps: GroupedSteps, scratch: str, local: pathlib.Path) -> Iterator[Chunk]:
        """Phase 2: yields the chunks of the last step, by group and in order.

        Args:
          steps: grouped steps; what their readers read must be where all workers can read it.
          scratch: the scratch directory, for files that workers on other machines write.
          local: a directory of this machine, for other files.
        """

    @abc.abstractmethod
    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3: writes the shard of every plan."""
