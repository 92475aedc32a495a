"""What a check of `bert-jax doctor` found."""

from typing import Any, Literal, NamedTuple


class Line(NamedTuple):
    """One finding: for a person as text, for a script as values."""

    level: Literal["ok", "warning", "error"]
    """An error means that `bert-jax pretrain` would refuse the run, or that what it promises does not hold."""
    name: str
    """What was looked at, in one word."""
    text: str
    """What was found, in figures, and what to do if it is not ok."""
    values: dict[str, Any]
    """The same as plain values; shares are in [0, 1]."""

    def __str__(self) -> str:
        return f"{self.level:<7}  {self.name:<10}  {self.text}"
