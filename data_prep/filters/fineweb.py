"""The rules that FineWeb adds to those of Gopher and C4 (Penedo et al. 2024, arXiv:2406.17557, section 3.6).

The thresholds are those of its code, `FineWebQualityFilter` of datatrove 0.10, with 0.01 for repeated lines where the
paper says 0.1. A line ends with punctuation if its last character ends a sentence in one of the larger scripts, or is a
quotation mark.
"""

import dataclasses
from typing import Annotated

from bert_jax.field_validation import Interval, check
from data_prep.filters.rules import Threshold, Verdict, is_broken, repeated

_END_MARKS = tuple(".!?…\"'”’»。！？｡．」』।॥؟۔։።၊။។៕")


@dataclasses.dataclass(frozen=True)
class FineWeb:
    """Thresholds; None switches a rule off."""

    min_lines_with_end_mark: Threshold | None = 0.12
    """share of the lines that end with punctuation"""
    max_short_lines: Threshold | None = 0.67
    """share of the lines of at most `short_line` characters"""
    short_line: Annotated[int, Interval("[1, 10000]")] = 30
    max_repeated_line_characters: Threshold | None = 0.01
    """share of the characters in lines that occurred before"""
    max_line_ends: Annotated[float, Interval("[0, 1000]")] | None = 0.3
    """line ends per word; lists have many"""

    def __post_init__(self):
        check(self, "fineweb.")

    def judge(self, text: str, _language: str) -> Verdict:
        """The verdict on a text that is not empty."""
        lines = [line for line in text.split("\n") if line]
        number = len(lines)
        measures = (
            ("min_lines_with_end_mark", sum(line.endswith(_END_MARKS) for line in lines) / number),
            ("max_short_lines", sum(len(line) <= self.short_line for line in lines) / number),
            ("max_repeated_line_characters", repeated(lines)[1] / sum(map(len, lines))),
            ("max_line_ends", text.count("\n") / len(text.split())),
        )
        return Verdict(text, next((rule for rule, value in measures if is_broken(self, rule, value)), None))
