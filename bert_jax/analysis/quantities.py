"""Quantities of results with axis, unit and baselines, as curves, maps, tables and numbers over checkpoints."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.item_scores import MODEL, interval
from bert_jax.analysis.suite import UNCERTAINTY, Scalar
from bert_jax.report import Curves, Heatmap, Series, Table
from bert_jax.report.cells import cell

STATE, LAYER = "hidden state (0: embeddings)", "layer (from 0)"
RANDOM = "random weights"
Numbers = Sequence[float | None] | np.ndarray
"""Of a saved result; None where a number is undefined."""
Means = Mapping[str, Sequence[float | None]]
"""`bootstrap.BootstrapMean` in a saved result: value, low and high along an axis."""


class Quantity(NamedTuple):
    """A quantity along an axis, and what it is compared with."""

    title: str
    unit: str
    """Or what the values are, e.g. "accuracy"."""
    lines: Mapping[str, Numbers | Means]
    """By name; the first one is the model's."""
    baselines: Mapping[str, Numbers | Means | float | None] = {}
    """By name, along the axis, or one number everywhere; None: undefined."""
    axis: str = STATE
    """What the indices of the values are."""
    log: bool = False
    """Whether the values are drawn on a logarithmic scale."""
    same_colors: bool = False
    """Whether the baselines are those of the lines one by one, each in its line's color."""

    def curves(self) -> Curves:
        """The lines with bands of their intervals, and the baselines dashed."""
        x = tuple(range(len(values_of(next(iter(self.lines.values()))))))
        drawn = []
        for name, line in self.lines.items():
            ends = [floats(line[end]) for end in ("low", "high")] if isinstance(line, Mapping) else ()
            drawn.append(Series(name, x, floats(values_of(line)), *ends))
        for i, (name, line) in enumerate(self.baselines.items()):
            if line is not None:
                along = floats(values_of(line)) if np.iterable(line) else (line,) * len(x)
                drawn.append(Series(name, x, along, dashed=True, color=i if self.same_colors else None))
        return Curves(self.title, tuple(drawn), self.axis, self.unit, log_y=self.log)

    def at(self, index: int, factor: float = 1) -> Scalar:
        """The model's value at an index of the axis, beside the baselines there."""
        line = next(iter(self.lines.values()))
        there = {name: values_of(one)[index] if np.iterable(one) else one for name, one in self.baselines.items()}
        if not isinstance(line, Mapping):
            return compared(line[index], there, factor)
        return scalar_of_mean({key: values[index] for key, values in line.items()}, there, factor)


def values_of(line: Numbers | Means) -> Numbers:
    """The numbers of a line, without their intervals."""
    return line["value"] if isinstance(line, Mapping) else line


def compared(value: float | None, baselines: Mapping[str, float | None], factor: float = 1) -> Scalar:
    """A number over checkpoints; baselines that are undefined are left out."""
    shown = {name: factor * one for name, one in baselines.items() if is_finite(one)}
    return Scalar(factor * value if is_finite(value) else math.nan, shown)


def scalar_of_mean(
    mean: Mapping[str, float | None], baselines: Mapping[str, float | None], factor: float = 1
) -> Scalar:
    """A `bootstrap.BootstrapMean` of a saved result beside its baselines."""
    interval = (factor * mean["low"], factor * mean["high"]) if is_finite(mean["low"]) else None
    return compared(mean["value"], baselines, factor)._replace(interval=interval)


def scalar_of_test(result: Mapping[str, Any], test: str) -> Scalar:
    """The model in a test of `item_scores.uncertainty` beside all other columns, shares in percent."""
    about = result[UNCERTAINTY][test]
    values = {name.replace("_", " "): one["value"] for name, one in about["columns"].items()}
    factor = 100 if about["unit"] == "%" else 1
    deviations = {
        name.replace("_", " "): factor * one["deviation_of_seeds"]
        for name, one in about["columns"].items()
        if one.get("deviation_of_seeds")  # 0 of what has no seed
    }
    scalar = compared(values.pop(MODEL), values, factor)
    return scalar._replace(interval=interval(result, test), deviations=deviations)


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


def paired(values: Numbers | Means, beside: Numbers | Means) -> list[str]:
    """Numbers as text, each with its interval, if it has one, and with that of a baseline in brackets."""
    others = cells(values_of(beside))
    return [f"{one} ({other})" for one, other in zip(interval_cells(values), others, strict=True)]


def interval_cells(line: Numbers | Means, form: str = ".3f", factor: float = 1) -> list[str]:
    """Numbers as text, each with the ends of its interval."""
    if not isinstance(line, Mapping):
        return cells(line, form, factor)
    columns = (cells(line[key], form, factor) for key in ("value", "low", "high"))
    return [f"{value} [{low}, {high}]" if low else value for value, low, high in zip(*columns, strict=True)]


def floats(values: Numbers) -> tuple[float, ...]:
    """NaN for None."""
    return tuple(math.nan if value is None else float(value) for value in values)


def seeds_text(result: Mapping[str, Any]) -> str:
    """The seed of a result, and how many seeds its random weights have."""
    several = result["random_seeds"] > 1
    means = f"; numbers of random weights are means over {result['random_seeds']} seeds" if several else ""
    return f"seed {result['seed']}{means}"


def is_finite(value: float | None) -> bool:
    """Whether a number of a result is defined."""
    return value is not None and math.isfinite(value)
