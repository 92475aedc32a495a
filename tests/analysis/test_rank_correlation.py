"""Spearman's correlation beside SciPy's."""

import numpy as np
import scipy.stats

from bert_jax.analysis.rank_correlation import rank_correlation


def test_rank_correlation_is_spearmans():
    """Along the last axis, with ties."""
    first, second = np.random.default_rng(0).integers(0, 9, (2, 3, 4, 30)).astype(float)
    expected = [
        [scipy.stats.spearmanr(a, b).statistic for a, b in zip(*rows, strict=True)]
        for rows in zip(first, second, strict=True)
    ]
    np.testing.assert_allclose(rank_correlation(first, second), expected, rtol=1e-12)
    assert np.isnan(rank_correlation(np.ones((1, 3)), first[0, :1, :3])).all()
    assert np.isnan(rank_correlation(np.ones(3), np.arange(3)))
