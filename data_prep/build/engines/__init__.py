"""Who runs the phases of a build: processes of this machine (`local`), or a cluster (`beam`).

An engine has two methods, both of which may find part of the work done by an earlier run:

- `prepare(job, inputs)`: every input is cut to its end, and every block of it has its unit.
- `assemble(assembler, plans)`: the shard of every plan is written.
"""

import abc
import contextlib
from collections.abc import Sequence

from data_prep.build.assemble import Assembler
from data_prep.build.prepare import PrepareJob
from data_prep.sources.base import Input

IndexedInput = tuple[int, int, Input]
"""Index of the source, index in the source, the input"""


class Engine(contextlib.AbstractContextManager):
    """Runs the tasks of a build; entered for the time of one build."""

    def __exit__(self, *error) -> None:
        """Lets go of what it holds."""

    @abc.abstractmethod
    def prepare(self, job: PrepareJob, inputs: Sequence[IndexedInput]) -> None:
        """Phase 1."""

    @abc.abstractmethod
    def assemble(self, assembler: Assembler, plans: Sequence[str]) -> None:
        """Phase 3."""
