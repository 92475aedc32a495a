"""Reads the files of a run for a report; nothing is written."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from bert_jax.config import Config
from bert_jax.errors import UserError
from bert_jax.objectives.objectives import TOKEN_OBJECTIVES
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.lock import LOCK_FILE
from bert_jax.storage.paths import StoredPath, is_remote
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.eval_metrics import BASELINES
from bert_jax.training.run_directory import goodput, ledger, metrics, workdir
from bert_jax.training.run_directory.checkpoint import (
    checkpoint_directory,
    committed_checkpoint_paths,
    read_metadata,
)

TOKEN_LOSSES = {f"{of}_loss" for of in TOKEN_OBJECTIVES}
BASELINE_NAMES = {baseline for baseline, _ in BASELINES.values()}
END_REASONS = {"steps": "all steps are done", "time": "the time limit is reached", "target": "the target is reached"}
"""By `ended` of a checkpoint (training/loop.py)."""


class _BestEpoch(TypedDict):
    step: int
    epoch: float


class _OptionalInSeedEntry(TypedDict, total=False):
    test_score: float
    best_epoch: _BestEpoch


class SeedEntry(_OptionalInSeedEntry):
    """The result of a seed in results.json of `bert-jax finetune`."""

    seed: int
    score: float | None
    failed: bool


class _Results(TypedDict):
    baseline: float
    seeds: list[SeedEntry]


class TaskScore(NamedTuple):
    """The score of a fine-tuning run."""

    result: SeedEntry
    baseline: float
    """score of the best constant prediction"""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What a work directory holds."""

    name: str
    """shortest end of the path that distinguishes the run from the others of the report"""
    directory: StoredPath
    file: workdir.ConfigFile
    lines: list[metrics.Line]
    """of metrics.jsonl, at least one"""
    decisions: list[dict[str, Any]]
    """of ledger.jsonl"""
    goodput: dict[str, float]
    """`goodput.summarize`; a wall time of 0 if nothing was recorded"""
    slow_processes: list[str]
    """`goodput.describe_slow`"""
    environments: list[dict[str, str]]
    """of each attempt, oldest first"""
    checkpoint: dict[str, Any] | None
    """metadata of the newest checkpoint"""
    locked: bool
    """whether run.lock exists"""
    tokenizer_fingerprint: str
    task_score: "TaskScore | None"
    """of a fine-tuning run that has ended"""

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.file["config"]

    @property
    def last_step(self) -> int:
        """The last step with metrics."""
        return self.lines[-1]["step"]

    @property
    def state(self) -> str:
        """Whether the run is finished and why it ended, in words."""
        saved, total = self.checkpoint or {}, self.config.total_steps
        step = saved.get("cursor", {}).get("step", 0)
        if self.task_score is not None and (best := self.task_score.result.get("best_epoch")):
            kept = f"the weights of step {best['step']:,} are kept, the best epoch on the held-out examples"
            return f"finished after step {self.last_step:,}: {kept}"
        # A finished run can be extended.
        if saved.get("ended") and not (saved["ended"] == "steps" and step < total):
            return f"finished after step {step:,}: {END_REASONS.get(saved['ended'], saved['ended'])}"
        state = f"not finished: step {self.last_step:,} of {total:,}, last checkpoint at step {step:,}"
        return (
            f"{state}. The run is active, or was killed (run.lock exists)" if self.locked else f"{state}. It is stopped"
        )

    def metric_names(self, split: str) -> list[str]:
        """Metrics with numbers in the lines of a split, those with baselines first; baselines are left out."""
        names = dict.fromkeys(name for line in self._split(split) for name in line if _is_number(line[name]))
        order = {name: place for place, name in enumerate(BASELINES)}
        return sorted((name for name in names if name not in BASELINE_NAMES | {"step"}), key=lambda n: order.get(n, 99))

    def curve(self, split: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, or of an entry of `timing`; values that are not finite are NaN."""
        points = {}
        for line in self._split(split):
            values = line["timing"] | line
            if name in values and (values[name] is None or _is_number(values[name])):
                points[line["step"]] = math.nan if values[name] is None else float(values[name])
        return list(points), list(points.values())

    def last(self, split: str) -> dict[str, float]:
        """The last value of every metric of a split, baselines included, without those of another objective before."""
        last: dict[str, float] = {}
        before: set[str] = set()
        for line in self._split(split):
            if (losses := TOKEN_LOSSES & line.keys()) != before:
                last, before = {}, losses
            last |= {name: value for name, value in line.items() if _is_number(value)}
        return last

    def _split(self, split: str) -> list[metrics.Line]:
        return [line for line in self.lines if line["split"] == split]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_runs(directories: Sequence[StoredPath]) -> list[RunFiles]:
    """Read runs.

    Args:
      directories: work directories.

    Raises:
      UserError: a directory has no run or no metrics yet, or its files cannot be read; a directory is given twice.
    """
    resolved = [str(path).rstrip("/") if is_remote(path) else os.path.realpath(path) for path in directories]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            raise UserError(
                f"{directories[i]} is the same directory as {directories[resolved.index(path)]}: give it once"
            )
    return [_read_run(path, name) for path, name in zip(directories, _short_names(resolved), strict=True)]


def _short_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of paths, in whole names, that differ."""
    parts = [Path(path).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def _read_run(directory: StoredPath, name: str) -> RunFiles:
    file = workdir.read_run(directory)
    lines = metrics.read_metrics(directory / "metrics.jsonl")
    if not lines:
        raise UserError(
            f"{directory} has no metrics yet: its run has not reached the first line of metrics.jsonl "
            f"(log.every {file['config'].log.every})"
        )
    newest = next(committed_checkpoint_paths(checkpoint_directory(directory)), None)
    return RunFiles(
        name=name,
        directory=directory,
        file=file,
        lines=lines,
        decisions=ledger.read_ledger(directory / workdir.LEDGER),
        goodput=goodput.summarize(directory),
        slow_processes=goodput.describe_slow(directory),
        environments=goodput.environments(directory),
        checkpoint=None if newest is None else read_metadata(newest),
        locked=(directory / LOCK_FILE).exists(),
        tokenizer_fingerprint=Tokenizer.load(directory / workdir.TOKENIZER).fingerprint,
        task_score=None if file["config"].finetune is None else _read_task_score(directory, file["config"].seed),
    )


def _read_task_score(directory: StoredPath, seed: int) -> TaskScore | None:
    """Of results.json, which is above the directories of several seeds; None: the command has not ended yet."""
    directories = (directory, directory.parent) if directory.name == f"seed{seed}" else (directory,)
    for path in (one / "results.json" for one in directories):
        if path.exists():
            results = read_json_as(path, _Results, "run bert-jax finetune again")
            for one in results["seeds"]:
                if one["seed"] == seed:
                    return TaskScore(one, results["baseline"])
    return None
