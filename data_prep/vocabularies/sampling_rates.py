"""How much text to take of each part of a mixture; `bert_jax.data.mixture` says which shares they get."""

from collections.abc import Sequence

import numpy as np


def sampling_rates(sizes: Sequence[float] | np.ndarray, wanted: np.ndarray, limit: float) -> np.ndarray:
    """Which part of the documents to keep so that `limit` is reached with the wanted shares, float64 [num_parts].

    Where a part has too little text, all of it is kept, and its share falls short.

    Args:
      sizes: of the parts, positive.
      wanted: shares, float64 [num_parts].
      limit: sum of what is kept, in the unit of the sizes.
    """
    return np.minimum(1.0, limit * wanted / np.asarray(sizes, np.float64))


def largest_sample(sizes: Sequence[float] | np.ndarray, wanted: np.ndarray) -> float:
    """How much can be kept with the wanted shares, and nothing of it twice; in the unit of the sizes."""
    return float((np.asarray(sizes, np.float64) / wanted).min())
