"""Failure rates of a study's runs: a comparison of its own, beside those of the scores.

Runs that failed are part of every mean of scores as long as they have a score: leaving them out would select runs by
their outcome, and levels with equal means and unequal spreads would differ.
"""

from typing import NamedTuple, TypedDict

import numpy as np

from bert_jax import statistics
from bert_jax.experiments.budget import Cell
from bert_jax.experiments.cell_records import Records
from bert_jax.experiments.level_pairs import level_pairs
from bert_jax.experiments.study import Study

PRETRAINING = "pretraining"


class FailureRate(TypedDict):
    """The failure rates of a level and of the baseline of its factor."""

    factor: str
    level: str
    baseline: str
    runs_of: str
    """PRETRAINING, or the task that runs were fine-tuned on."""
    runs: int
    """Of the level; of a task, fine-tuning runs."""
    runs_baseline: int
    failed: int
    """Of the level: without a score, or of a task, not above the best constant prediction."""
    failed_baseline: int
    diverged: int
    """Of the failed runs of the level, those without a score: they diverged, or ended with an error."""
    diverged_baseline: int
    p_value: float | None
    """Of no difference, by a permutation of seeds; None: fewer than two seeds on a side."""
    p_value_holm: float | None
    """Adjusted for the number of comparisons of failure rates."""


class _Failures(NamedTuple):
    runs: int
    failed: int
    diverged: int
    rates: dict[int, float]
    """Share of failed runs by index of the seed."""


def compare_failures(study: Study, cells: list[Cell], records: Records) -> list[FailureRate]:
    """Every level against the baseline of its factor, in pretraining and in each task, of runs that they do not share.

    Seeds are permuted, not runs: the fine-tuning runs of a pretraining seed share its randomness.

    Args:
      study: the study.
      cells: all of its cells.
      records: of all runs.
    """
    rows: list[FailureRate] = []
    for pair in level_pairs(study, cells):
        exists = pair.share_pretraining or study.is_of_models
        for name in (*(() if exists else (PRETRAINING,)), *study.tasks):
            level, baseline = (_failures(one, records, name) for one in (pair.level_cells, pair.baseline_cells))
            x, y = level.rates, baseline.rates
            if pair.paired:
                x, y = ({index: one[index] for index in one if index in x and index in y} for one in (x, y))
            enough = min(len(x), len(y)) >= 2
            scores = list(x.values()), list(y.values())
            row = FailureRate(
                factor=pair.factor,
                level=pair.level,
                baseline=pair.baseline,
                runs_of=name,
                runs=level.runs,
                runs_baseline=baseline.runs,
                failed=level.failed,
                failed_baseline=baseline.failed,
                diverged=level.diverged,
                diverged_baseline=baseline.diverged,
                p_value=statistics.permutation_p_value(*scores, paired=pair.paired) if enough else None,
                p_value_holm=None,
            )
            rows.append(row)
    adjusted = statistics.holm([row["p_value"] for row in rows])
    for row, p_value in zip(rows, adjusted, strict=True):
        row["p_value_holm"] = p_value
    return rows


def _failures(cells: list[Cell], records: Records, name: str) -> _Failures:
    """The failed runs of some cells; of a task, those of pretraining runs that did not fail."""
    total, rates = np.zeros(3, int), {}
    for index in range(len(records[cells[0].name])):
        counts = np.zeros(3, int)
        for record in (records[cell.name][index] for cell in cells):
            if record is None or (name != PRETRAINING and name not in record["finetuned"]):
                continue
            if name == PRETRAINING:
                counts += [1, bool(record["error"]), bool(record["error"])]
            else:
                task = record["finetuned"][name]
                counts += [len(task["scores"]), task["failed"], task["scores"].count(None)]
        total += counts
        if counts[0]:
            rates[index] = float(counts[1] / counts[0])
    return _Failures(*map(int, total), rates)
