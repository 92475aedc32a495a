"""The variance of a task's scores by source: pretraining seed, fine-tuning seed, and the examples of the test set."""

from typing import TypedDict

import numpy as np

from bert_jax import statistics
from bert_jax.experiments.budget import Cell
from bert_jax.experiments.cell_records import Records, finite_scores
from bert_jax.experiments.study import Study


class VarianceSplit(TypedDict):
    """Variances of a cell's score on a task. None: this source was not sampled, or not apart from another one.

    They are estimates without a lower bound: where a source adds little, its estimate may be negative.
    """

    cell: str
    task: str
    models: int
    """Pretraining runs with a score; 1 if the cell is one model."""
    finetuning_runs: int
    """Of all of them."""
    pretraining: float | None
    """Of the mean over fine-tuning seeds. Without a second fine-tuning run of a model, of both seeds together."""
    finetuning: float | None
    test_set: float | None
    """Of the mean over the examples of dev, where the score is one, as if other examples had been drawn."""
    standard_error: float | None
    """Of the cell's mean, from the sources that were sampled; negative variances count as 0."""


def split_variances(study: Study, cells: list[Cell], records: Records) -> list[VarianceSplit]:
    """The sources of variation that MultiBERTs samples (Sellam et al. 2022), for every cell and task.

    Seeds are a nested random-effects model, fine-tuning within pretraining; examples are crossed with pretraining runs.

    Args:
      study: the study.
      cells: all of its cells.
      records: of all runs.
    """
    return [_split(cell, task, records) for task in study.tasks for cell in cells]


def _split(cell: Cell, task: str, records: Records) -> VarianceSplit:
    tuned = [one["finetuned"][task] for one in records[cell.name] if one is not None and task in one["finetuned"]]
    groups = [scores for one in tuned if (scores := finite_scores(one))]
    count = sum(map(len, groups))
    if len(cell.models) == 1:
        everything = np.concatenate([*groups, []])
        pretraining, finetuning = None, float(everything.var(ddof=1)) if count > 1 else None
    else:
        pretraining, finetuning = statistics.nested_variances(groups)
    matrix = [one["examples"] for one in tuned if one["examples"]]
    test_set = None
    if len(matrix) > 1:
        test_set = statistics.crossed_variances(np.array(matrix)).columns / len(matrix[0])
    models = 1 if len(cell.models) == 1 else len(groups)
    parts = [(pretraining, len(groups)), (finetuning, count), (test_set, 1)]
    sampled = [max(0.0, variance) / number for variance, number in parts if variance is not None]
    return {
        "cell": cell.name,
        "task": task,
        "models": models,
        "finetuning_runs": count,
        "pretraining": pretraining,
        "finetuning": finetuning,
        "test_set": test_set,
        "standard_error": float(np.sqrt(sum(sampled))) if sampled else None,
    }
