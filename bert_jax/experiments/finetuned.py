"""Scores of a study's runs on tasks that they are fine-tuned on."""

import dataclasses
import hashlib
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
    return {task: _hash_files(task_data / task) for task in study.tasks}


def check_data(cells: Sequence[Cell], task_data: StoredPath | None) -> None:
    """Read the examples of all tasks with the options of all cells, before any run.

    Raises:
      UserError: a split is missing or does not have the form of its task.
    """
    read: set[tuple[Any, ...]] = set()
    for cell in cells:
        for task, options in cell.tasks.items():
            assert task_data is not None
            values = (task, *options.file_options().values())
            if values not in read:
                read.add(values)
                read_splits(task, task_data / task, options)


def _hash_files(directory: StoredPath) -> str:
    require(directory.is_dir(), f"--task-data: there is no directory {directory} with the files of the task")
    digest = hashlib.sha256()
    for file in sorted((one for one in directory.iterdir() if one.is_file()), key=lambda one: one.name):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def score_task(
    run: CellRun, task: str, data: StoredPath, options: FinetuneOptions, make_programs: MakePrograms
) -> TaskScores | None:
    """Fine-tune a pretraining run with all seeds of the options, and score it; None: SIGTERM has stopped and saved it.

    Fine-tuning seeds differ between pretraining seeds, and are the same in all cells.

    Args:
      run: pretrained.
      task: name of the task.
      data: directory with its files.
      options: of fine-tuning.
      make_programs: of the runs.
    """
    options = dataclasses.replace(options, seed=options.seed + run.index * options.seeds)
    directory = run.finetuning_directory / task
    result = finetune.finetune(
        run.directory,
        task,
        data,
        directory,
        options,
        announce=lambda line: print(f"{task}: {line}", file=sys.stderr, flush=True),
        make_programs=make_programs,
    )
    if result is None:
        return None
    correct = [one.correct for one in result.seeds if not one.diverged]
    examples = np.mean(correct, axis=0).round(6).tolist() if correct else []
    scores = [None if one.diverged else one.score for one in result.seeds]
    return {"scores": scores, "failed": sum(one.failed for one in result.seeds), "examples": examples}
