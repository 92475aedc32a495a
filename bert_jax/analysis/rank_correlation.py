"""Spearman's rank correlation."""

import numpy as np
from scipy.stats import rankdata


def rank_correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's correlation along the last axis; equal values share their mean rank.

    Args:
      first: [..., n].
      second: of the same shape.

    Returns:
      float64 [...]; NaN where one side is constant.
    """
    a, b = (rankdata(values, axis=-1) - (np.shape(values)[-1] + 1) / 2 for values in (first, second))
    norm = np.sqrt(np.square(a).sum(-1) * np.square(b).sum(-1))
    with np.errstate(invalid="ignore"):
        return np.asarray((a * b).sum(-1) / norm)
