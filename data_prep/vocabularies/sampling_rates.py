"""Sampling rates of the sources of a mixture, for shares from `bert_jax.data.mixture`."""

from collections.abc import Sequence

import numpy as np


def sampling_rates(sizes: Sequence[float] | np.ndarray, shares: np.ndarray, limit: float) -> np.ndarray:
    """Share of each source's documents to sample, for a total size of `limit` with the given shares, float64 [n].

    If a source has too little text, all of it is used, and its share is smaller.

    Args:
      sizes: of the sources, positive.
      shares: of the sources in the sample, float64 [n].
      limit: total size of the sample, in the unit of the sizes.
    """
    return np.minimum(1.0, limit * shares / np.asarray(sizes, np.float64))


def largest_sample(sizes: Sequence[float] | np.ndarray, shares: np.ndarray) -> float:
    """The largest possible sample with the given shares without repeating text, in the unit of the sizes."""
    return float((np.asarray(sizes, np.float64) / shares).min())
