"""The files of a study: its identity, and a record of each run, written when the run has been measured or has failed.

``study.json`` is the identity. ``cells/CELL/seed0/`` is the run directory of a run, as `bert-jax pretrain` makes it,
and ``cells/CELL/seed0.json`` its record. Results and the page are made from the records.
"""

import json
import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypedDict

from bert_jax.errors import UserError
from bert_jax.experiments.budget import Cell
from bert_jax.experiments.study import CURVE_METRICS, Study
from bert_jax.provenance import Code
from bert_jax.storage.files import make_directory_if_local, write_atomic
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath, check_reachable, to_path
from bert_jax.training.run_directory.workdir import describe_config_diff

STUDY, CELLS, RESULTS, REPORT = "study.json", "cells", "results.json", "report.html"
FORMAT_VERSION = 4


class CellRun(NamedTuple):
    """One run of a study."""

    cell: Cell
    index: int
    """Of the seed, from 0."""
    workdir: StoredPath
    """Of the study."""

    @property
    def directory(self) -> StoredPath:
        """Directory of the pretraining run."""
        return self.workdir / CELLS / self.cell.pretrained / f"seed{self.index}"

    @property
    def model(self) -> StoredPath:
        """What is scored and fine-tuned: the pretraining run, or a given model."""
        models = self.cell.models
        return to_path(models[self.index if len(models) > 1 else 0]) if models else self.directory

    @property
    def finetuning_directory(self) -> StoredPath:
        """Directory of the fine-tuning runs."""
        return self.workdir / CELLS / self.cell.name / f"seed{self.index}.finetuned"

    @property
    def record_path(self) -> StoredPath:
        """File of the run's record."""
        return self.workdir / CELLS / self.cell.name / f"seed{self.index}.json"


class Timing(TypedDict):
    """What differs between two executions of a run."""

    seconds: float
    """From the start of the process's work on the run to its end, over all attempts."""


class TaskScores(TypedDict):
    """The fine-tuning runs of one pretraining run on one task."""

    scores: list[float | None]
    """Of every run, by seed; None: it diverged."""
    failed: int
    """Runs that are not better than the best constant prediction, or diverged."""
    learning_rates: list[list[float]]
    """Of several: the two that were chosen for each run, one by each half of dev; else empty."""
    examples: list[float]
    """If the score is the accuracy: that of each example of dev, over the runs with a score; else empty."""


class CurvePoint(TypedDict):
    """The score of a checkpoint that a run has kept."""

    step: int
    tokens: int
    """Positions of all rows up to this step, padding included, as in `Cost`."""
    mlm_loss: float
    """On `Study.rows`, in nats."""


class RunRecord(TypedDict):
    """The result of a run."""

    format_version: int
    attempts: int
    """How often the run was tried."""
    error: str
    """Why the last attempt failed; empty if the run succeeded."""
    metrics: dict[str, float]
    curve: list[CurvePoint]
    """By step; empty if nothing of the MLM head is compared."""
    finetuned: dict[str, TaskScores]
    """By task."""
    tokens: int
    """Tokens of all steps, without padding."""
    timing: Timing
    code: Code
    """That measured the run, or with which it failed."""


Records = dict[str, Sequence[RunRecord | None]]
"""Records of each cell, by seed."""


class RowsFile(TypedDict):
    """`HeldOutRows`"""

    format: str
    seq_len: int
    count: int


class StudyValues(TypedDict):
    """`Study.to_dict`; these are the values that reports read."""

    factors: dict[str, dict[str, dict[str, Any]]]
    """Changes by factor and level."""
    rows: RowsFile
    seeds: int


class StudyFile(TypedDict):
    """Identity of a study."""

    format_version: int
    study: StudyValues
    corpora: dict[str, float]
    """Share of each corpus, by identity."""
    tokenizer: str
    """Fingerprint; empty without corpora."""
    models: dict[str, str]
    """SHA-256 of the config and the parameters of each given model, by path."""
    task_data: dict[str, str]
    """SHA-256 of the files of each task."""


def runs_of(study: Study, cells: list[Cell], workdir: StoredPath) -> list[CellRun]:
    """All runs of a study, by seed first: an unfinished study has fewer seeds, and not fewer levels."""
    return [CellRun(cell, index, workdir) for index in range(study.seeds) for cell in cells]


