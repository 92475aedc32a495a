"""Two models compared item by item: paired tests of everything that suites count by items."""

from collections.abc import Iterable, Mapping
from typing import TypedDict

from bert_jax.analysis.item_scores import (
    ABOUT_INTERVALS,
    MODEL,
    ItemScores,
    bootstrap_mean,
    format_p,
    paired_difference,
    with_interval,
)
from bert_jax.analysis.suite import UNCERTAINTY, SuiteResult
from bert_jax.errors import UserError
from bert_jax.report import Note, Section, Table
from bert_jax.statistics import holm


class PairedTest(TypedDict):
    """A test of both models on the items that both have."""

    suite: str
    test: str
    items: int
    only_model: int
    """Items that only the model has, e.g. words that are one token in its vocabulary alone; they are left out."""
    only_other: int
    model: dict[str, float]
    """`item_scores.BootstrapMean`."""
    other: dict[str, float]
    difference: dict[str, float]
    """`item_scores.Difference`: the model minus the other one."""
    adjusted_p_value: float
    """Holm's, for the number of tests."""


def refuse_other_tokenizer(results: Iterable[SuiteResult]) -> None:
    """UserError if a test of the results cannot be compared with a model that has another tokenizer."""
    for test in (test for result in results for test, one in result[UNCERTAINTY].items() if one["same_tokenizer"]):
        raise UserError(
            f"--compare: {test} of models with different tokenizers has other candidates for each: put a common "
            "vocabulary into its folder (docs/analysis/cloze.md)"
        )


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
    groups = model.select(common).groups
    values, others = (side.select(common).scores[MODEL] for side in (model, other))
    difference = paired_difference(values, others, groups)
    return PairedTest(
        suite=suite,
        test=test,
        items=len(common),
        only_model=len(model.items) - len(common),
        only_other=len(other.items) - len(common),
        model=bootstrap_mean(values, groups)._asdict(),
        other=bootstrap_mean(others, groups)._asdict(),
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
            f"{row['suite']}: {row['test'].replace('_', ' ')}",
            f"{row['items']:,}",
            f"{row['only_model']:,}, {row['only_other']:,}",
            with_interval(row["model"]),
            with_interval(row["other"]),
            with_interval(row["difference"]),
            format_p(row["difference"]["p_value"]),
            format_p(row["adjusted_p_value"]),
        )
        for row in rows
    )
    header = ("test", "items of both", "of one only", "A (%)", "B (%)", "A - B (points)", "p", "p, Holm")
    notes = (Note(f"A: {model}. B: {other}."), Table(header, cells, words=True), Note(ABOUT_INTERVALS))
    return Section("two models compared", notes)


def lines(rows: list[PairedTest]) -> list[str]:
    """The comparisons for a terminal."""
    return [
        f"{row['suite']}: {row['test'].replace('_', ' ')}, {row['items']:,} items: {100 * row['model']['value']:.1f} % "
        f"against {100 * row['other']['value']:.1f} %, difference {with_interval(row['difference'])} points, p "
        f"{format_p(row['adjusted_p_value'])} (Holm, {len(rows)} tests)"
        for row in rows
    ]
