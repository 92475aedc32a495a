"""Importance of heads and orders of pruning, on arrays. Shapes: L layers, N heads, E examples."""

from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Float


def counts_to_remove(heads: int, step: float) -> list[int]:
    """Numbers of removed heads at shares 0, step, 2 * step ... 1 of all heads, rounded; different ones, ascending."""
    shares = [*np.arange(0, 1 - 1e-9, step), 1.0]
    return sorted({round(share * heads) for share in shares})


def removable_share(shares: Sequence[float], losses: Sequence[float], rise: float) -> float:
    """The largest share of heads that can be removed before the loss rises by more than a share of its value.

    Args:
      shares: removed, ascending from 0.
      losses: at these shares.
      rise: allowed, as a share of the loss at 0.
    """
    allowed = losses[0] + rise * abs(losses[0])
    best = 0.0
    for share, loss in zip(shares, losses, strict=True):
        if loss > allowed:
            break
        best = share
    return float(best)


def top_share(importances: Float[np.ndarray, "L N"], share: float = 0.1) -> float:
    """The share of the total importance that the most important heads have; `share` if all are equally important.

    Args:
      importances: not normalised.
      share: of the heads, at least one; with a fraction of a head at the end.
    """
    ordered, count = np.sort(importances, axis=None)[::-1], max(1.0, share * importances.size)
    total = ordered.sum()
    if total == 0:
        return float("nan")
    whole = int(count)
    rest = ordered[whole] * (count - whole) if whole < len(ordered) else 0.0
    return float((ordered[:whole].sum() + rest) / total)
