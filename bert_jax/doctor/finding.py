"""Result of a check of `bert-jax doctor`."""

from typing import Any, Literal, NamedTuple


class Finding(NamedTuple):
    """One finding: as text for people, as values for scripts."""

    level: Literal["ok", "warning", "error"]
    """An error means that `bert-jax pretrain` would refuse the run, or that a documented guarantee does not hold."""
    name: str
    """What was checked, in one word."""
    text: str
    """The finding with its figures, and a remedy unless the level is ok."""
    values: dict[str, Any]
    """The same as plain values; shares are in [0, 1]."""

    def __str__(self) -> str:
        return f"{self.level:<7}  {self.name:<10}  {self.text}"
