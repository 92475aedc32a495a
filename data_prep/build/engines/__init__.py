"""Engines run the phases of a build: in processes of this machine (`local`), or on a cluster (`beam`).

An earlier run may have done part of the work of either phase.
"""

import abc
import contextlib
from collections.abc import Sequence

from data_prep.build.prepare import PrepareJob
from data_prep.build.write_shards import Assembler
from data_prep.sources.base import Input

IndexedInput = tuple[int, int, Input]
"""Index of the source, index within the source, the input"""


class Engine(contextlib.AbstractContextManager):
    """Runs the tasks of one build; a context manager."""

    def __exit__(self, *error) -> None:
        """Releases the workers."""

    @abc.abstractmethod
    def prepare(self, job: PrepareJob, inputs: Sequence[IndexedInput]) -> None:
        """Phase 1: prepares every block of every input."""

    @abc.abstractmethod
    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3: writes the shard of every plan."""
