"""Held-out metrics, each with the figure that a model without any skill reaches on the same rows."""

from collections.abc import Iterable, Mapping

import numpy as np

PREDICTED = ("mlm", "causal")
"""Whose losses are of one token among the vocabulary, so that an exponential is a perplexity."""
BASELINES = {
    **{f"{of}_{figure}": (f"unigram_{figure}", "unigram") for of in PREDICTED for figure in ("loss", "accuracy")},
    "pair_accuracy": ("pair_majority_accuracy", "majority"),
}
"""Metrics by name: the name of each one's baseline, and what a line for a person calls that baseline."""


def with_majority(means: Mapping[str, float]) -> dict[str, float]:
    """Means with `pair_majority_accuracy`, of a model that always answers the more frequent label, in place of
    `pair_negatives`, the share of label 1.
    """
    found = dict(means)
    if "pair_negatives" in found:
        negatives = found.pop("pair_negatives")
        found["pair_majority_accuracy"] = max(negatives, 1.0 - negatives)
    return found


def describe(metrics: Mapping[str, float]) -> str:
    """Held-out metrics in one line for a person, each followed by its baseline if the metrics have it."""
    parts = []
    for name, (baseline, label) in BASELINES.items():
        if name in metrics:
            beside = f" ({label} {metrics[baseline]:.4f})" if baseline in metrics else ""
            parts.append(f"{name} {metrics[name]:.4f}{beside}")
    return ", ".join(parts)


class Scores:
    """Sums over evaluation batches; divided once, at the end."""

    def __init__(self, token_counts: np.ndarray, sep_id: int):
        """Nothing is scored yet.

        Args:
          token_counts: how often each id occurs in the training splits, float64 [vocab_size].
          sep_id: of [SEP], which no corpus holds but a causal model predicts.
        """
        self.token_counts, self.sep_id = token_counts, sep_id
        self.totals: dict[str, np.ndarray] = {}
        self.targets = np.zeros_like(token_counts)

    def add(self, prepared: dict[str, np.ndarray], sums: dict[str, tuple]) -> None:
        """Count one batch: its prepared rows, and (total, weight) of every quantity."""
        for name, pair in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + np.asarray(pair, np.float64)
        labels, weights = np.ravel(prepared["target_labels"]), np.ravel(prepared["target_weights"])
        self.targets += np.bincount(labels, weights, minlength=len(self.targets))

    @classmethod
    def together(cls, parts: Iterable["Scores"]) -> "Scores":
        """The scores of several sets of batches as those of one."""
        parts = list(parts)
        whole = cls(parts[0].token_counts, parts[0].sep_id)
        for part in parts:
            whole.targets += part.targets
            for name, pair in part.totals.items():
                whole.totals[name] = whole.totals.get(name, 0.0) + pair
        return whole

    def means(self) -> dict[str, float]:
        """Every quantity over its weight, with baselines on the same targets and pairs.

        The baselines are `unigram_loss`, `unigram_accuracy` and `pair_majority_accuracy` (`with_majority`). The
        exponential of the loss over predicted tokens is `mlm_perplexity` or `causal_perplexity`. A quantity of weight
        0, such as the pair accuracy of rows without pair labels, is left out.

        The unigram model counts the training splits, plus one for every id; for [SEP] it takes the share that
        [SEP] has among the targets.
        """
        counts, predicted = self.token_counts + 1.0, self.targets.sum()
        of_sep = self.targets[self.sep_id]
        counts[self.sep_id] += counts.sum() * of_sep / max(predicted - of_sep, 1.0)
        unigram = counts / counts.sum()
        totals = self.totals | {
            "unigram_loss": np.array([-(self.targets * np.log(unigram)).sum(), predicted]),
            "unigram_accuracy": np.array([self.targets[unigram.argmax()], predicted]),
        }
        found = with_majority({name: float(total / weight) for name, (total, weight) in totals.items() if weight})
        with np.errstate(over="ignore"):  # of a run that diverges
            found |= {
                f"{of}_perplexity": float(np.exp(found[f"{of}_loss"])) for of in PREDICTED if f"{of}_loss" in found
            }
        return dict(sorted(found.items()))
