"""Quantities of results with axis, unit and baselines, as curves, maps, tables and numbers over checkpoints."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.analysis.suite import Scalar
from bert_jax.report import Curves, Heatmap, Series, Table
from bert_jax.report.cells import cell

STATE, LAYER = "hidden state (0: embeddings)", "layer (from 0)"
RANDOM = "random weights"
Numbers = Sequence[float | None] | np.ndarray
"""Of a saved result; None where a number is undefined."""


class Quantity(NamedTuple):
    """A quantity along an axis, and what it is compared with."""

    title: str
    unit: str
    """Or what the values are, e.g. "accuracy"."""
    lines: Mapping[str, Numbers]
    """By name; the first one is the model's."""
    baselines: Mapping[str, Numbers | float | None] = {}
    """By name, along the axis, or one number everywhere; None: undefined."""
    axis: str = STATE
    """What the indices of the values are."""
    log: bool = False
    """Whether the values are drawn on a logarithmic scale."""
    same_colors: bool = False
    """Whether the baselines are those of the lines one by one, each in its line's color."""

    def curves(self) -> Curves:
        """The lines, and the baselines dashed."""
        x = tuple(range(len(next(iter(self.lines.values())))))
        drawn = [Series(name, x, floats(values)) for name, values in self.lines.items()]
        for i, (name, values) in enumerate(self.baselines.items()):
            if values is not None:
                along = floats(values) if np.iterable(values) else (values,) * len(x)
                drawn.append(Series(name, x, along, dashed=True, color=i if self.same_colors else None))
        return Curves(self.title, tuple(drawn), self.axis, self.unit, log_y=self.log)

    def at(self, index: int, factor: float = 1) -> Scalar:
        """The model's value at an index of the axis, beside the baselines there."""
        values = next(iter(self.lines.values()))
        there = {name: one[index] if np.iterable(one) else one for name, one in self.baselines.items()}
        return compared(values[index], there, factor)


def compared(value: float | None, baselines: Mapping[str, float | None], factor: float = 1) -> Scalar:
    """A number over checkpoints; baselines that are undefined are left out."""
    shown = {name: factor * one for name, one in baselines.items() if is_finite(one)}
    return Scalar(factor * value if is_finite(value) else math.nan, shown)


def by_head(title: str, values: Sequence[Numbers] | np.ndarray, unit: str, center: float | None = None) -> Heatmap:
    """Values by layer and head."""
    rows = tuple(map(floats, values))
    layers, heads = (tuple(map(str, range(size))) for size in (len(rows), len(rows[0])))
    return Heatmap(title, rows, layers, heads, "layer", "head", unit, center)


def by_index(
    header: Sequence[str], columns: Sequence[Sequence[str]], more: Sequence[str] = (), *, words: bool = False
) -> Table:
    """A table with a row for each state or layer, from its columns.

    Args:
      header: of the indices and of the columns.
      columns: texts; those that end early are empty below.
      more: first cells of the rows after the last index.
      words: as of `Table`.
    """
    indices = [*map(str, range(max(map(len, columns)) - len(more))), *more]
    return Table(tuple(header), tuple(itertools.zip_longest(indices, *columns, fillvalue="")), words)


def cells(values: Iterable[float | None], form: str = ".3f", factor: float = 1) -> list[str]:
    """Numbers as text, empty where they are undefined."""
    return [cell(None if value is None else factor * value, form, "") for value in values]


def paired(values: Numbers, beside: Numbers) -> list[str]:
    """Numbers as text, each with that of a baseline in brackets."""
    return [f"{one} ({other})" for one, other in zip(cells(values), cells(beside), strict=True)]


def floats(values: Numbers) -> tuple[float, ...]:
    """NaN for None."""
    return tuple(math.nan if value is None else float(value) for value in values)


def is_finite(value: float | None) -> bool:
    """Whether a number of a result is defined."""
    return value is not None and math.isfinite(value)
