"""Scores of the items of a test: intervals of their mean, and paired tests of two columns of scores.

An item is what a test counts: a pair of sentences, a sentence with a masked verb, a fact. The number of a test is the
mean of its items, or the mean over groups (the UIDs of BLiMP, the relations of LAMA) of the means of their items.
Intervals and p-values are about the choice of items, drawn anew within each group; other seeds of pretraining differ
by more than that.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.suite import UNCERTAINTY
from bert_jax.array_types import Float
from bert_jax.errors import require
from bert_jax.report import Note, Table
from bert_jax.storage.json_files import parse_json
from bert_jax.storage.paths import StoredPath

MODEL = "model"
RESAMPLES = 10_000
"""Of intervals, and of permutations: the least p-value is 1e-4."""
ABOUT_INTERVALS = (
    "In brackets: 95 % intervals over the items, within each UID or relation where the number is a mean over them. p: "
    "two-sided, by swapping the two answers to an item at random. Both say how much the choice of items decides; "
    "another seed of training would change the numbers, too. Where all n items have one score, the interval has no "
    "width, and up to 3 in n of other items may have another score."
)


class ItemScores(NamedTuple):
    """A test of a model: a score of each item, beside those of its baselines."""

    items: tuple[str, ...]
    """What tells the items apart, e.g. FILE, line N."""
    groups: tuple[str, ...] | None
    """Of each item, where the number of the test is the mean over groups; None: it is the mean over items."""
    scores: Mapping[str, Float[np.ndarray, " n"]]
    """By column: `MODEL` and baselines; higher is better, e.g. 1 right, 0.5 a tie, 0 wrong."""
    same_tokenizer: bool = False
    """Whether models with different tokenizers cannot be compared by it."""

    def select(self, items: Sequence[str]) -> "ItemScores":
        """Some of the items, in the order given."""
        place = {item: i for i, item in enumerate(self.items)}
        chosen = [place[item] for item in items]
        groups = None if self.groups is None else tuple(self.groups[i] for i in chosen)
        scores = {name: values[chosen] for name, values in self.scores.items()}
        return self._replace(items=tuple(items), groups=groups, scores=scores)


def join(parts: Sequence[ItemScores], *, same_tokenizer: bool = False) -> ItemScores:
    """The items of parts that have groups and the same columns, as one test."""
    scores = {name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores}
    items, groups = (tuple(one for part in parts for one in getattr(part, key)) for key in ("items", "groups"))
    return ItemScores(items, groups, scores, same_tokenizer)


class BootstrapMean(NamedTuple):
    """A mean of items with its 95 % interval."""

    value: float
    low: float | None
    """None: of one item there is no interval."""
    high: float | None


class Difference(NamedTuple):
    """A difference of two means of the same items."""

    difference: float
    low: float | None
    """Of the 95 % interval; None: of one item there is none."""
    high: float | None
    p_value: float
    """Of no difference, two-sided, by swapping the two scores of items at random; at least 1 / (RESAMPLES + 1)."""


def bootstrap_mean(
    values: Float[np.ndarray, " n"], groups: Sequence[str] | None = None, *, seed: int = 0
) -> BootstrapMean:
    """The mean of scores, with the interval of percentiles of the bootstrap over items within groups.

    Args:
      values: a score of each item, finite.
      groups: as in `ItemScores`. The item of a group of one has no spread of its own: it gets that of all items.
      seed: of the bootstrap.
    """
    rng, resampled, value = np.random.default_rng(seed), np.zeros(RESAMPLES), 0.0
    for members, weight in _by_group(values, groups):
        pool = members if len(members) > 1 else members + values - np.mean(values)
        distinct, counts = np.unique(pool, return_counts=True)
        drawn = rng.multinomial(len(members), counts / len(pool), RESAMPLES)
        resampled += weight * (drawn @ distinct) / len(members)
        value += weight * float(members.mean())
    if len(values) == 1:
        return BootstrapMean(value, None, None)
    low, high = np.clip(np.quantile(resampled, [0.025, 0.975]), np.min(values), np.max(values))
    return BootstrapMean(value, float(low), float(high))


def paired_difference(
    values: Float[np.ndarray, " n"],
    others: Float[np.ndarray, " n"],
    groups: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> Difference:
    """The mean of `values` minus that of `others`, item by item.

    Args:
      values, others: scores of the same items in the same order.
      groups: as in `ItemScores`.
      seed: of bootstrap and permutations.
    """
    differences = np.asarray(values, np.float64) - others
    found = bootstrap_mean(differences, groups, seed=seed)
    rng, swapped = np.random.default_rng([seed, 1]), np.zeros(RESAMPLES)
    for members, weight in _by_group(differences, groups):
        sizes, counts = np.unique(np.abs(members), return_counts=True)
        positive = rng.binomial(counts, 0.5, (RESAMPLES, len(counts)))
        swapped += weight * ((2 * positive - counts) @ sizes) / len(members)
    as_far = int((np.abs(swapped) >= abs(found.value) - 1e-12).sum())
    return Difference(*found, (1 + as_far) / (1 + RESAMPLES))


def _by_group(values: np.ndarray, groups: Sequence[str] | None) -> list[tuple[np.ndarray, float]]:
    """The scores of each group, and the weight of its mean."""
    if groups is None:
        return [(np.asarray(values, np.float64), 1.0)]
    names, index = np.unique(np.array(groups), return_inverse=True)
    return [(np.asarray(values[index == i], np.float64), 1 / len(names)) for i in range(len(names))]


def uncertainty(tests: Mapping[str, ItemScores]) -> dict[str, Any]:
    """Means of all columns by test, and differences of the model from its baselines, as JSON holds them."""
    return {
        test: {
            "items": len(one.items),
            "same_tokenizer": one.same_tokenizer,
            "columns": {name: bootstrap_mean(values, one.groups)._asdict() for name, values in one.scores.items()},
            "model_minus": {
                name: paired_difference(one.scores[MODEL], values, one.groups)._asdict()
                for name, values in one.scores.items()
                if name != MODEL
            },
        }
        for test, one in tests.items()
    }


def interval(result: Mapping[str, Any], test: str) -> tuple[float, float] | None:
    """The 95 % interval of the model in a test of a result, in percent; None if there is none."""
    if test not in result.get(UNCERTAINTY, {}):
        return None
    model = result[UNCERTAINTY][test]["columns"][MODEL]
    return None if model["low"] is None else (100 * model["low"], 100 * model["high"])


def uncertainty_blocks(found: Mapping[str, Any]) -> tuple[Table, Note]:
    """A row for each test and baseline of `uncertainty`, in percent, and how to read it."""
    rows = []
    for test, one in found.items():
        model = with_interval(one["columns"][MODEL])
        for name, difference in one["model_minus"].items():
            beside = f"{100 * one['columns'][name]['value']:.1f}"
            compared = (name.replace("_", " "), beside, with_interval(difference), format_p(difference["p_value"]))
            rows.append((test.replace("_", " "), f"{one['items']:,}", model, *compared))
    header = ("test", "items", "model (%)", "compared with", "its value (%)", "difference (points)", "p")
    return Table(header, tuple(rows), words=True), Note(ABOUT_INTERVALS)


def with_interval(values: Mapping[str, float | None]) -> str:
    """A mean or a difference and its interval, times 100."""
    center = values["difference"] if "difference" in values else values["value"]
    sign = "+" if "difference" in values else ""
    if values["low"] is None:
        return f"{100 * center:{sign}.1f} (one item, no interval)"
    low, high = (f"{100 * values[end]:{sign}.1f}" for end in ("low", "high"))
    return f"{100 * center:{sign}.1f} ({low} to {high})"


def format_p(p_value: float) -> str:
    """A p-value of `paired_difference`."""
    return f"{p_value:.4f}" if p_value > 1.5 / RESAMPLES else f"at most {1 / RESAMPLES:.4f}"


def to_json_lines(tests: Mapping[str, ItemScores]) -> bytes:
    """A line for each item of each test: test, item, group and the scores by column."""
    lines = []
    for test, one in tests.items():
        for i, item in enumerate(one.items):
            about = {"test": test, "item": item} | ({"group": one.groups[i]} if one.groups is not None else {})
            scores = {name: float(values[i]) for name, values in one.scores.items()}
            lines.append(json.dumps(about | {"scores": scores}, ensure_ascii=False, allow_nan=False))
    return "".join(f"{line}\n" for line in lines).encode()


def read_json_lines(path: StoredPath, advice: str) -> dict[str, ItemScores]:
    """The tests of `to_json_lines`.

    Raises:
      UserError: the file is damaged; the message ends with `advice`.
    """
    by_test: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(path.read_bytes().rstrip(b"\n").split(b"\n"), 1):
        row = parse_json(line, f"{path}, line {number}", advice)
        is_whole = {"test", "item", "scores"} <= row.keys() and _are_scores(row["scores"])
        is_whole &= all(isinstance(value, str) for key, value in row.items() if key != "scores")
        first = by_test.get(row["test"], [row])[0] if is_whole else row
        is_alike = is_whole and (row.keys(), row["scores"].keys()) == (first.keys(), first["scores"].keys())
        require(is_alike, f"{path}, line {number}: not the scores of an item: {advice}")
        by_test.setdefault(row["test"], []).append(row)
    return {
        test: ItemScores(
            tuple(row["item"] for row in rows),
            tuple(row["group"] for row in rows) if "group" in rows[0] else None,
            {name: np.array([row["scores"][name] for row in rows], np.float64) for name in rows[0]["scores"]},
        )
        for test, rows in by_test.items()
    }


def _are_scores(values: Any) -> bool:
    """Whether these are the scores of an item by column."""
    numbers = isinstance(values, dict) and all(type(x) in (int, float) and -1e30 < x < 1e30 for x in values.values())
    return numbers and MODEL in values
