"""Held-out metrics, each with the value of a trivial baseline on the same rows."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bert_jax.array_types import Float
from bert_jax.objectives.objectives import TOKEN_OBJECTIVES

BASELINES = {
    **{f"{of}_{kind}": (f"unigram_{kind}", "unigram") for of in TOKEN_OBJECTIVES for kind in ("loss", "accuracy")},
    "pair_accuracy": ("pair_majority_accuracy", "majority"),
}
"""By metric: the name of its baseline metric, and the baseline's label in `format_metrics`."""


DETECTION_METRICS = ("rtd_loss", "rtd_accuracy", "rtd_precision", "rtd_recall", "rtd_auc", "rtd_replaced")
"""Those of replaced-token detection, without a baseline."""


def derive_metrics(means: Mapping[str, Any]) -> dict[str, float]:
    """Replace what metrics are derived from by these metrics.

    `pair_negatives`, the share of label 1, becomes `pair_majority_accuracy`, the accuracy of a model that always
    predicts the more frequent label; `rtd_histogram` becomes `rtd_auc`, unless a class has no token.
    """
    metrics = dict(means)
    if "pair_negatives" in metrics:
        negatives = metrics.pop("pair_negatives")
        metrics["pair_majority_accuracy"] = max(negatives, 1.0 - negatives)
    if "rtd_histogram" in metrics:
        histogram = np.asarray(metrics.pop("rtd_histogram"), np.float64)
        if histogram.any(axis=1).all():
            metrics["rtd_auc"] = area_under_curve(histogram)
    return metrics


def area_under_curve(histogram: Float[np.ndarray, "2 bins"]) -> float:
    """Area under the ROC curve: the probability that a random positive scores higher than a random negative.

    A pair in the same bin counts as a half, so the area is that of the scores rounded to bins. It is exact but for
    pairs whose scores share a bin: their order adds or takes at most half of their share.

    Args:
      histogram: weight of negatives and of positives by score, in ascending order.
    """
    negatives, positives = histogram
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / (negatives.sum() * positives.sum()))


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Held-out metrics as one line of text: those of pretraining with their baselines, or all."""
    if BASELINES.keys().isdisjoint(metrics):
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    parts = []
    for name, (baseline, label) in BASELINES.items():
        if name in metrics:
            suffix = f" ({label} {metrics[baseline]:.4f})" if baseline in metrics else ""
            parts.append(f"{name} {metrics[name]:.4f}{suffix}")
    parts += [f"{name} {metrics[name]:.4f}" for name in DETECTION_METRICS if name in metrics]
    return ", ".join(parts)


class EvaluationSums:
    """Sums of all quantities over evaluation batches; `means` divides once, at the end."""

    def __init__(self, token_counts: np.ndarray, sep_id: int):
        """Empty sums.

        Args:
          token_counts: count of each id in the training splits, float64 [vocab_size].
          sep_id: id of [SEP], which is not in the corpora but is predicted by a causal model.
        """
        self.token_counts, self.sep_id = token_counts, sep_id
        self.totals: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.targets = np.zeros_like(token_counts)

    def add(self, prepared: dict[str, np.ndarray], sums: dict[str, tuple]) -> None:
        """Add one batch: its prepared rows, and (total, weight) of every quantity."""
        for name, pair in sums.items():
            self._add(name, pair)
        labels, weights = np.ravel(prepared["target_labels"]), np.ravel(prepared["target_weights"])
        self.targets += np.bincount(labels, weights, minlength=len(self.targets))

    def _add(self, name: str, pair: tuple) -> None:
        total, weight = (np.asarray(x, np.float64) for x in pair)
        before = self.totals.get(name, (0.0, 0.0))
        self.totals[name] = before[0] + total, before[1] + weight

    @classmethod
    def merge(cls, parts: Iterable["EvaluationSums"]) -> "EvaluationSums":
        """The sums of several sets of batches."""
        parts = list(parts)
        merged = cls(parts[0].token_counts, parts[0].sep_id)
        for part in parts:
            merged.targets += part.targets
            for name, pair in part.totals.items():
                merged._add(name, pair)
        return merged

    def means(self) -> dict[str, float]:
        """The mean of every quantity, with baselines on the same targets and pairs.

        The baselines are `unigram_loss`, `unigram_accuracy` and `pair_majority_accuracy`
        (`derive_metrics`). The exponential of the loss over predicted tokens is `mlm_perplexity`, `causal_perplexity`
        or `generator_perplexity`. A quantity of weight 0, such as the pair accuracy of rows without pair labels, is
        omitted.

        The unigram model uses the token counts of the training splits plus one for every id; for [SEP] it uses the
        share of [SEP] among the targets.
        """
        counts, predicted = self.token_counts + 1.0, self.targets.sum()
        of_sep = self.targets[self.sep_id]
        counts[self.sep_id] += counts.sum() * of_sep / max(predicted - of_sep, 1.0)
        unigram = counts / counts.sum()
        totals = self.totals | {
            "unigram_loss": (-(self.targets * np.log(unigram)).sum(), predicted),
            "unigram_accuracy": (self.targets[unigram.argmax()], predicted),
        }
        means = {name: total / weight for name, (total, weight) in totals.items() if weight}
        metrics = {name: float(value) for name, value in derive_metrics(means).items()}
        with np.errstate(over="ignore"):  # the loss of a diverged run
            metrics |= {
                f"{of}_perplexity": float(np.exp(metrics[f"{of}_loss"]))
                for of in TOKEN_OBJECTIVES
                if f"{of}_loss" in metrics
            }
        return dict(sorted(metrics.items()))


def mean_difference(differences: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """The difference of two weighted means, and its standard error: that of the ratio of two sums over the same
    examples (Cochran 1977, section 2.11); NaN for one example.

    Args:
      differences: of the two totals of each example.
      weights: of each example, the same for both totals.
    """
    count, total = len(weights), weights.sum()
    mean = differences.sum() / total
    residuals = differences - mean * weights
    error = np.sqrt(count / (count - 1) * np.square(residuals).sum()) / total if count > 1 else np.nan
    return float(mean), float(error)
