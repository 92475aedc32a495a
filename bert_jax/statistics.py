"""Differences between the levels of a factor: intervals, tests, power, and what was sampled.

Seeds are clusters: all predictions of one seed share its randomness, so the number of seeds, not of examples, limits
what a comparison can show. A difference is always taken between runs of the same seed if the design is paired.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize, special, stats

Scores = np.ndarray | Sequence[float]
Verdict = Literal["higher", "lower", "equal", "undecided"]
NODES = 64
"""Of Gauss-Jacobi quadrature, whose error is then far below the rounding of a table."""


class Estimate(NamedTuple):
    """An estimated difference."""

    difference: float
    """Mean of the level minus mean of the baseline."""
    low: float
    """Lower end of the confidence interval."""
    high: float
    """Upper end of the confidence interval."""
    p_value: float
    """Of no difference, two-sided; never 0: a bootstrap gives at least 1 / resamples."""
    clusters: int
    """Number of seeds of the smaller side. Percentile intervals of few clusters are too narrow."""


def t_estimate(level: Scores, baseline: Scores, *, paired: bool, confidence: float = 0.95) -> Estimate:
    """Student's interval and test of the difference of two means; not paired: Welch's.

    Args:
      level, baseline: one score per seed; if `paired`, in the same order of seeds.
      paired: whether equal positions are runs of the same seed.
      confidence: of the interval.

    Raises:
      ValueError: fewer than two seeds.
    """
    x, y = np.asarray(level, np.float64), np.asarray(baseline, np.float64)
    clusters = min(len(x), len(y))
    if clusters < 2:
        raise ValueError("a difference needs at least two seeds on each side")
    difference = float(x.mean() - y.mean())
    if _is_constant(x - y, x, y) if paired else _is_constant(x, x) and _is_constant(y, y):
        # No spread, as of runs that all collapsed: scipy returns NaN, and the limit, 0, would claim too much.
        p_value = permutation_p_value(level, baseline, paired=paired) if difference else 1.0
        return Estimate(difference, difference, difference, p_value, clusters)
    result = stats.ttest_rel(x, y) if paired else stats.ttest_ind(x, y, equal_var=False)
    interval = result.confidence_interval(confidence)
    return Estimate(difference, float(interval.low), float(interval.high), float(result.pvalue), clusters)


def _is_constant(values: np.ndarray, *scores: np.ndarray) -> bool:
    """Whether values do not differ but by the rounding of the scores that they were computed from."""
    return bool(np.ptp(values) <= 1e-12 * max(np.abs(one).max() for one in scores))


def bca_interval(
    differences: Scores, *, seed: int, resamples: int = 9_999, confidence: float = 0.95
) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval of the mean of paired differences (Efron 1987)."""
    values = np.asarray(differences, np.float64)
    if _is_constant(values, values):
        return float(values[0]), float(values[0])
    result = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="BCa",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


class SeedScores(NamedTuple):
    """The scores of the runs of one level on any sample of the test examples."""

    num_seeds: int
    score: Callable[[np.ndarray], np.ndarray]
    """Indices of examples, int [E], to the score of each seed, float [S]; with several fine-tuning runs of one
    pretraining seed, their mean."""

    @classmethod
    def from_examples(cls, scores: np.ndarray) -> "SeedScores":
        """Of a metric that is a mean over examples, such as accuracy: scores, [S, E]."""
        return cls(len(scores), lambda examples: scores[:, examples].mean(1))


