"""Scores of a study's runs on tasks that they are fine-tuned on."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.experiments.budget import Cell
from bert_jax.experiments.cell_records import CellRun, TaskScores
from bert_jax.experiments.study import Study
from bert_jax.finetune import finetune
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import SeedResult
from bert_jax.finetune.sentence_data import SentenceTask
from bert_jax.finetune.split_files import hash_files
from bert_jax.finetune.tasks import check_task, read_splits
from bert_jax.storage.paths import StoredPath
from bert_jax.training.shared_programs import MakePrograms


def data_identities(study: Study, task_data: StoredPath | None) -> dict[str, str]:
    """SHA-256 of the files of each task.

    Raises:
      UserError: an unknown task, or no directory with its data.
    """
    for task in study.tasks:
        check_task(task)
    if not study.tasks:
        return {}
    if task_data is None:
        raise UserError(f"study {study.name} fine-tunes on {', '.join(study.tasks)}: add --task-data DIR")
    return {task: _hash_task_files(task_data / task) for task in study.tasks}


def check_data(cells: Sequence[Cell], task_data: StoredPath | None) -> None:
    """Read the examples of all tasks with the options of all cells, before any run.

    Raises:
      UserError: a split is missing or does not have the form of its task, or the score of a task with several learning
        rates is not the mean over its examples.
    """
    read: set[tuple[Any, ...]] = set()
    for cell in cells:
        for task, options in cell.tasks.items():
            assert task_data is not None
            values = (task, *options[0].file_options().values(), len(options) > 1)
            if values not in read:
                read.add(values)
                splits = read_splits(task, task_data / task, options[0])
                require(
                    len(options) == 1 or (isinstance(splits, SentenceTask) and splits.main_metrics == ("accuracy",)),
                    f"{cell.name}: tasks.{task} has several learning rates, and its score is not the accuracy of "
                    "texts, of which each half of dev could choose one for the other: give one rate",
                )


def _hash_task_files(directory: StoredPath) -> str:
    require(directory.is_dir(), f"--task-data: there is no directory {directory} with the files of the task")
    return hash_files(directory)


def score_task(
    run: CellRun, task: str, data: StoredPath, options: Sequence[FinetuneOptions], make_programs: MakePrograms
) -> TaskScores | None:
    """Fine-tune a model with all seeds and learning rates, and score it; None: SIGTERM has stopped and saved it.

    Fine-tuning seeds differ between the runs of a cell, and are the same in all cells.

    Args:
      run: pretrained.
      task: name of the task.
      data: directory with its files.
      options: of fine-tuning, by learning rate.
      make_programs: of the runs.
    """
    results = []
    for one in options:
        one = dataclasses.replace(one, seed=one.seed + run.index * one.seeds)
        result = finetune.finetune(
            run.model,
            task,
            data,
            run.finetuning_directory / (task if len(options) == 1 else f"{task}-{one.learning_rate!r}"),
            one,
            announce=lambda line: print(f"{task}: {line}", file=sys.stderr, flush=True),
            make_programs=make_programs,
        )
        if result is None:
            return None
        results.append(result.seeds)
    if len(options) > 1:
        rates = [one.learning_rate or 0.0 for one in options]
        return choose_by_halves(results, rates, np.random.default_rng(run.index))
    (seeds,) = results
    correct = [one.correct for one in seeds if not one.diverged]
    scores = [None if one.diverged else one.score for one in seeds]
    failed = sum(one.failed for one in seeds)
    return {"scores": scores, "failed": failed, "learning_rates": [], "examples": _mean_over_runs(correct)}


def _mean_over_runs(correct: Sequence[np.ndarray]) -> list[float]:
    return np.mean(correct, axis=0).round(6).tolist() if correct else []


def choose_by_halves(
    results: Sequence[Sequence[SeedResult]], rates: Sequence[float], rng: np.random.Generator
) -> TaskScores:
    """Scores of fine-tuning with a choice of the learning rate, of which no example decides about its own score.

    The examples of dev are split at random. For each seed, the rate with the best accuracy on one half is scored on the
    other, and the reverse; the score is the accuracy over all examples (cross-fitting, as a nested validation with two
    folds). A rate whose run diverged is not chosen. A run fails if one of its two chosen runs did.

    Args:
      results: by rate and seed; the score is the accuracy.
      rates: learning rates.
      rng: of the split.
    """
    found: TaskScores = {"scores": [], "failed": 0, "learning_rates": [], "examples": []}
    size = max(len(one.correct) for of_rate in results for one in of_rate)
    first = rng.permutation(size) < size // 2
    correct = []
    for runs in zip(*results, strict=True):
        finished = [index for index, one in enumerate(runs) if not one.diverged]
        if not finished:
            found["scores"].append(None)
            found["failed"] += 1
            continue
        examples = np.zeros(size)
        chosen = []
        for scored in (first, ~first):
            best = max(finished, key=lambda index, rest=~scored: runs[index].correct[rest].mean())
            examples[scored] = runs[best].correct[scored]
            chosen.append(best)
        found["scores"].append(float(examples.mean()))
        found["failed"] += any(runs[index].failed for index in chosen)
        found["learning_rates"].append([rates[index] for index in chosen])
        correct.append(examples)
    return found | {"examples": _mean_over_runs(correct)}
