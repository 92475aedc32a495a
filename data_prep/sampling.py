"""How much of a mixture each of its parts gets."""

from collections.abc import Sequence

import numpy as np


def shares(sizes: Sequence[float] | np.ndarray, exponent: float) -> np.ndarray:
    """Share of each part, float64 [num_parts], proportional to its share of all sizes to the power of `exponent`.

    Below 1, small parts get more than their size says. Multilingual BERT took 0.7 for its languages
    (google-research/bert, multilingual.md).

    Args:
      sizes: positive, e.g. bytes of text.
      exponent: 1 for shares by size, 0 for equal ones.
    """
    sizes = np.asarray(sizes, np.float64)
    if not (sizes > 0).all():
        raise ValueError(f"sizes must be positive, not {sizes.tolist()}")
    powers = (sizes / sizes.sum()) ** exponent
    return powers / powers.sum()


def keep_rates(sizes: Sequence[float] | np.ndarray, wanted: np.ndarray, limit: float) -> np.ndarray:
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
