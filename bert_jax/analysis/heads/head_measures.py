"""Importance of heads and orders of pruning, on arrays. R are any leading axes, such as that of bootstrap samples."""

import numpy as np

from bert_jax.array_types import Float


def counts_to_remove(heads: int, step: float) -> list[int]:
    """Numbers of removed heads at shares 0, step, 2 * step ... 1 of all heads, rounded; different ones, ascending."""
    shares = [*np.arange(0, 1 - 1e-9, step), 1.0]
    return sorted({round(share * heads) for share in shares})


def removable_share(
    shares: Float[np.ndarray, " s"], losses: Float[np.ndarray, "*R s"], rise: float
) -> Float[np.ndarray, "*R"]:
    """The largest share of heads that can be removed before the loss rises by more than a share of its value.

    Args:
      shares: removed, ascending from 0.
      losses: at these shares.
      rise: allowed, as a share of the loss at 0.
    """
    first = losses[..., :1]
    is_allowed = np.logical_and.accumulate(losses <= first + rise * np.abs(first), axis=-1)
    return np.where(np.isnan(losses).any(-1), np.nan, np.asarray(shares)[is_allowed.sum(-1) - 1])


def top_share(importances: Float[np.ndarray, "*R heads"], share: float = 0.1) -> Float[np.ndarray, "*R"]:
    """The share of the total importance that the most important heads have; `share` if all are equally important.

    Args:
      importances: not normalised.
      share: of the heads, at least one; with a fraction of a head at the end.
    """
    ordered, heads = -np.sort(-importances, axis=-1), importances.shape[-1]
    counted = np.clip(max(1.0, share * heads) - np.arange(heads), 0, 1)
    total = ordered.sum(-1)
    return np.asarray(np.where(total > 0, (ordered * counted).sum(-1) / np.where(total > 0, total, 1), np.nan))