def multibootstrap(
    level: SeedScores,
    baseline: SeedScores,
    num_examples: int,
    *,
    paired: bool,
    seed: int,
    resamples: int = 1_000,
    confidence: float = 0.95,
) -> Estimate:
    """The difference with seeds and test examples resampled together (Sellam et al. 2022, section 4.1).

    Both sides share each sample of examples, and if `paired` also the sample of seeds. The interval is of percentiles;
    the p-value is twice the smaller share of resampled differences on one side of 0, at least 1 / resamples.

    Raises:
      ValueError: `paired`, and the numbers of seeds differ.
    """
    if paired and level.num_seeds != baseline.num_seeds:
        raise ValueError(f"paired levels have {level.num_seeds} and {baseline.num_seeds} seeds")
    rng = np.random.default_rng(seed)
    differences = np.empty(resamples)
    for i in range(resamples):
        examples = rng.integers(num_examples, size=num_examples)
        seeds = rng.integers(level.num_seeds, size=level.num_seeds)
        others = seeds if paired else rng.integers(baseline.num_seeds, size=baseline.num_seeds)
        differences[i] = level.score(examples)[seeds].mean() - baseline.score(examples)[others].mean()
    everything = np.arange(num_examples)
    difference = float(level.score(everything).mean() - baseline.score(everything).mean())
    low, high = np.quantile(differences, [(1 - confidence) / 2, (1 + confidence) / 2])
    smaller = min(np.mean(differences <= 0), np.mean(differences >= 0))
    p_value = float(np.clip(2 * smaller, 1 / resamples, 1.0))
    return Estimate(difference, float(low), float(high), p_value, min(level.num_seeds, baseline.num_seeds))


def nested_variances(groups: Sequence[Scores]) -> tuple[float | None, float | None]:
    """Variances between groups and within them: a random-effects analysis of variance, by its mean squares.

    Groups may have different sizes (Searle, Casella and McCulloch 1992, section 3.6). The estimates are unbiased, so
    the variance between groups may be negative.

    Args:
      groups: scores, not empty, e.g. of the fine-tuning runs of each pretraining seed.

    Returns:
      the variance between groups; None: fewer than two groups. If every group has one score, of all scores; and
      the variance within groups; None: every group has one score.
    """
    arrays = [np.asarray(group, np.float64) for group in groups]
    sizes = np.array([len(array) for array in arrays])
    total, count = int(sizes.sum()), len(arrays)
    within = float(sum(((one - one.mean()) ** 2).sum() for one in arrays) / (total - count)) if total > count else None
    if count < 2:
        return None, within
    mean = np.concatenate(arrays).mean()
    square = sum(len(one) * (one.mean() - mean) ** 2 for one in arrays) / (count - 1)
    size = (total - (sizes**2).sum() / total) / (count - 1)
    return float((square - (within or 0.0)) / size), within


class CrossedVariances(NamedTuple):
    """Variances of a table's values by source; unbiased, so they may be negative."""

    rows: float
    columns: float
    residual: float


def crossed_variances(table: np.ndarray) -> CrossedVariances:
    """Variances of the rows, the columns and the rest of a table, [R, C], all of them random, at least two each.

    For runs x examples: a run's mean over C examples varies by the rows' variance over runs, and by that of the columns
    / C over draws of examples. (Two-way analysis of variance without replication; Searle et al. 1992, section 4.3.)
    """
    rows, columns = table.shape
    row_means, column_means, mean = table.mean(1), table.mean(0), table.mean()
    rest = table - row_means[:, None] - column_means[None, :] + mean
    residual = (rest**2).sum() / ((rows - 1) * (columns - 1))
    of_rows = (columns * row_means.var(ddof=1) - residual) / columns
    of_columns = (rows * column_means.var(ddof=1) - residual) / rows
    return CrossedVariances(float(of_rows), float(of_columns), float(residual))


def equivalence_p_value(level: Scores, baseline: Scores, margin: float, *, paired: bool) -> float:
    """P-value of a difference of at least `margin` in either direction: two one-sided t-tests (Schuirmann 1987)."""
    x, y = np.asarray(level, np.float64), np.asarray(baseline, np.float64)
    if _is_constant(x - y, x, y) if paired else _is_constant(x, x) and _is_constant(y, y):
        return float(abs(x.mean() - y.mean()) >= margin)

    def p_value(shift: float, alternative: str) -> float:
        if paired:
            return float(stats.ttest_rel(x + shift, y, alternative=alternative).pvalue)
        return float(stats.ttest_ind(x + shift, y, equal_var=False, alternative=alternative).pvalue)

    return max(p_value(margin, "greater"), p_value(-margin, "less"))


