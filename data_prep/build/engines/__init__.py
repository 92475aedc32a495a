"""Engines run the phases of a build: in processes of this machine (`local`), or on a cluster (`beam`).

An engine has two methods. An earlier run may have done part of the work of either:

- `prepare(job, inputs)` prepares every block of every input.
- `assemble(assembler, plans)` writes the shard of every plan.
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
        """Phase 1."""

    @abc.abstractmethod
    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3."""