def runs_of_part(runs: list[CellRun], part: tuple[int, int]) -> list[CellRun]:
    """The runs of a part, (index, number of parts); those that share a pretraining run are in the same part."""
    directories = list(dict.fromkeys(run.directory for run in runs))
    mine = set(directories[part[0] :: part[1]])
    return [run for run in runs if run.directory in mine]


def finite_scores(task: TaskScores) -> list[float]:
    """Scores of the fine-tuning runs that did not diverge."""
    return [score for score in task["scores"] if score is not None]


def write_identity(workdir: StoredPath, identity: StudyFile) -> None:
    """Write the identity of a study, or check that a directory has it, or has it without some of its levels.

    Raises:
      UserError: see `check_identity`.
    """
    if check_identity(workdir, identity) != identity:
        make_directory_if_local(workdir)
        write_atomic(workdir / STUDY, json.dumps(identity, indent=1).encode())


def check_identity(workdir: StoredPath, identity: StudyFile) -> StudyFile | None:
    """The identity that a directory holds: this one, except that levels may be missing. Nothing is written.

    Returns:
      None: the directory does not exist or is empty.

    Raises:
      UserError: it holds another study, one that has changed since it began, or files of another kind.
    """
    check_reachable(workdir)
    if not (workdir / STUDY).exists():
        if workdir.exists() and (not workdir.is_dir() or any(not _is_partial(one) for one in workdir.iterdir())):
            raise UserError(f"work directory {workdir} holds files, but no study: choose another --workdir")
        return None
    advice = "it is damaged, or of another version of bert_jax: restore a copy of it, or choose another --workdir"
    saved = read_json_as(workdir / STUDY, StudyFile, advice, FORMAT_VERSION)
    study = identity["study"]
    factors = {
        factor: {name: level for name, level in levels.items() if name in saved["study"]["factors"].get(factor, {})}
        for factor, levels in study["factors"].items()
    }
    if changed := describe_config_diff(saved, identity | {"study": study | {"factors": factors}}):
        raise UserError(
            f"work directory {workdir} holds a study that began with other settings ({'; '.join(changed[:3])}): choose "
            "another --workdir, or the study and the corpora that it began with; only levels can be added"
        )
    return saved


def _is_partial(path: PurePath) -> bool:
    """Whether a file is what a killed process left of writing the identity."""
    return path.name.startswith(f"{STUDY}.") and path.name.endswith(".partial")


def read_record(run: CellRun) -> RunRecord | None:
    """The record of a run; None if it has neither succeeded nor failed yet.

    Raises:
      UserError: the file is damaged, has neither an error nor all metrics, or a loss that is not finite.
    """
    if not run.record_path.exists():
        return None
    advice = "remove it, so that the run is measured again"
    record: RunRecord = read_json_as(run.record_path, RunRecord, advice, FORMAT_VERSION)
    metrics, tasks = record["metrics"], record["finetuned"]
    compared = () if record["error"] else run.cell.metrics
    if not {*compared}.isdisjoint(CURVE_METRICS) and len(record["curve"]) < 2:
        raise UserError(f"{run.record_path}: the curve has fewer than two checkpoints, and there is no error: {advice}")
    if lost := [point["step"] for point in record["curve"] if not math.isfinite(point["mlm_loss"])]:
        raise UserError(f"{run.record_path}: the loss of the checkpoint of step {lost[0]} is not finite: {advice}")
    for name in (one for one in compared if one not in CURVE_METRICS):
        diverged = name in tasks and not finite_scores(tasks[name])
        if not diverged and not math.isfinite(metrics.get(name, math.nan)):
            raise UserError(
                f"{run.record_path}: metrics.{name} is missing or not finite, and there is no error: {advice}"
            )
    return record


def code_by_run(runs: Sequence[CellRun]) -> dict[str, Code]:
    """The code that made each record, by CELL/seedN."""
    records = {f"{run.cell.name}/seed{run.index}": read_record(run) for run in runs}
    return {name: record["code"] for name, record in records.items() if record is not None}


def write_record(run: CellRun, record: RunRecord) -> None:
    """Write the record of a run."""
    make_directory_if_local(run.record_path.parent)
    write_atomic(run.record_path, json.dumps(record, indent=1).encode())
