"""From the records of a study's runs to comparisons with verdicts: results.json.

Everything but ``timing`` and ``provenance`` is a function of the records' metrics, so an interrupted study ends with
the same results.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from bert_jax import statistics
from bert_jax.config import to_dict
from bert_jax.experiments.budget import Cell
from bert_jax.experiments.cell_records import (
    FORMAT_VERSION,
    RESULTS,
    CurvePoint,
    Records,
    StudyFile,
    TaskScores,
    code_by_run,
    read_record,
    runs_of,
)
from bert_jax.experiments.curves import CurveScale, ScoredRecord, ScoredRecords, score_curves
from bert_jax.experiments.failure_rates import FailureRate, compare_failures
from bert_jax.experiments.level_pairs import LevelPair, level_pairs
from bert_jax.experiments.study import METRICS, TOKENS_TO_LOSS, Levels, Study
from bert_jax.experiments.variances import VarianceSplit, split_variances
from bert_jax.provenance import Provenance, make_provenance
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.environment import describe_environment

MIN_SEEDS = 3
"""Fewer seeds get no verdict."""
POWER_SEEDS = (3, 5, 10, 20)
"""Numbers of seeds in the power table."""


class CellCost(TypedDict):
    """A cell and the cost of each of its runs; of given models only `parameters` is not 0."""

    name: str
    levels: Levels
    models: list[str]
    """See `Cell.models`."""
    seed: int
    """Of the run with index 0."""
    steps: int
    tokens: int
    flops: float
    parameters: int


class TaskResult(TypedDict):
    """`TaskScores` without examples."""

    scores: list[float | None]
    failed: int
    learning_rates: list[list[float]]


class RunResult(TypedDict):
    """The record of a run."""

    cell: str
    seed: int
    attempts: int
    error: str
    metrics: dict[str, float]
    """With those of the curve."""
    curve: list[CurvePoint]
    reached_loss: bool | None
    """See `ScoredRecord`."""
    tokens: int
    finetuned: dict[str, TaskResult]


class Comparison(TypedDict):
    """A level against the baseline of its factor in a metric; None: too few seeds, or not defined for this design."""

    factor: str
    level: str
    baseline: str
    metric: str
    verdict: statistics.Verdict | None
    seeds: int
    """Of the side with fewer."""
    unscored: int
    """Runs of the level without this score: they ended with an error, or all of their fine-tuning runs diverged."""
    unscored_baseline: int
    censored: int
    """Of `mlm_tokens_to_loss`: runs of the level that do not reach the loss, which count with their last tokens."""
    censored_baseline: int
    paired: bool
    margin: float
    level_mean: float | None
    level_deviation: float | None
    baseline_mean: float | None
    baseline_deviation: float | None
    difference: float | None
    low: float | None
    high: float | None
    bca_low: float | None
    bca_high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    bootstrap_p_value: float | None
    p_value: float | None
    equivalence: float | None
    p_value_holm: float | None
    equivalence_holm: float | None
    detectable: dict[str, float] | None
    """Differences shown with 80 % power, by number of seeds."""


class Results(TypedDict):
    """The content of results.json."""

    format_version: int
    study: str
    sampled: dict[str, str]
    equal: str
    alpha: float
    margins: dict[str, float]
    baseline: Levels
    cells: list[CellCost]
    curves: CurveScale | None
    comparisons: list[Comparison]
    failure_rates: list[FailureRate]
    variances: list[VarianceSplit]
    runs: list[RunResult]
    timing: dict[str, float]
    """Seconds of each run."""
    provenance: Provenance


def write_results(study: Study, cells: list[Cell], workdir: StoredPath, identity: StudyFile) -> dict[str, Any]:
    """Write results.json from the records of all runs, and return its content."""
    runs = runs_of(study, cells, workdir)
    records: Records = {cell.name: [read_record(run) for run in runs if run.cell is cell] for cell in cells}
    hashes = {f"corpus {number}": corpus for number, corpus in enumerate(identity["corpora"], 1)}
    if identity["tokenizer"]:
        hashes["tokenizer"] = identity["tokenizer"]
    provenance = make_provenance(
        describe_environment(),
        hashes=hashes | identity["models"] | identity["task_data"],
        configs={cell.name: _settings(cell) for cell in cells},
        made_by=code_by_run(runs),
    )
    results = make_results(study, cells, records) | {"provenance": provenance}
    write_atomic(workdir / RESULTS, json.dumps(results, indent=1).encode())
    return results


def _settings(cell: Cell) -> dict[str, Any]:
    """What determines the runs of a cell, but for their seed."""
    return ({"models": cell.models} if cell.models else to_dict(cell.config)) | {"tasks": cell.tasks}


def make_results(study: Study, cells: list[Cell], records: Records) -> dict[str, Any]:
    """The content of results.json (`Results`) without provenance: plain values.

    Args:
      study: the study.
      cells: all of its cells.
      records: of all runs.
    """
    scored, scale = score_curves(study, cells, records)
    kept = ("attempts", "error", "metrics", "curve", "reached_loss", "tokens")
    runs = [
        {"cell": cell.name, "seed": cell.config.seed + index}
        | {name: record[name] for name in kept}
        | {"finetuned": {task: _without_examples(one) for task, one in record["finetuned"].items()}}
        for cell in cells
        for index, record in enumerate(scored[cell.name])
        if record is not None
    ]
    return {
        "format_version": FORMAT_VERSION,
        "study": study.name,
        "sampled": sampled_sources(study, cells),
        "equal": study.equal,
        "alpha": study.alpha,
        "margins": study.margins,
        "baseline": study.baseline_levels,
        "cells": [
            {"name": cell.name, "levels": cell.levels, "models": list(cell.models), "seed": cell.config.seed}
            | dataclasses.asdict(cell.cost)
            for cell in cells
        ],
        "curves": scale,
        "comparisons": compare_levels(study, cells, scored),
        "failure_rates": compare_failures(study, cells, records),
        "variances": split_variances(study, cells, records),
        "runs": runs,
        "timing": {
            f"{cell.name}/seed{index}": record["timing"]["seconds"]
            for cell in cells
            for index, record in enumerate(records[cell.name])
            if record is not None
        },
    }


def _without_examples(scores: TaskScores) -> dict[str, Any]:
    return {name: value for name, value in scores.items() if name != "examples"}


def sampled_sources(study: Study, cells: list[Cell]) -> dict[str, str]:
    """Sources of variation, and whether the intervals include them."""
    sources = {"pretraining seed": _pretraining_seed(cells)}
    if not {*study.margins}.isdisjoint(METRICS):
        sources["held-out rows"] = "not sampled: the same rows and masks in all runs, so results hold for these rows"
    if study.tasks:
        sources["fine-tuning seed"] = (
            "sampled: a score is the mean over the fine-tuning runs of a seed of the study, failed ones included"
        )
        sources["examples of the tasks"] = "sampled by the multi-bootstrap, of accuracies of texts only"
    if any(len(options) > 1 for cell in cells for options in cell.tasks.values()):
        sources["learning rate of fine-tuning"] = (
            "chosen for each fine-tuning seed, by the half of dev that it is not scored on"
        )
    return sources


def _pretraining_seed(cells: list[Cell]) -> str:
    fixed = [cell.name for cell in cells if len(cell.models) == 1]
    if len(fixed) == len(cells):
        return "not sampled: each level is one model, so results hold for these models"
    if fixed:
        return f"sampled, but not in {', '.join(fixed)}, which is one model: results hold for it"
    if cells[0].models:
        return f"sampled: {len(cells[0].models)} models of each level"
    return "sampled: initialisation, order of examples, masks and dropout"


def compare_levels(study: Study, cells: list[Cell], records: ScoredRecords) -> list[dict[str, Any]]:
    """Every level against the baseline of its factor, in every metric that both have, of runs that they do not share.

    All scores are tested, those of failed runs too (`compare_failures` compares how many these are). A run without a
    score has nothing to test: it is counted, and if levels are paired, its seed is left out on both sides. In a grid,
    the score of a level and a seed is its mean over the levels of the other factors. A run that does not reach the loss
    of `mlm_tokens_to_loss` counts with the tokens of its last checkpoint: what is compared is the restricted mean
    (Royston and Parmar 2013), and such runs are counted.
    """
    rows = []
    for pair in level_pairs(study, cells):
        for metric in study.margins:
            if pair.share_pretraining and metric not in study.tasks:
                continue  # of the same runs
            if all(metric in cell.metrics for cell in (*pair.level_cells, *pair.baseline_cells)):
                about = {"factor": pair.factor, "level": pair.level, "baseline": pair.baseline, "metric": metric}
                rows.append(about | _compare(study, metric, pair, records))
    for kind in ("p_value", "equivalence"):
        for row, adjusted in zip(rows, statistics.holm([row[kind] for row in rows]), strict=True):
            row[f"{kind}_holm"] = adjusted
    for row in rows:
        row["verdict"] = None
        if row["seeds"] >= MIN_SEEDS:
            p_values = row["p_value_holm"], row["equivalence_holm"]
            row["verdict"] = statistics.verdict(row["difference"], *p_values, study.alpha)
    return rows


def _scores(cells: list[Cell], records: ScoredRecords, metric: str) -> dict[int, float]:
    """Mean score over cells, by the index of the seed; without seeds of which a run has no score."""
    scores = {}
    for index in range(len(records[cells[0].name])):
        of_seed = [records[cell.name][index] for cell in cells]
        if all(record is not None and metric in record["metrics"] for record in of_seed):
            scores[index] = float(np.mean([record["metrics"][metric] for record in of_seed if record is not None]))
    return scores


def _unscored(cells: list[Cell], records: ScoredRecords, metric: str) -> int:
    """Runs without this score."""
    everything = [record for cell in cells for record in records[cell.name] if record is not None]
    return sum(metric not in one["metrics"] for one in everything)


def _censored(cells: list[Cell], records: ScoredRecords, metric: str) -> int:
    """Runs that do not reach the loss of this metric."""
    everything = [record for cell in cells for record in records[cell.name] if record is not None]
    return sum(one["reached_loss"] is False for one in everything) if metric == TOKENS_TO_LOSS else 0


def _compare(study: Study, metric: str, pair: LevelPair, records: ScoredRecords) -> dict[str, Any]:
    """The comparison of two levels in a metric."""
    level, baseline, paired = pair.level_cells, pair.baseline_cells, pair.paired
    x, y = _scores(level, records, metric), _scores(baseline, records, metric)
    if paired and x and y:  # seeds that both sides have; a side with scores is shown where the other has none
        x, y = ({index: one[index] for index in one if index in x and index in y} for one in (x, y))
    level_scores, baseline_scores = np.array(list(x.values())), np.array(list(y.values()))
    seeds, margin, alpha = min(len(x), len(y)), study.margins[metric], study.alpha
    row: dict[str, Any] = {"seeds": seeds, "paired": paired, "margin": margin}
    row |= {"unscored": _unscored(level, records, metric), "unscored_baseline": _unscored(baseline, records, metric)}
    row |= {"censored": _censored(level, records, metric), "censored_baseline": _censored(baseline, records, metric)}
    for name, scores in (("level", level_scores), ("baseline", baseline_scores)):
        row[f"{name}_mean"] = float(scores.mean()) if len(scores) else None
        row[f"{name}_deviation"] = float(scores.std(ddof=1)) if len(scores) > 1 else None
    names = ("difference", "low", "high", "bca_low", "bca_high", "bootstrap_low", "bootstrap_high", "bootstrap_p_value")
    names += ("p_value", "equivalence", "detectable")
    row |= dict.fromkeys(names) | {"p_value_holm": None, "equivalence_holm": None}
    if seeds == 0:
        return row
    row["difference"] = float(level_scores.mean() - baseline_scores.mean())
    if seeds < 2:
        return row
    estimate = statistics.t_estimate(level_scores, baseline_scores, paired=paired, confidence=1 - alpha)
    row |= {"low": estimate.low, "high": estimate.high, "p_value": estimate.p_value}
    row["equivalence"] = statistics.equivalence_p_value(level_scores, baseline_scores, margin, paired=paired)
    if row["censored"] or row["censored_baseline"]:
        row["equivalence"] = 1.0  # runs that never reach the loss are not shown to need equally many tokens
    spread = np.sqrt((level_scores.var(ddof=1) + baseline_scores.var(ddof=1)) / 2)
    if paired:
        differences = level_scores - baseline_scores
        interval = statistics.bca_interval(differences, seed=0, confidence=1 - alpha)
        row |= {"bca_low": interval[0], "bca_high": interval[1]}
        spread = differences.std(ddof=1)
    if paired and len(level) == len(baseline) == 1:
        row |= _multibootstrap(metric, [records[cells[0].name] for cells in (level, baseline)], list(x), alpha)
    row["detectable"] = {
        str(count): statistics.detectable_difference(float(spread), count, paired=paired, alpha=alpha)
        for count in sorted({seeds, *POWER_SEEDS})
    }
    if seeds < MIN_SEEDS:  # shown, and not tested
        row |= {"p_value": None, "equivalence": None}
    return row


def _multibootstrap(
    metric: str, sides: Sequence[Sequence[ScoredRecord | None]], indices: Sequence[int], alpha: float
) -> dict[str, float]:
    """The interval over seeds and examples, where both sides have scores of examples for these seeds; else nothing."""
    matrices = []
    for records in sides:
        of_seeds = [record["finetuned"].get(metric) for i in indices if (record := records[i]) is not None]
        examples = [one["examples"] for one in of_seeds if one is not None and one["examples"]]
        if len(examples) != len(indices):
            return {}
        matrices.append(np.array(examples))
    level, baseline = (statistics.SeedScores.from_examples(one) for one in matrices)
    estimate = statistics.multibootstrap(
        level, baseline, matrices[0].shape[1], paired=True, seed=0, confidence=1 - alpha
    )
    return {"bootstrap_low": estimate.low, "bootstrap_high": estimate.high, "bootstrap_p_value": estimate.p_value}
