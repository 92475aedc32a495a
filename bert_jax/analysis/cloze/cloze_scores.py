"""Measures of cloze tests on arrays: preferences, ranks, agreement of two predictions. Ties count half.

Shapes: n items; V candidate tokens.
"""

from typing import Any

import numpy as np

from bert_jax.array_types import Float, Int


def preference(better: Float[np.ndarray, " n"], worse: Float[np.ndarray, " n"]) -> dict[str, Any]:
    """How often the better of two is preferred.

    Args:
      better: scores of the sentences or words that should win.
      worse: scores of the others.

    Returns:
      accuracy in [0, 1], where a tie counts half (None without items), and the numbers of items and ties.
    """
    ties = int((better == worse).sum())
    wins = int((better > worse).sum())
    return {"accuracy": share(wins + ties / 2, len(better)), "items": len(better), "ties": ties}


def wins(better: Float[np.ndarray, " n"], worse: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """1 where the better of two is preferred, 0.5 where they tie, 0 elsewhere."""
    return (better > worse) + 0.5 * (better == worse)


def share(count: float, total: int) -> float | None:
    """count / total; None if the total is 0."""
    return float(count / total) if total else None


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


def precision_at(gold_ranks: Float[np.ndarray, " n"], k: int) -> float | None:
    """Share of ranks, from 1, of at most k (P@k); None without ranks."""
    return share(int((gold_ranks <= k).sum()), len(gold_ranks))
