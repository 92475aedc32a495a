"""Intervals, tests and power of comparisons: closed forms, simulations with known truth, and edge cases."""

import numpy as np
import pytest

pytest.importorskip("scipy")
from scipy import stats

from bert_jax import statistics


def simulated_tables(count, seeds, effect, rng):
    """(level, baseline) scores of paired seeds: a part shared by a seed's runs, and noise of standard deviation 1."""
    shared = rng.normal(scale=3.0, size=(count, seeds))
    return shared + effect + rng.normal(size=shared.shape), shared + rng.normal(size=shared.shape)


def test_t_estimate_is_students():
    level, baseline = np.array([1.0, 2.0, 4.0]), np.array([0.5, 2.5, 3.0])
    estimate = statistics.t_estimate(level, baseline, paired=True)
    differences = level - baseline
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    assert estimate[:3] == pytest.approx((1 / 3, 1 / 3 - half, 1 / 3 + half))
    assert estimate.clusters == 3
    assert estimate.p_value == pytest.approx(stats.ttest_rel(level, baseline).pvalue)
    welch = statistics.t_estimate(level, baseline, paired=False)
    assert welch.p_value == pytest.approx(stats.ttest_ind(level, baseline, equal_var=False).pvalue)
    # Without spread: permutations of seeds, 2 of 2^3 and 2 of 20. The limit of the t-test would be 0.
    assert statistics.t_estimate([2.0] * 3, [1.0] * 3, paired=True)[:4] == (1.0, 1.0, 1.0, 0.25)
    assert statistics.t_estimate([2.0] * 3, [1.0] * 3, paired=False).p_value == pytest.approx(0.1)
    assert statistics.t_estimate([2.0, 2.0], [2.0, 2.0], paired=False).p_value == 1.0
    # Nor is rounding a spread: the differences are 0.01 up to an ulp.
    rounded = [0.94, 0.86, 0.86], [0.93, 0.85, 0.85]
    assert np.ptp(np.subtract(*rounded)) > 0 and stats.ttest_rel(*rounded).pvalue < 1e-20
    assert statistics.t_estimate(*rounded, paired=True).p_value == 0.25
    assert statistics.equivalence_p_value(*rounded, 0.02, paired=True) == 0.0
    with pytest.raises(ValueError, match="two seeds"):
        statistics.t_estimate([1.0], [1.0], paired=True)


def test_bca_interval():
    values = np.random.default_rng(1).exponential(size=40)
    low, high = statistics.bca_interval(values, seed=3)
    assert low < values.mean() < high
    assert (low, high) == statistics.bca_interval(values, seed=3)
    assert high - values.mean() > values.mean() - low  # skewed to the right, unlike Student's
    assert statistics.bca_interval([0.5, 0.5], seed=0) == (0.5, 0.5)


def example_scores(rng, seeds, examples, accuracy, spread):
    """Correct or not, [S, E]: examples differ in difficulty, seeds by `spread`."""
    difficulty = rng.normal(scale=0.3, size=examples)
    quality = accuracy + spread * rng.normal(size=seeds)
    return (rng.random((seeds, examples)) < np.clip(quality[:, None] + difficulty, 0, 1)).astype(float)


def test_multibootstrap():
    rng = np.random.default_rng(2)
    scores = example_scores(rng, 6, 300, 0.6, 0.05)
    same = statistics.SeedScores.from_examples(scores)
    nothing = statistics.multibootstrap(same, same, 300, paired=True, seed=0)
    assert nothing == (0.0, 0.0, 0.0, 1.0, 6)
    unpaired = statistics.multibootstrap(same, same, 300, paired=False, seed=0)
    assert unpaired.low < 0 < unpaired.high and unpaired.difference == 0
    better = statistics.SeedScores.from_examples(np.maximum(scores, example_scores(rng, 6, 300, 0.3, 0.0)))
    found = statistics.multibootstrap(better, same, 300, paired=True, seed=0)
    assert 0 < found.low < found.difference < found.high and found.p_value == 1 / 1_000
    assert found == statistics.multibootstrap(better, same, 300, paired=True, seed=0)
    with pytest.raises(ValueError, match="6 and 5 seeds"):
        statistics.multibootstrap(same, same._replace(num_seeds=5), 300, paired=True, seed=0)


def test_multibootstrap_has_both_variances():
    """Its standard error is that of seeds and examples together, which each alone understates."""
    rng = np.random.default_rng(3)
    seeds, examples = rng.normal(size=40), rng.normal(size=60)
    level = statistics.SeedScores.from_examples(seeds[:, None] + 2.0 * examples[None, :])
    zero = statistics.SeedScores.from_examples(np.zeros((40, 60)))
    found = statistics.multibootstrap(level, zero, 60, paired=True, seed=1, resamples=4_000)
    expected = np.sqrt(seeds.var() / 40 + 4.0 * examples.var() / 60)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(expected, rel=0.06)


def test_holm():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([]) == []
    found = statistics.holm([0.01, None, 0.03])  # a comparison that could not be made counts
    assert found[1] is None and (found[0], found[2]) == pytest.approx((0.03, 0.06))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 200])
def test_the_detectable_difference_is_shown_with_its_power(paired, seeds):
    """The share of 40,000 simulated comparisons, and that of equal levels; t statistics as `t_estimate` computes them.

    Welch's test of few seeds finds fewer differences than its level where there are none.
    """
    rng = np.random.default_rng(seeds)
    effect = statistics.detectable_difference(np.sqrt(2.0) if paired else 1.0, seeds, paired=paired)
    x, y = rng.normal(size=(40_000, seeds)), rng.normal(size=(40_000, seeds))
    shown = []
    for level in (x + effect, x):
        test = stats.ttest_rel(level, y, axis=1) if paired else stats.ttest_ind(level, y, axis=1, equal_var=False)
        shown.append(np.mean(test.pvalue < 0.05))
    assert shown[0] == pytest.approx(0.8, abs=0.008)  # four standard errors
    assert (0.0456 if paired else 0) < shown[1] < 0.0544


def test_permutations_of_seeds():
    """Exact for few seeds: all failed against none is 2 of the 2^n or of the (2n choose n) permutations."""
    for paired, count in ((True, 2**6), (False, 924)):
        p_value = statistics.permutation_p_value([1.0] * 6, [0.0] * 6, paired=paired)
        assert p_value == pytest.approx(2 / count)
    assert statistics.permutation_p_value([0.0] * 3, [0.0] * 3, paired=True) == 1.0
    assert statistics.permutation_p_value([1.0, 0.0, 0.5], [0.0, 1.0, 0.5], paired=True) == 1.0


def test_equivalence_level():
    """At a true difference equal to the margin, equivalence is found in at most 5 % of the tables."""
    rng = np.random.default_rng(4)
    level, baseline = simulated_tables(1_000, 8, 4.0, rng)
    found = [
        statistics.equivalence_p_value(a, b, 4.0, paired=True) < 0.05 for a, b in zip(level, baseline, strict=True)
    ]
    assert 0.03 < np.mean(found) < 0.07