def permutation_p_value(level: Scores, baseline: Scores, *, paired: bool) -> float:
    """P-value of no difference of two means, two-sided, by permutations of seeds: exact for few seeds.

    For scores such as failure rates, whose spread may be 0 in a few seeds although it is not 0.

    Args:
      level, baseline: as in `t_estimate`.
      paired: as in `t_estimate`; then the scores of a seed are swapped.
    """
    result = stats.permutation_test(
        (np.asarray(level, np.float64), np.asarray(baseline, np.float64)),
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        permutation_type="samples" if paired else "independent",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return min(1.0, float(result.pvalue))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted for the number of comparisons (Holm 1979).

    None is a comparison that was planned and could not be made. It counts, and stays None: which ones fail must not
    change what the others show.
    """
    known = np.array([1.0 if one is None else one for one in p_values])
    order, adjusted = np.argsort(known), np.zeros(len(known))
    multiplied = known[order] * np.arange(len(known), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(multiplied))
    return [None if before is None else float(after) for before, after in zip(p_values, adjusted, strict=True)]


def detectable_difference(
    standard_deviation: float, seeds: int, *, paired: bool, alpha: float = 0.05, power: float = 0.8
) -> float:
    """The smallest difference that this many seeds a level show with this power, for normal scores.

    Paired, t has n - 1 degrees of freedom. Not paired, Welch's t of levels with equal spreads is noncentral t with
    2n - 2, and independent of the share b of one level in the sum of both sample variances. Its critical value depends
    on b, because Welch's degrees of freedom are (n - 1) / (b^2 + (1 - b)^2): the power is the mean over the
    distribution of b, Beta((n - 1) / 2, (n - 1) / 2).

    Args:
      standard_deviation: if `paired`, of the differences; else of the scores of a level.
      seeds: n, of each level, at least 2.
      paired: whether the seeds are paired.
      alpha: two-sided level of the test.
      power: probability of showing the difference.
    """
    return standard_deviation * _detectable_effect(seeds, paired, alpha, power)


@functools.cache
def _detectable_effect(seeds: int, paired: bool, alpha: float, power: float) -> float:
    """`detectable_difference` in standard deviations."""
    if paired:
        degrees, welch, weights, per_deviation = seeds - 1, np.array([seeds - 1.0]), np.ones(1), np.sqrt(seeds)
    else:
        nodes, weights = special.roots_jacobi(NODES, (seeds - 3) / 2, (seeds - 3) / 2)
        share, weights = (1 + nodes) / 2, weights / weights.sum()
        degrees, welch = 2 * seeds - 2, (seeds - 1) / (share**2 + (1 - share) ** 2)
        per_deviation = np.sqrt(seeds / 2)
    critical = stats.t.ppf(1 - alpha / 2, welch)

    def excess(effect: float) -> float:
        shift = effect * per_deviation
        # The second tail is nct.cdf(-critical, degrees, shift), which SciPy gives as NaN where it is nearly 0.
        shown = stats.nct.sf(critical, degrees, shift) + stats.nct.sf(critical, degrees, -shift)
        return float(weights @ shown) - power

    most = 1.0
    while excess(most) < 0:
        most *= 2
    return float(optimize.brentq(excess, 0.0, most))


def verdict(difference: float, p_value: float, equivalence: float, alpha: float = 0.05) -> Verdict:
    """The result of a comparison from its p-values, both adjusted for the number of comparisons.

    A significant difference within the margin of equivalence is "equal": it is too small to matter.
    """
    if equivalence < alpha:
        return "equal"
    if p_value < alpha:
        return "higher" if difference > 0 else "lower"
    return "undecided"
