"""Measures of cloze tests on arrays: preferences, ranks, agreement of two predictions. Ties count half.

Shapes: n items; V candidate tokens.
"""

from typing import Any

import numpy as np

from bert_jax.array_types import Float, Int

NORMAL_QUANTILE = 1.959963984540054
"""Of 0.975."""


def preference(better: Float[np.ndarray, " n"], worse: Float[np.ndarray, " n"]) -> dict[str, Any]:
    """How often the better of two is preferred.

    Args:
      better: scores of the sentences or words that should win.
      worse: scores of the others.

    Returns:
      accuracy in [0, 1] as `share_with_interval`, where a tie counts half, and the numbers of items and ties.
    """
    ties = int((better == worse).sum())
    count = wins(better, worse).sum()
    return share_with_interval("accuracy", count, len(better)) | {"items": len(better), "ties": ties}


def wins(better: Float[np.ndarray, " n"], worse: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """1 where the better of two is preferred, 0.5 where they tie, 0 elsewhere."""
    return (better > worse) + 0.5 * (better == worse)


def share_with_interval(name: str, count: float, total: int) -> dict[str, Any]:
    """A share, and as NAME_interval the ends of its 95 % interval of Wilson (1927); None without items.

    Groups have few items, of which often all are right: the interval of a bootstrap has no width there, and is too
    narrow elsewhere. An item that counts half makes this one wider than needed.
    """
    if not total:
        return {name: None, f"{name}_interval": [None, None]}
    value, z_squared = count / total, NORMAL_QUANTILE**2 / total
    center = (value + z_squared / 2) / (1 + z_squared)
    width = np.sqrt(z_squared * (value * (1 - value) + z_squared / 4)) / (1 + z_squared)
    return {name: float(value), f"{name}_interval": [float(max(0, center - width)), float(min(1, center + width))]}


def mean(values: list[float | None]) -> float | None:
    """The mean of the values that are not None; None without one."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def ranks_and_ties(scores: Float[np.ndarray, "n V"], gold: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of gold candidates, from 1; of tied candidates each has the mean of the ranks that they share.

    Args:
      scores: of the candidates; higher is better.
      gold: index of the right candidate.

    Returns:
      the ranks, float64 [n], and
      the number of other candidates with the same score, int64 [n].
    """
    own = np.take_along_axis(scores, gold[:, None], axis=1)
    tied = (scores == own).sum(1) - 1
    return 1 + (scores > own).sum(1) + tied / 2, tied
