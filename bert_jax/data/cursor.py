"""The position in the training stream. It is all that a resume needs: no batch is replayed."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax import field_validation
from bert_jax.config import Config


@dataclass(frozen=True)
class CorpusPosition:
    """The next row of one corpus."""

    epoch: int = 0
    """Completed epochs of this corpus; every phase starts a new epoch."""
    window: int = 0
    """Completed windows of the epoch (data/epoch_plan.py)."""
    row: int = 0
    """Completed rows of the window."""


@dataclass(frozen=True)
class Cursor:
    """The position that the next step reads from."""

    step: int = 0
    """Completed steps."""
    phase: int = 0
    """Phase of the next step."""
    rows: int = 0
    """Rows read or skipped so far; in a mixture it determines which corpus the next row comes from."""
    positions: tuple[CorpusPosition, ...] = ()
    """Of each corpus; empty at the start of the run."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Intervals [first, last) of rows that no step uses; each lies within one phase."""

    def skipping_rows(self, first: int, last: int) -> "Cursor":
        """This cursor with one more interval of rows to skip, to go back before steps at which training diverged.

        The interval extends from `rows` of the cursor before the first of these steps to `rows` of the cursor after
        the last.
        """
        return dataclasses.replace(self, skipped=(*self.skipped, (first, last)))

    def in_phase(self, phase: int) -> "Cursor":
        """This cursor in `phase`. A later phase starts a new epoch of each corpus, unless one has just ended."""
        if phase == self.phase:
            return self
        positions = [
            CorpusPosition(position.epoch + (position != CorpusPosition(position.epoch))) for position in self.positions
        ]
        return dataclasses.replace(self, phase=phase, positions=tuple(positions))

    def row_after_skipped(self) -> int:
        """`rows`, or the end of the skipped intervals that contain it."""
        rows = self.rows
        for first, last in sorted(self.skipped):
            if first <= rows < last:
                rows = last
        return rows

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Cursor":
        """Inverse of ``dataclasses.asdict``; also of its JSON form, in which tuples are lists."""
        return field_validation.from_json(cls, values, "cursor")


def batch_size(config: Config, cursor: Cursor) -> int:
    """Rows of the global batch at a cursor."""
    phase, done = config.locate_step(cursor.step)
    return config.phases[phase].batch_size_at(done)


def rows_before_step(config: Config, cursor: Cursor, step: int) -> int:
    """`rows` of the cursor before `step`, counted from an earlier cursor without planning any window."""
    cursor = dataclasses.replace(cursor, rows=cursor.row_after_skipped())
    while cursor.step < step:
        rows = cursor.rows + batch_size(config, cursor)
        cursor = dataclasses.replace(cursor, rows=rows, step=cursor.step + 1)
        cursor = dataclasses.replace(cursor, rows=cursor.row_after_skipped())
    return cursor.rows
