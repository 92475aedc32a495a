"""The command ``bert-jax ablate``."""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import tyro

from bert_jax.cli.arguments import Corpora
from bert_jax.command.flags import DirectoryArg
from bert_jax.data import mixture as mixture_lib
from bert_jax.errors import UserError, install_command
from bert_jax.field_validation import CountOrZero


@dataclass(frozen=True, kw_only=True)
class Ablate:
    """Run a study: train and compare all levels of its factors; the same command continues a stopped study.

    STUDY is one of the shipped studies, or a Python file with a function study() (docs/ablation.md).
    """

    study: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="STUDY")]
    """Name of a shipped study, or a Python file."""
    corpus: Corpora = ()
    """As for `bert-jax pretrain`: the corpora of all runs. A study of models needs them for held-out losses only."""
    workdir: DirectoryArg
    """Directory of the study: cells/CELL/seedN are run directories; results.json and report.html."""
    task_data: DirectoryArg | None = None
    """Directory with the data of the study's fine-tuning tasks: one directory for each, as --data of `bert-jax
    finetune`. Needed if the study has tasks."""
    dry_run: bool = False
    """Only show the grid: cells, steps, tokens, parameters, FLOPs, time, and what is finished."""
    part: str | None = None
    """Part I of N of the runs, as I/N. Start all parts on one work directory, e.g. as a Slurm array; the process that
    does the last run writes the results. Default: that of the Slurm array task, else all."""
    retries: CountOrZero = 1
    """How often a failed run is tried again."""
    compilation_cache: str | None = None
    """As for `bert-jax pretrain`."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> int:
        """Run the study and print its verdicts; returns 75 if it was stopped and the same command continues it."""
        part = parse_part(self.part, os.environ)
        mixture = [mixture_lib.parse_corpus_weight(text) for text in self.corpus]
        from bert_jax.experiments.study import load_study

        study = load_study(self.study)
        for package in ("matplotlib", "scipy"):
            if importlib.util.find_spec(package) is None:
                raise UserError(f"ablate needs the package {package}, which is missing: {install_command('ablate')}")
        from bert_jax.distributed import jax_setup
        from bert_jax.experiments import runner, study_plan, study_report
        from bert_jax.report.text import render
        from bert_jax.training.shared_programs import share_programs

        jax_setup.prepare_training(self.compilation_cache)
        opened = runner.open_study(study, mixture, self.workdir, self.task_data)
        if self.dry_run:
            values = study_plan.plan_study(opened, part, self.retries)
            print(json.dumps(values) if self.json else render(study_plan.to_sections(values)))
            return 0
        code, results = runner.run_study(opened, share_programs(), part, self.retries)
        if results is not None:
            print(json.dumps(results) if self.json else render(study_report.verdict_sections(self.workdir)))
        return code


def parse_part(text: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Index and number of the parts of a study, from the flag or from the variables of a Slurm array task.

    Raises:
      UserError: the flag is not I/N with I from 1 to N, or the array has other tasks than 0 or 1 to the last one.
    """
    if text is None:
        if "SLURM_ARRAY_TASK_ID" not in environment:
            return 0, 1
        names = ("ID", "COUNT", "MIN", "MAX", "STEP")
        found = {name: environment.get(f"SLURM_ARRAY_TASK_{name}") for name in names}
        shown = ", ".join(f"SLURM_ARRAY_TASK_{name}={value}" for name, value in found.items() if value is not None)
        numbers = {name: int(value) for name, value in found.items() if value is not None and value.isdecimal()}
        task, count, first = numbers.get("ID"), numbers.get("COUNT", 1), numbers.get("MIN", 0)
        step, last = numbers.get("STEP", 1), numbers.get("MAX", first + count - 1)
        without_gaps = first in (0, 1) and step == 1 and last - first + 1 == count
        if task is None or not without_gaps or not first <= task <= last:
            raise UserError(
                f"{shown}: the part follows only from arrays 0-N or 1-N without gaps, and tasks that are submitted "
                "again have other numbers: add --part I/N"
            )
        return task - first, count
    match = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part {text}: write the part and the number of parts, as in 2/8, with parts from 1 on")
    return int(match[1]) - 1, int(match[2])
