"""The place in the training stream. It is all that is needed to resume: nothing is replayed."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bert_jax.config import Config


@dataclass(frozen=True)
class Position:
    """The next row of one corpus."""

    epoch: int = 0
    """Epochs of this corpus done; a phase starts with an epoch of its own."""
    window: int = 0
    """Windows of the epoch done (data/epoch_plan.py)."""
    row: int = 0
    """Rows of the window done."""


@dataclass(frozen=True)
class Cursor:
    """Where the next update reads."""

    step: int = 0
    """Updates done."""
    phase: int = 0
    """Phase of the next update."""
    rows: int = 0
    """Rows passed, with or without an update; says whose turn it is in a mixture."""
    positions: tuple[Position, ...] = ()
    """Of each corpus; empty at the very start."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Intervals [first, last) of rows that are passed over without an update; each lies within a phase."""

    def skipping(self, first: int, last: int) -> "Cursor":
        """This place with one more interval of rows to pass over, for going back before updates that did harm:
        from `rows` of the cursor before the first of them to `rows` of the cursor behind the last.
        """
        return dataclasses.replace(self, skipped=(*self.skipped, (first, last)))

    def in_phase(self, phase: int) -> "Cursor":
        """This cursor, or where a later phase begins here: it opens an epoch of its own, unless one has just ended."""
        if phase == self.phase:
            return self
        opened = [Position(position.epoch + (position != Position(position.epoch))) for position in self.positions]
        return dataclasses.replace(self, phase=phase, positions=tuple(opened))

    def behind_skipped(self) -> int:
        """`rows`, or where the intervals to be passed over end that they lie in."""
        rows = self.rows
        for first, last in sorted(self.skipped):
            if first <= rows < last:
                rows = last
        return rows

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Cursor":
        """Inverse of ``dataclasses.asdict``, also after a way through JSON."""
        return cls(
            **values
            | {
                "positions": tuple(Position(**position) for position in values["positions"]),
                "skipped": tuple((first, last) for first, last in values["skipped"]),
            }
        )


def batch_size(config: Config, cursor: Cursor) -> int:
    """Rows of the global batch at a cursor."""
    phase, done = config.locate_step(cursor.step)
    return config.phases[phase].batch_size_at(done)


def count_rows(config: Config, cursor: Cursor, step: int) -> int:
    """`rows` of the cursor before update `step`, counted on from an earlier cursor; nothing is planned for it."""
    cursor = dataclasses.replace(cursor, rows=cursor.behind_skipped())
    while cursor.step < step:
        rows = cursor.rows + batch_size(config, cursor)
        cursor = dataclasses.replace(cursor, rows=rows, step=cursor.step + 1)
        cursor = dataclasses.replace(cursor, rows=cursor.behind_skipped())
    return cursor.rows
