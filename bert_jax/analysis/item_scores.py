"""Scores of the items of a test: intervals of their mean, and paired tests of two columns of scores.

An item is what is drawn at random: a pair of sentences, a fact, or a text with all its words, which are not drawn one
by one. The number of a test is the mean of its items, or the sum of scores over the sum of weights, such as right
words over words; or the mean of that over groups (the UIDs of BLiMP, the relations of LAMA). Intervals and p-values
(`bootstrap`) are about the choice of items, drawn anew within each group; other seeds of pretraining differ by more
than that.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from bert_jax.analysis.bootstrap import RESAMPLES, compare_columns
from bert_jax.analysis.suite import UNCERTAINTY
from bert_jax.array_types import Float
from bert_jax.errors import require
from bert_jax.report import Note, Table
from bert_jax.storage.json_files import parse_json
from bert_jax.storage.paths import StoredPath

Values = TypeVar("Values")
MODEL = "model"
NUMBERS = ("scores", "weights")
"""Fields of `ItemScores` with numbers by column."""
ABOUT_INTERVALS = (
    "In brackets: 95 % intervals over the items, within each UID or relation where the number is a mean over them. p: "
    "two-sided, by swapping the two answers to an item at random. Where an item is a sentence or a text, all of its "
    "words are drawn or swapped together, and the best state or head of an item is chosen on other items. Both say how "
    "much the choice of items decides; another seed of training would change the numbers, too. Where all n items have "
    "one score, the interval has no width, and up to 3 in n of other items may have another score. ±: the standard "
    "deviation of one seed, where the scores of items are means over seeds of probes or random weights."
)


class ItemScores(NamedTuple):
    """A test of a model: a score of each item, beside those of its baselines."""

    items: tuple[str, ...]
    """What tells the items apart, e.g. FILE, line N."""
    groups: tuple[str, ...] | None
    """Of each item, where the number of the test is the mean over groups; None: it is one mean."""
    scores: Mapping[str, Float[np.ndarray, " n"]]
    """By column: `MODEL` and baselines, e.g. 1 right, 0.5 a tie, 0 wrong, or the right words of a sentence."""
    weights: Mapping[str, Float[np.ndarray, " n"]] | None = None
    """By column: what the sum of scores is divided by, e.g. the words of a sentence; None: 1 for each item."""
    unit: str = "%"
    """Of the number: % for shares, otherwise the unit of the scores, or "" where they have none."""
    same_tokenizer: bool = False
    """Whether models with different tokenizers cannot be compared by it."""
    deviations: Mapping[str, float] | None = None
    """By column: standard deviation of its number over seeds, where scores are means over several."""

    @property
    def numbers(self) -> dict[str, float]:
        """The number of the test, by column."""
        index = np.unique(self.groups or ("",) * len(self.items), return_inverse=True)[1]
        found = {}
        for column, scores in self.scores.items():
            weights = np.ones(len(scores)) if self.weights is None else self.weights[column]
            sums, totals = (np.bincount(index, of) for of in (scores, weights))
            found[column] = float(np.mean(sums / np.where(totals == 0, 1, totals)))
        return found

    def select(self, items: Sequence[str]) -> "ItemScores":
        """Some of the items, in the order given."""
        place = {item: i for i, item in enumerate(self.items)}
        chosen = [place[item] for item in items]
        groups = None if self.groups is None else tuple(self.groups[i] for i in chosen)
        scores, weights = (
            None if of is None else {name: values[chosen] for name, values in of.items()}
            for of in (self.scores, self.weights)
        )
        return self._replace(items=tuple(items), groups=groups, scores=scores, weights=weights)


def mean_of_seeds(values: Sequence[Values]) -> Values:
    """The mean of trees of arrays and equal texts; the first tree itself if there is one."""

    def mean(*leaves: Any) -> Any:
        return leaves[0] if isinstance(leaves[0], str) else np.mean(leaves, axis=0)

    return values[0] if len(values) == 1 else jax.tree.map(mean, *values)


def tests_over_seeds(
    make: Callable[[Values], dict[str, ItemScores]], of_seeds: Sequence[Values]
) -> dict[str, ItemScores]:
    """Tests of the mean over seeds, with the standard deviations of what each seed gives alone, if there are several.

    Args:
      make: tests from a tree of arrays, such as scores of probes or measurements of random weights.
      of_seeds: these trees.
    """
    tests = make(mean_of_seeds(of_seeds))
    if len(of_seeds) == 1:
        return tests
    alone = list(map(make, of_seeds))
    return {
        test: one._replace(
            deviations={
                column: float(np.std([tests[test].numbers[column] for tests in alone], ddof=1)) for column in one.scores
            }
        )
        for test, one in tests.items()
    }


def uncertainty(tests: Mapping[str, ItemScores]) -> dict[str, Any]:
    """Means of all columns by test, and differences of the model from its baselines, as JSON holds them."""
    found = {}
    for test, one in tests.items():
        names = sorted(one.scores, key=lambda name: name != MODEL)
        scores, weights = (None if of is None else np.stack([of[name] for name in names]) for of in one[2:4])
        compared = compare_columns(scores, weights, one.groups)
        found[test] = {
            "items": len(one.items),
            "unit": one.unit,
            "same_tokenizer": one.same_tokenizer,
            "columns": {
                name: mean._asdict() | ({} if one.deviations is None else {"deviation_of_seeds": one.deviations[name]})
                for name, mean in zip(names, compared.means, strict=True)
            },
            "model_minus": dict(zip(names[1:], (one._asdict() for one in compared.differences), strict=True)),
        }
    return found


def interval(result: Mapping[str, Any], test: str) -> tuple[float, float] | None:
    """The 95 % interval of the model in a test of a result, shares in percent; None if there is none."""
    if test not in result.get(UNCERTAINTY, {}):
        return None
    about = result[UNCERTAINTY][test]
    model, factor = about["columns"][MODEL], 100 if about["unit"] == "%" else 1
    return None if model["low"] is None else (factor * model["low"], factor * model["high"])


def uncertainty_blocks(found: Mapping[str, Any]) -> tuple[Table, Note]:
    """A row for each test and baseline of `uncertainty`, and how to read it."""
    rows = []
    for test, one in found.items():
        unit, model = one["unit"], with_interval(one["columns"][MODEL], one["unit"])
        for name, difference in one["model_minus"].items():
            beside = with_interval(one["columns"][name], unit)
            compared = (
                name.replace("_", " "),
                beside,
                with_interval(difference, unit),
                format_p(difference["p_value"]),
            )
            rows.append((test_title(test, unit), f"{one['items']:,}", model, *compared))
    header = ("test", "items", "model", "compared with", "its value", "difference (of %: points)", "p")
    return Table(header, tuple(rows), words=True), Note(ABOUT_INTERVALS)


def test_title(test: str, unit: str) -> str:
    """The name of a test with its unit."""
    return test.replace("_", " ") + (f" ({unit})" if unit else "")


def with_interval(values: Mapping[str, float | None], unit: str = "%") -> str:
    """A mean or a difference and its interval, and the deviation of a seed if there are several; shares in percent."""
    center = values["difference"] if "difference" in values else values["value"]
    sign, factor, form = "+" if "difference" in values else "", *((100, ".1f") if unit == "%" else (1, ".3f"))
    if values["low"] is None:
        return f"{factor * center:{sign}{form}} (one item, no interval)"
    low, high = (f"{factor * values[end]:{sign}{form}}" for end in ("low", "high"))
    beside = f" ± {factor * values['deviation_of_seeds']:{form}}" if values.get("deviation_of_seeds") else ""
    return f"{factor * center:{sign}{form}} ({low} to {high}){beside}"


def format_p(p_value: float) -> str:
    """A p-value of `paired_difference`."""
    return f"{p_value:.4f}" if p_value > 1.5 / RESAMPLES else f"at most {1 / RESAMPLES:.4f}"


def to_json_lines(tests: Mapping[str, ItemScores]) -> bytes:
    """A line for each item of each test: test, item, group, and the scores and weights by column."""
    lines = []
    for test, one in tests.items():
        for i, item in enumerate(one.items):
            about = {"test": test, "item": item} | ({"group": one.groups[i]} if one.groups is not None else {})
            for key in NUMBERS:
                if (of := getattr(one, key)) is not None:
                    about[key] = {name: float(values[i]) for name, values in of.items()}
            lines.append(json.dumps(about, ensure_ascii=False, allow_nan=False))
    return "".join(f"{line}\n" for line in lines).encode()


def read_json_lines(path: StoredPath, advice: str) -> dict[str, ItemScores]:
    """The tests of `to_json_lines`.

    Raises:
      UserError: the file is damaged; the message ends with `advice`.
    """
    by_test: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(path.read_bytes().rstrip(b"\n").split(b"\n"), 1):
        row = parse_json(line, f"{path}, line {number}", advice)
        is_alike = _is_item(row) and _layout(row) == _layout(by_test.get(row["test"], [row])[0])
        require(is_alike, f"{path}, line {number}: not the scores of an item: {advice}")
        by_test.setdefault(row["test"], []).append(row)

    def columns(rows: list[dict[str, Any]], key: str) -> dict[str, np.ndarray] | None:
        names = rows[0].get(key)
        return names and {name: np.array([row[key][name] for row in rows], np.float64) for name in names}

    return {
        test: ItemScores(
            tuple(row["item"] for row in rows),
            tuple(row["group"] for row in rows) if "group" in rows[0] else None,
            *(columns(rows, key) for key in NUMBERS),
        )
        for test, rows in by_test.items()
    }


def _is_item(row: Mapping[str, Any]) -> bool:
    """Whether this is a line of `to_json_lines`."""
    texts, numbers = ([row[key] for key in row if (key in NUMBERS) == are] for are in (False, True))
    return (
        {"test", "item", NUMBERS[0]} <= row.keys()
        and all(isinstance(one, str) for one in texts)
        and all(isinstance(one, dict) and MODEL in one for one in numbers)
        and all(type(x) in (int, float) and -1e30 < x < 1e30 for one in numbers for x in one.values())
    )


def _layout(row: Mapping[str, Any]) -> list[Any]:
    """Fields and columns of a line; weights have the columns of the scores."""
    return [row.keys(), *(row[key].keys() for key in NUMBERS if key in row)]
