"""The place in the training stream."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cursor:
    """Where the next update reads. It is all that is needed to resume: nothing is replayed."""

    step: int = 0
    """Updates done."""
    phase: int = 0
    """Phase of the next update."""
    epoch: int = 0
    """Epoch of the next row; a phase starts with an epoch of its own."""
    row: int = 0
    """Rows of this epoch already consumed."""
