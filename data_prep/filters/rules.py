"""What the families of rules share: the verdict on a document, and comparisons with thresholds."""

import dataclasses
from typing import Annotated

from bert_jax.errors import UserError
from bert_jax.field_validation import Interval

Threshold = Annotated[float, Interval("[0, 1]")]


@dataclasses.dataclass
class Verdict:
    """What a family decides on a document, or on a part of a long one."""

    text: str
    """what is left of it"""
    rule: str | None = None
    """the rule that removes the document, the name of a threshold; None: it is kept"""
    lines: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """each removed line, after its rule"""
    mixed: bool = False
    """whether it is in several languages"""


def check_order(rules: object, family: str, low: str, high: str) -> None:
    """Raises UserError if no value satisfies a lower and an upper threshold."""
    least, most = getattr(rules, low), getattr(rules, high)
    if least is not None and most is not None and least > most:
        raise UserError(f"{family}.{low} is {least:g} and {family}.{high} is {most:g}: no document satisfies both")


def is_broken(rules: object, rule: str, value: float) -> bool:
    """Whether a value is below the threshold of a rule `min_...`, or above that of another one; None: no rule."""
    threshold = getattr(rules, rule)
    return threshold is not None and (value < threshold if rule.startswith("min_") else value > threshold)


def repeated(pieces: list[str]) -> tuple[int, int]:
    """Number and characters of the pieces that occurred before."""
    different = set(pieces)
    return len(pieces) - len(different), sum(map(len, pieces)) - sum(map(len, different))
