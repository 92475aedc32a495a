"""Importance of heads and feed-forward units, on arrays.

Shapes: L layers, n heads or units of a layer, K of them that are kept, E examples.
"""

import numpy as np

from bert_jax.array_types import Bool, Float, Int
from bert_jax.config import ModelConfig
from bert_jax.model.layer_plan import parameter_groups


def importance(derivatives: Float[np.ndarray, "E L N"]) -> Float[np.ndarray, "L N"]:
    """Mean over examples of the absolute derivative of the loss by a head's factor (Michel et al. 2019, equation 2).

    Args:
      derivatives: of each example's loss.
    """
    return np.abs(derivatives.astype(np.float64)).mean(0)


def normalize_by_layer(importances: Float[np.ndarray, "L N"]) -> Float[np.ndarray, "L N"]:
    """Importances divided by their L2 norm in the layer (Michel et al. 2019, section 2.3); a layer of zeros stays."""
    norms = np.sqrt(np.square(importances).sum(1, keepdims=True))
    return importances / np.where(norms > 0, norms, 1)


def without_least_important(
    importances: Float[np.ndarray, "L N"], mask: Bool[np.ndarray, "L N"], count: int
) -> np.ndarray:
    """The mask without the `count` least important of its heads; of equal ones, the lowest layer's first."""
    order = np.argsort(np.where(mask, importances, np.inf), axis=None, kind="stable")[:count]
    left = mask.copy()
    left.flat[order] = False
    return left


def most_important(
    importances: Float[np.ndarray, "L n"], config: ModelConfig, count: int, among: Bool[np.ndarray, "L n"] | None = None
) -> Int[np.ndarray, "L K"]:
    """The most important heads or units of every layer, ascending; layers with shared parameters keep the same ones.

    Args:
      importances: not normalised: those of layers that share parameters are added.
      config: of the model.
      count: how many a layer keeps, K.
      among: which ones are chosen from, at least K in a layer; None: all.
    """
    groups = np.array(parameter_groups(config))
    values = importances if among is None else np.where(among, importances, -np.inf)
    totals = np.stack([values[groups == group].sum(0) for group in groups])
    return np.sort(np.argsort(-totals, axis=1, kind="stable")[:, :count], axis=1)
