"""Two models compared item by item: paired tests of everything that suites count by items."""

from collections.abc import Mapping
from typing import TypedDict

import numpy as np

from bert_jax.analysis.bootstrap import compare_columns
from bert_jax.analysis.item_scores import (
    ABOUT_INTERVALS,
    MODEL,
    ItemScores,
    format_p,
    test_title,
    with_interval,
)
from bert_jax.errors import UserError
from bert_jax.report import Note, Section, Table
from bert_jax.statistics import holm


class PairedTest(TypedDict):
    """A test of both models on the items that both have."""

    suite: str
    test: str
    unit: str
    """As in `ItemScores`."""
    items: int
    only_model: int
    """Items that only the model has, e.g. words that are one token in its vocabulary alone; they are left out."""
    only_other: int
    model: dict[str, float]
    """`bootstrap.BootstrapMean`."""
    other: dict[str, float]
    difference: dict[str, float]
    """`bootstrap.Difference`: the model minus the other one."""
    adjusted_p_value: float
    """Holm's, for the number of tests."""


def compare(suite: str, model: Mapping[str, ItemScores], other: Mapping[str, ItemScores]) -> list[PairedTest]:
    """The tests of a suite that both models have, p-values not yet adjusted.

    Args:
      suite: its name.
      model, other: scores of items by test.

    Raises:
      UserError: a test without a common item.
    """
    found = []
    for test in model:
        if test not in other:
            continue
        there = set(other[test].items)
        common = [item for item in model[test].items if item in there]
        if not common:
            raise UserError(f"--compare: the models have no item of {test} in common: give the same data to both")
        found.append(_compare_items(suite, test, model[test], other[test], common))
    return found


def _compare_items(suite: str, test: str, model: ItemScores, other: ItemScores, common: list[str]) -> PairedTest:
    sides = model.select(common), other.select(common)
    weights = None if model.weights is None else np.stack([side.weights[MODEL] for side in sides])
    compared = compare_columns(np.stack([side.scores[MODEL] for side in sides]), weights, sides[0].groups)
    (difference,) = compared.differences
    return PairedTest(
        suite=suite,
        test=test,
        unit=model.unit,
        items=len(common),
        only_model=len(model.items) - len(common),
        only_other=len(other.items) - len(common),
        model=compared.means[0]._asdict(),
        other=compared.means[1]._asdict(),
        difference=difference._asdict(),
        adjusted_p_value=difference.p_value,
    )


def adjust(rows: list[PairedTest]) -> list[PairedTest]:
    """The comparisons with p-values adjusted for their number."""
    adjusted = holm([row["difference"]["p_value"] for row in rows])
    return [{**row, "adjusted_p_value": p_value} for row, p_value in zip(rows, adjusted, strict=True)]


def section(rows: list[PairedTest], model: str, other: str) -> Section:
    """The table of comparisons."""
    cells = tuple(
        (
            f"{row['suite']}: {test_title(row['test'], row['unit'])}",
            f"{row['items']:,}",
            f"{row['only_model']:,}, {row['only_other']:,}",
            *(with_interval(row[key], row["unit"]) for key in ("model", "other", "difference")),
            format_p(row["difference"]["p_value"]),
            format_p(row["adjusted_p_value"]),
        )
        for row in rows
    )
    header = ("test", "items of both", "of one only", "A", "B", "A - B (of %: points)", "p", "p, Holm")
    notes = (Note(f"A: {model}. B: {other}."), Table(header, cells, words=True), Note(ABOUT_INTERVALS))
    return Section("two models compared", notes)


def lines(rows: list[PairedTest]) -> list[str]:
    """The comparisons for a terminal."""
    found = []
    for row in rows:
        model, other, difference = (with_interval(row[key], row["unit"]) for key in ("model", "other", "difference"))
        found.append(
            f"{row['suite']}: {test_title(row['test'], row['unit'])}, {row['items']:,} items: {model} against {other}, "
            f"difference {difference}, p {format_p(row['adjusted_p_value'])} (Holm, {len(rows)} tests)"
        )
    return found
