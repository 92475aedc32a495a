"""Scores of the dev examples of a task: right or wrong by the fine-tuned model, and with parts of its body replaced."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import BootstrapMean, percentiles, resampled_means
from bert_jax.analysis.item_scores import MODEL, ItemScores
from bert_jax.array_types import Float
from bert_jax.finetune.task_data import TaskData, score
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.task_evaluation import scored_logits


class DevScores(NamedTuple):
    """Of one model."""

    score: float
    """Of the task, as `bert-jax finetune` reports it."""
    examples: dict[str, dict[str, Float[np.ndarray, "2 E"]]]
    """`TaskData.item_scores` by dev split."""


def dev_scores(model: LoadedModel, data: TaskData) -> DevScores:
    """The score of a model with the task's head, and those of the dev examples."""
    logits = scored_logits(model, data)
    examples = {split: data.item_scores(split, one) for split, one in logits.items()}
    return DevScores(score(data, lambda split: data.metrics(split, logits[split])), examples)


def restored_parts(layers: int) -> list[str]:
    """What is restored, by number of stages, in words."""
    return ["nothing", "embeddings", *(f"embeddings and {k} of {layers} layers" for k in range(1, layers + 1))]


def score_items(columns: Mapping[str, DevScores]) -> dict[str, ItemScores]:
    """A test for each metric whose value is a ratio of sums over examples.

    The number of a task with several dev splits (MNLI) is the mean over them, so the splits are the groups.

    Args:
      columns: by name, `item_scores.MODEL` first.
    """
    found = {}
    by_split = columns[MODEL].examples
    for metric in next(iter(by_split.values())):
        items = tuple(f"{split}, example {i}" for split, of in by_split.items() for i in range(of[metric].shape[1]))
        groups = tuple(item.partition(",")[0] for item in items) if len(by_split) > 1 else None
        of_columns = {
            name: np.concatenate([of[metric] for of in one.examples.values()], axis=1) for name, one in columns.items()
        }
        scores, weights = ({name: of[i] for name, of in of_columns.items()} for i in range(2))
        found[f"{metric} on dev"] = ItemScores(items, groups, scores, weights, unit="")
    return found


def score_means(
    scores: Sequence[float], main_metrics: Sequence[str], tests: Mapping[str, ItemScores]
) -> dict[str, Any]:
    """Scores of a task with 95 % intervals of the bootstrap over dev examples, as lists.

    The score is the mean of the main metrics, which share the bootstrap samples. Without a test of each of them (a
    correlation is no ratio of sums) the ends are None.

    Args:
      scores: by column of the tests.
      main_metrics: of the task.
      tests: of `score_items`.
    """
    of_metrics = [tests.get(f"{metric} on dev") for metric in main_metrics]
    if None in of_metrics:
        return BootstrapMean(list(scores), *[[None] * len(scores)] * 2)._asdict()
    sums, weights = (np.stack([x for one in of_metrics for x in one[i].values()]) for i in (2, 3))
    _, resampled = resampled_means(sums, weights, of_metrics[0].groups)
    ends = percentiles(resampled.reshape(len(resampled), len(of_metrics), len(scores)).mean(1))
    return BootstrapMean(list(scores), *ends.tolist())._asdict()
