"""Intervals by the bootstrap and paired tests by permutation, for means of items and ratios of sums; other intervals.

Shapes: n items, c columns of scores, d different rows of scores and weights, R resamples.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from bert_jax.array_types import Float

RESAMPLES = 10_000
"""Of intervals, and of permutations: the least p-value is 1e-4."""
PARTS = 10
"""Of the items, of which the jackknife leaves out one after the other."""
DRAWN_AT_ONCE = 2**22
"""Numbers of drawn items in memory."""


class BootstrapMean(NamedTuple):
    """Means of items with their 95 % intervals: floats, or arrays with an entry for each column.

    Of one item there is no interval: its ends are None, or NaN in an array.
    """

    value: Any
    low: Any
    high: Any

    @property
    def half_width(self) -> float:
        """Of the widest interval of an array; NaN if it has none."""
        widths = np.asarray(self.high - self.low)
        known = widths[np.isfinite(widths)]
        return float(known.max()) / 2 if known.size else np.nan


class Difference(NamedTuple):
    """A difference of two means of the same items."""

    difference: float
    low: float | None
    """Of the 95 % interval; None: of one item there is none."""
    high: float | None
    p_value: float
    """Of no difference, two-sided, by swapping the two scores of items at random; at least 1 / (RESAMPLES + 1)."""


class _Group(NamedTuple):
    """Items with the same scores and weights are one row: most tests have few different ones."""

    rows: Float[np.ndarray, "d 2 c"]
    """Scores and weights."""
    counts: np.ndarray
    """int64 [d]: items of each row."""
    pool: Float[np.ndarray, "e 2 c"]
    """What bootstrap samples draw from: the rows; of a group of one, its item with the spread of all items."""
    pool_counts: np.ndarray
    """int64 [e]."""


def _by_group(
    scores: Float[np.ndarray, "c n"], weights: Float[np.ndarray, "c n"] | None, groups: Sequence[str] | None
) -> Iterator[_Group]:
    ones = np.ones_like(scores, np.float64) if weights is None else weights
    table = np.stack([scores, ones], axis=0).transpose(2, 0, 1).astype(np.float64)
    index = np.zeros(len(table), np.int64) if groups is None else np.unique(np.array(groups), return_inverse=True)[1]
    sizes, spread = np.bincount(index), None
    for group, size in enumerate(sizes):
        found = np.unique(table[index == group], axis=0, return_counts=True)
        if size == 1 and spread is None:
            spread = np.unique(_deviations(table), axis=0, return_counts=True)
        yield _Group(*found, *(found if size > 1 else (_vary(found[0], spread[0]), spread[1])))


def _deviations(table: Float[np.ndarray, "n 2 c"]) -> Float[np.ndarray, "n c"]:
    """How far items are from the mean of all, by their share of the weights."""
    scores, weights = table[:, 0], table[:, 1]
    return (scores - _ratio(table.sum(0)) * weights) / np.maximum(weights.mean(0), 1e-12)


def _vary(item: Float[np.ndarray, "1 2 c"], deviations: Float[np.ndarray, "e c"]) -> Float[np.ndarray, "e 2 c"]:
    """One item with each of the deviations."""
    scores, weights = item[:, 0], item[:, 1]
    return np.stack(np.broadcast_arrays(scores + weights * deviations, weights), axis=1)


def _ratio(sums: Float[np.ndarray, "*R 2 c"]) -> Float[np.ndarray, "*R c"]:
    """Scores over weights; 0 where there is no weight."""
    return sums[..., 0, :] / np.where(sums[..., 1, :] == 0, 1, sums[..., 1, :])


def resampled_means(
    scores: Float[np.ndarray, "c n"],
    weights: Float[np.ndarray, "c n"] | None = None,
    groups: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, "R c"]]:
    """The mean of each column, and those of RESAMPLES bootstrap samples of the items, which all columns share.

    The means of samples are NaN in columns with less than two items with a weight.

    Args:
      scores: by column and item, finite.
      weights: as in `ItemScores`, by column and item.
      groups: as in `ItemScores`. The item of a group of one has no spread of its own: it gets that of all items.
      seed: of the bootstrap.
    """
    rng, parts = np.random.default_rng(seed), list(_by_group(scores, weights, groups))
    value, resampled = np.zeros(len(scores)), np.zeros((RESAMPLES, len(scores)))
    for rows, counts, pool, pool_counts in parts:
        value += _ratio(np.tensordot(counts, rows, 1)) / len(parts)
        shares, chunks = pool_counts / pool_counts.sum(), -(-RESAMPLES * len(pool) // DRAWN_AT_ONCE)
        for chosen in np.array_split(np.arange(RESAMPLES), chunks):
            drawn = rng.multinomial(counts.sum(), shares, len(chosen)).astype(np.float64)
            resampled[chosen] += _ratio(np.tensordot(drawn, pool, 1)) / len(parts)
    of_items = np.concatenate([_ratio(rows) for rows, *_ in parts])
    known = sum((counts @ (rows[:, 1] > 0)) for rows, counts, *_ in parts)
    return value, np.where(known > 1, np.clip(resampled, of_items.min(0), of_items.max(0)), np.nan)


def percentiles(resampled: np.ndarray) -> np.ndarray:
    """Lower and upper end of the 95 % interval over the first axis, [2, ...]."""
    return np.quantile(resampled, [0.025, 0.975], axis=0)


def bootstrap_mean(
    scores: Float[np.ndarray, "*columns n"],
    groups: Sequence[str] | None = None,
    weights: np.ndarray | None = None,
    *,
    seed: int = 0,
) -> BootstrapMean:
    """Means over items, with intervals of percentiles of the bootstrap over items within groups.

    Args:
      scores: any leading axes, then items; NaN where an item has no value, and is left out.
      groups: as in `resampled_means`.
      weights: as in `ItemScores`; broadcast to the scores.
      seed: of the bootstrap.
    """
    *columns, n = np.shape(scores)
    known = np.isfinite(scores)
    flat = (known if weights is None else known * weights).reshape(-1, n).astype(np.float64)
    value, resampled = resampled_means(np.where(known, scores, 0).reshape(-1, n), flat, groups, seed=seed)
    found = (np.where(flat.any(1), one, np.nan) for one in (value, *percentiles(resampled)))
    return BootstrapMean(*(one.reshape(columns)[()] for one in found))


def jackknife(value: Any, without_part: Sequence[Any]) -> BootstrapMean:
    """A function of items with the 95 % interval of the jackknife (Student's t); NaN where a value is NaN.

    For functions whose values a bootstrap sample biases: it has items twice, and so fewer different ones.

    Args:
      value: of all items; a float or an array.
      without_part: without one part of the items after the other, parts as large as each other; less than two give
        no interval.
    """
    count = len(without_part)
    error = np.sqrt((count - 1) * np.var(without_part, axis=0)) if count > 1 else np.full(np.shape(value), np.nan)
    width = special.stdtrit(max(count - 1, 1), 0.975) * error
    return BootstrapMean(value, value - width, value + width)


def mean_over_seeds(values: np.ndarray) -> BootstrapMean:
    """Means over seeds, the first axis, with Student's 95 % interval; one seed gives none.

    For means, that interval and the one of the jackknife are equal.
    """
    others = [np.delete(values, i, axis=0) for i in range(len(values))] if len(values) > 1 else [values]
    return jackknife(values.mean(0), [one.mean(0) for one in others])


class Comparison(NamedTuple):
    """The first column of scores beside the others."""

    means: list[BootstrapMean]
    """Of every column."""
    differences: list[Difference]
    """The first column minus each of the others."""


def compare_columns(
    scores: Float[np.ndarray, "c n"],
    weights: Float[np.ndarray, "c n"] | None = None,
    groups: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> Comparison:
    """Means of all columns, and paired differences of the first one from the others; arguments as `resampled_means`."""
    value, resampled = resampled_means(scores, weights, groups, seed=seed)
    parts = list(_by_group(scores, weights, groups))
    rng, swapped = np.random.default_rng([seed, 1]), np.zeros((RESAMPLES, len(scores) - 1))
    for rows, counts, *_ in parts:
        for chosen in np.array_split(np.arange(RESAMPLES), -(-RESAMPLES * len(counts) // DRAWN_AT_ONCE)):
            kept = rng.binomial(counts, 0.5, (len(chosen), len(counts))).astype(np.float64)
            first, others = rows[..., :1], rows[..., 1:]
            one = _ratio(np.tensordot(kept, first, 1) + np.tensordot(counts - kept, others, 1))
            swapped[chosen] += (
                one - _ratio(np.tensordot(kept, others, 1) + np.tensordot(counts - kept, first, 1))
            ) / len(parts)
    differences = value[0] - value[1:]
    as_far = (np.abs(swapped) >= np.abs(differences) - 1e-12).sum(0)
    ends = *percentiles(resampled), *percentiles(resampled[:, :1] - resampled[:, 1:])
    low, high, *of_differences = ([None if np.isnan(x) else x for x in one.tolist()] for one in ends)
    means = zip(value.tolist(), low, high, strict=True)
    p_values = ((1 + as_far) / (1 + RESAMPLES)).tolist()
    found = zip(differences.tolist(), *of_differences, p_values, strict=True)
    return Comparison([BootstrapMean(*one) for one in means], [Difference(*one) for one in found])


class CrossFit(NamedTuple):
    """The best of several candidates, e.g. hidden states, on items by which it was not chosen."""

    chosen: tuple[int, int]
    """The candidate of the items with even and with odd index: the best one of the others."""
    scores: Float[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]

    def pick(self, values: Float[np.ndarray, "c n"]) -> Float[np.ndarray, " n"]:
        """Other values of the items' candidates."""
        return np.where(np.arange(values.shape[1]) % 2 == 0, *(values[i] for i in self.chosen))


def cross_fit(scores: Float[np.ndarray, "c n"], weights: np.ndarray) -> CrossFit:
    """Score each item by the candidate that has the highest mean over the other half of the items.

    So the number has no gain from the choice, as the score of the best candidate on the items that chose it has.

    Args:
      scores: of each candidate.
      weights: as in `ItemScores`; broadcast to the scores.
    """
    weights, even = np.broadcast_to(weights, np.shape(scores)), np.arange(np.shape(scores)[1]) % 2 == 0
    means = (_ratio(np.stack([scores[:, half].sum(1), weights[:, half].sum(1)])) for half in (~even, even))
    found = CrossFit(tuple(int(one.argmax()) for one in means), scores[0], weights[0])
    return found._replace(scores=found.pick(scores), weights=found.pick(weights))
