"""Held-out metrics, each with the value of a trivial baseline on the same rows."""

from collections.abc import Iterable, Mapping

import numpy as np

from bert_jax.objectives.objectives import TOKEN_OBJECTIVES

BASELINES = {
    **{f"{of}_{kind}": (f"unigram_{kind}", "unigram") for of in TOKEN_OBJECTIVES for kind in ("loss", "accuracy")},
    "pair_accuracy": ("pair_majority_accuracy", "majority"),
}
"""By metric: the name of its baseline metric, and the baseline's label in `format_metrics`."""


def with_pair_majority_baseline(means: Mapping[str, float]) -> dict[str, float]:
    """Replace `pair_negatives`, the share of label 1, by `pair_majority_accuracy`, the accuracy of a model that always
    predicts the more frequent label.
    """
    metrics = dict(means)
    if "pair_negatives" in metrics:
        negatives = metrics.pop("pair_negatives")
        metrics["pair_majority_accuracy"] = max(negatives, 1.0 - negatives)
    return metrics


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Held-out metrics as one line of text: those of pretraining with their baselines, or all."""
    if BASELINES.keys().isdisjoint(metrics):
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    parts = []
    for name, (baseline, label) in BASELINES.items():
        if name in metrics:
            suffix = f" ({label} {metrics[baseline]:.4f})" if baseline in metrics else ""
            parts.append(f"{name} {metrics[name]:.4f}{suffix}")
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
        self.totals: dict[str, np.ndarray] = {}
        self.targets = np.zeros_like(token_counts)

    def add(self, prepared: dict[str, np.ndarray], sums: dict[str, tuple]) -> None:
        """Add one batch: its prepared rows, and (total, weight) of every quantity."""
        for name, pair in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + np.asarray(pair, np.float64)
        labels, weights = np.ravel(prepared["target_labels"]), np.ravel(prepared["target_weights"])
        self.targets += np.bincount(labels, weights, minlength=len(self.targets))

    @classmethod
    def merge(cls, parts: Iterable["EvaluationSums"]) -> "EvaluationSums":
        """The sums of several sets of batches."""
        parts = list(parts)
        merged = cls(parts[0].token_counts, parts[0].sep_id)
        for part in parts:
            merged.targets += part.targets
            for name, pair in part.totals.items():
                merged.totals[name] = merged.totals.get(name, 0.0) + pair
        return merged

    def means(self) -> dict[str, float]:
        """The mean of every quantity, with baselines on the same targets and pairs.

        The baselines are `unigram_loss`, `unigram_accuracy` and `pair_majority_accuracy`
        (`with_pair_majority_baseline`). The exponential of the loss over predicted tokens is `mlm_perplexity` or
        `causal_perplexity`. A quantity of weight 0, such as the pair accuracy of rows without pair labels, is omitted.

        The unigram model uses the token counts of the training splits plus one for every id; for [SEP] it uses the
        share of [SEP] among the targets.
        """
        counts, predicted = self.token_counts + 1.0, self.targets.sum()
        of_sep = self.targets[self.sep_id]
        counts[self.sep_id] += counts.sum() * of_sep / max(predicted - of_sep, 1.0)
        unigram = counts / counts.sum()
        totals = self.totals | {
            "unigram_loss": np.array([-(self.targets * np.log(unigram)).sum(), predicted]),
            "unigram_accuracy": np.array([self.targets[unigram.argmax()], predicted]),
        }
        metrics = with_pair_majority_baseline(
            {name: float(total / weight) for name, (total, weight) in totals.items() if weight}
        )
        with np.errstate(over="ignore"):  # the loss of a diverged run
            metrics |= {
                f"{of}_perplexity": float(np.exp(metrics[f"{of}_loss"]))
                for of in TOKEN_OBJECTIVES
                if f"{of}_loss" in metrics
            }
        return dict(sorted(metrics.items()))
