"""The data of a fine-tuning task: encoded splits, metrics, baselines, predictions. One class per kind of task."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert_jax.array_types import Float
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath

Metrics = dict[str, float]
SELECTION = "selection"
"""Name of the split of training examples that `tasks.hold_out` holds out."""


class Split(NamedTuple):
    """A held-out split."""

    examples: EncodedExamples
    is_scored: bool
    """Whether the task's score includes it: dev splits. Predictions are written of all."""
    has_labels: bool = True
    """Whether it can be scored; test splits often have no labels."""


@runtime_checkable
class TaskData(Protocol):
    """What a task trains on, what it is scored by, and how its predictions are written."""

    kind: Literal["classification", "multilabel", "multiple_choice", "tagging", "span"]
    labels: tuple[str, ...]
    """Names of the head's outputs; a regression has one, and a multiple choice one for every ending."""
    train: EncodedExamples
    splits: Mapping[str, Split]
    """By name: dev and test, or for MNLI dev_matched and so on."""
    main_metrics: tuple[str, ...]
    """The task's score is their mean over the dev splits."""

    def metrics(self, split: str, logits: np.ndarray, dev_logits: np.ndarray | None = None) -> Metrics:
        """Metrics of a split with labels, from the logits of its examples or tokens.

        Args:
          split: its name.
          logits: of the split.
          dev_logits: of dev, on which a threshold is tuned; None: on the split itself, which is no test split.
        """
        ...

    def class_f1(self, split: str, logits: np.ndarray) -> Metrics:
        """F1 of each class in a split with labels, by name; empty if examples have no classes."""
        ...

    def baseline(self, split: str) -> Metrics:
        """The main metrics of the best constant prediction; what is not better, has failed."""
        ...

    def item_scores(self, split: str, logits: np.ndarray) -> dict[str, Float[np.ndarray, "2 E"]]:
        """Scores and weights of the examples of a split with labels, by metric: the metric is the ratio of their sums.

        Metrics that are no such ratio, such as correlations, are left out.
        """
        ...

    def write_predictions(self, directory: StoredPath, logits: Mapping[str, np.ndarray]) -> None:
        """Write predictions, if possible in the form that the task's benchmark takes, from the logits of all splits."""
        ...


def score(data: TaskData, metrics_of: Callable[[str], Metrics], splits: Sequence[str] | None = None) -> float:
    """The task's score: the mean of its main metrics over all dev splits, or over other splits with labels."""
    named = [name for name, split in data.splits.items() if split.is_scored] if splits is None else splits
    return float(np.mean([metrics_of(name)[metric] for name in named for metric in data.main_metrics]))


def labelled_tests(data: TaskData) -> list[str]:
    """The test splits with labels."""
    return [name for name, split in data.splits.items() if split.has_labels and name.startswith("test")]


def correct_examples(data: TaskData, split: str, logits: np.ndarray) -> np.ndarray:
    """Whether each example of a split with labels is right, bool [E], if the score is their mean; else bool [0]."""
    if data.kind not in ("classification", "multiple_choice") or data.main_metrics != ("accuracy",):
        return np.zeros(0, bool)
    return data.item_scores(split, logits)["accuracy"][0] > 0


def baseline_score(data: TaskData) -> float:
    """The score of the best constant prediction."""
    return score(data, data.baseline)


def metric_prefix(split: str) -> str:
    """Prefix of a split's metrics: none for dev and test, ``matched/`` for dev_matched, else its name."""
    kind, _, part = split.partition("_")
    return f"{part if kind in ('dev', 'test') else split}/".lstrip("/")


def write_json_lines(path: StoredPath, lines: list[dict]) -> None:
    """Write one JSON object per line; the file appears whole."""
    write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
