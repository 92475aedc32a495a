"""Computations on more rows than fit into memory: steps, between which chunks of rows are grouped by a number.

The first step reads ranges of rows. A chunk is sent to a group, and the next step gets the chunks of one group at a
time. So it is known which rows must be in memory together, and an engine decides where they are in between: in files
on one machine, or in the shuffle of a cluster (`data_prep.builder.engines`). Chunks have the same order on all engines:
that of the keys of the calls that sent them, then that of sending.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

Chunk = tuple[np.ndarray, ...]


class Step(Protocol):
    """A step; picklable, and small, because it is sent to the workers."""

    def __call__(self, key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
        """Yields (group of the next step, chunk).

        Args:
          key: in the first step, which rows to read; in the others, the group.
          chunks: of the group, in order; read lazily, once. Empty in the first step.
        """


@dataclasses.dataclass(frozen=True)
class GroupedSteps:
    """Steps, and the keys of their calls."""

    name: str
    """what is found: shown to the user, and part of names of files"""
    passes: Sequence[range]
    """keys of the first step, ascending. The output of a pass needs to exist only until its second step has ended, so
    several passes need less space at a time; it is all the same to the result"""
    steps: Sequence[Step]
    groups: Sequence[int]
    """number of groups of each step after the first"""


RunSteps = Callable[[GroupedSteps], Iterator[Chunk]]
"""Runs steps, and yields the chunks of the last one, by group and in order."""


class RowReader(Protocol):
    """Reads rows in ranges; picklable and small."""

    starts: np.ndarray
    """first row of each range, and the end of the last one, int64 [ranges + 1]"""

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rows to consider, bool [n]; values, [n, values of a row]) of a range."""


def num_groups(rows: int, rows_per_group: int) -> int:
    """Groups for rows that are distributed by hash."""
    return max(-(-rows // rows_per_group), 1)
