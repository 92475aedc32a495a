"""Losses without heads: one head, a layer, all but one head of a layer, growing shares of all heads.

Shapes: L layers, N heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tqdm

from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.heads.head_measures import counts_to_remove
from bert_jax.array_types import Bool, Float
from bert_jax.interventions.importance import without_least_important
from bert_jax.interventions.pruning_masks import Evaluation

EvaluateMask = Callable[[Bool[np.ndarray, "L N"]], Evaluation]
"""The losses of the model with the heads of a mask."""
ImportanceOfMask = Callable[[Bool[np.ndarray, "L N"]], Float[np.ndarray, "L N"]]
"""The importances of heads in the model with the heads of a mask."""


class WithoutHead(NamedTuple):
    """The losses without each head."""

    sums: Float[np.ndarray, "L N E"]
    """As of `Evaluation`."""
    score: Float[np.ndarray, "L N"]


def leave_one_out(evaluate: EvaluateMask, shape: tuple[int, int], bar: tqdm.tqdm) -> WithoutHead:
    """Losses of the examples, and score, without each head of `shape`, L and N."""
    evaluations = []
    for layer, head in np.ndindex(*shape):
        mask = np.ones(shape, bool)
        mask[layer, head] = False
        evaluations.append(evaluate(mask))
        bar.update()
    sums, scores = (np.stack([getattr(one, name) for one in evaluations]) for name in ("sums", "score"))
    return WithoutHead(sums.reshape(*shape, -1), scores.reshape(shape))


def without_layers(
    evaluate: EvaluateMask, importances: Float[np.ndarray, "L N"], bar: tqdm.tqdm
) -> dict[str, dict[str, list[Any]]]:
    """Loss and score without all heads of a layer, and without all but its most important one, by layer.

    Michel et al. (2019, section 3.3) try all heads of a layer on held-out data instead of the most important one.

    Args:
      evaluate: see `Evaluate`.
      importances: by which a layer's head is chosen.
      bar: updated twice per layer.
    """
    best = importances.argmax(1)
    found: dict[str, dict[str, list[Any]]] = {}
    for name, kept in (("no_head", None), ("one_head", best)):
        evaluations = []
        for layer in range(len(importances)):
            mask = np.ones(importances.shape, bool)
            mask[layer] = False
            if kept is not None:
                mask[layer, kept[layer]] = True
            evaluations.append(evaluate(mask))
            bar.update()
        found[name] = {"loss": [one.loss for one in evaluations], "score": [one.score for one in evaluations]}
    found["one_head"]["head"] = best.tolist()
    return found


def prune(
    evaluate: EvaluateMask,
    importance: ImportanceOfMask,
    shape: tuple[int, int],
    *,
    step: float,
    iterative: bool,
    bar: tqdm.tqdm,
) -> tuple[dict[str, Any], list[Evaluation]]:
    """Loss and score with growing shares of the heads removed, the least important ones first.

    Args:
      evaluate, importance: see `Evaluate` and `Importance`.
      shape: (L, N).
      step: share of all heads that is removed at a time.
      iterative: compute the importances of the heads that are left before every removal, not only before the first.
      bar: updated once per share.

    Returns:
      `removed`, the numbers of heads, `loss`, with its intervals over examples, and `score` at each, `order`, [layer,
      head, share at which it is removed] for all heads; and the evaluations.
    """
    mask, counts = np.ones(shape, bool), counts_to_remove(int(np.prod(shape)), step)
    evaluations, current, order = [], None, []
    for count in counts:
        more = count - int((~mask).sum())
        if more:
            current = importance(mask) if current is None or iterative else current
            left = without_least_important(current, mask, more)
            order += [[int(i), int(j), count / mask.size] for i, j in np.argwhere(mask & ~left)]
            mask = left
        evaluations.append(evaluate(mask))
        bar.update()
    loss = bootstrap_mean(np.stack([one.sums for one in evaluations]), None, evaluations[0].weights)
    about = {"removed": counts, "loss": loss._asdict(), "score": [one.score for one in evaluations], "order": order}
    return about, evaluations
