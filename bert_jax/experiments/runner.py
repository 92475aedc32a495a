"""Runs a study: trains and measures the runs that are missing, one after the other, and writes results at the end."""

import dataclasses
import math
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from bert_jax.config.sections import PAIR_FORMATS
from bert_jax.convert import held_out, init_from
from bert_jax.data.mixture import CorpusWeight, common_tokenizer, open_corpora, resolve_shares
from bert_jax.distributed.stop_request import StopRequest, stop_request
from bert_jax.errors import TRY_AGAIN, PeerError, UserError, require
from bert_jax.experiments import finetuned, study_report
from bert_jax.experiments.budget import Cell, make_cells, positions_before
from bert_jax.experiments.cell_records import (
    FORMAT_VERSION,
    REPORT,
    CellRun,
    CurvePoint,
    RunRecord,
    StudyFile,
    TaskScores,
    check_identity,
    code_by_run,
    finite_scores,
    read_record,
    runs_of,
    runs_of_part,
    write_identity,
    write_record,
)
from bert_jax.experiments.models import make_model_cells, open_models
from bert_jax.experiments.results import write_results
from bert_jax.experiments.study import METRICS, Study
from bert_jax.provenance import code, describe_other_code
from bert_jax.report.page_file import write_page
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.failures import describe_error
from bert_jax.storage.lock import InUseError
from bert_jax.storage.paths import StoredPath
from bert_jax.training import pretraining
from bert_jax.training.run_directory.checkpoint import checkpoint_directory, committed_checkpoint_paths
from bert_jax.training.shared_programs import MakePrograms


@dataclasses.dataclass(frozen=True)
class OpenStudy:
    """A study, its corpora and its directory."""

    study: Study
    parts: Sequence[CorpusWeight]
    workdir: StoredPath
    cells: list[Cell]
    identity: StudyFile
    task_data: StoredPath | None
    """Directory with a directory of data for each task."""

    @property
    def runs(self) -> list[CellRun]:
        """All runs."""
        return runs_of(self.study, self.cells, self.workdir)


def open_study(
    study: Study, parts: Sequence[CorpusWeight], workdir: StoredPath, task_data: StoredPath | None = None
) -> OpenStudy:
    """Open the corpora of a study and check its cells and its directory; nothing is written.

    Args:
      study: the study.
      parts: its corpora.
      workdir: its directory.
      task_data: directory with a directory of data for each of its tasks.

    Raises:
      UserError: corpora that cannot be used together, cells that are not valid or cannot be compared, no data for a
        task, or a directory of something else.
    """
    data = study.base.data
    shares: dict[str, float] = {}
    tokenizer = None
    if parts:
        ordered, corpora = open_corpora(parts, cache=LocalCache(data.cache_dir, data.cache_limit_gb))
        tokenizer = common_tokenizer(corpora, sys.maxsize)
        counts = [corpus.num_tokens for corpus in corpora]
        found = resolve_shares(ordered, counts, data.mixture_exponent)
        shares = {corpus.identity: float(share) for corpus, share in zip(corpora, found, strict=True)}
    else:
        scored = [metric for metric in study.margins if metric in METRICS]
        what = f"margins.{scored[0]} is of held-out rows" if scored else "it pretrains"
        require(study.is_of_models and not scored, f"study {study.name}: {what}: add --corpus DIR")
    fingerprint = tokenizer.fingerprint if tokenizer else ""
    models = open_models(study, fingerprint) if study.is_of_models else {}
    data_identities = finetuned.data_identities(study, task_data)
    # Before `to_dict`, whose values have to be plain.
    cells = make_model_cells(study, models) if tokenizer is None or models else make_cells(study, tokenizer.vocab_size)
    identity: StudyFile = {
        "format_version": FORMAT_VERSION,
        "study": study.to_dict(),
        "corpora": shares,
        "tokenizer": fingerprint,
        "models": {path: model.sha256 for path, model in models.items()},
        "task_data": data_identities,
    }
    check_identity(workdir, identity)
    finetuned.check_data(cells, task_data)
    return OpenStudy(study, parts, workdir, cells, identity, task_data)


def run_study(
    opened: OpenStudy, make_programs: MakePrograms, part: tuple[int, int] = (0, 1), retries: int = 1
) -> tuple[int, dict[str, Any] | None]:
    """Do the runs of a part that are missing; the process that finds all runs done writes the results.

    A run that fails is tried again, at most `retries` times, and stays failed then; the others continue. Errors of
    disks and stores, and a lost lock, end the study: the same command continues.

    Args:
      opened: the study.
      make_programs: of all runs (`shared_programs.share_programs`).
      part: index and number of parts; run i belongs to part i mod their number.
      retries: of each run.

    Returns:
      exit code: 0, or 75 if a run was stopped by SIGTERM and saved; and the results, if all runs are done.

    Raises:
      UserError: a run that is missing cannot begin; nothing is written.
    """
    _check_missing(opened, part, retries)
    write_identity(opened.workdir, opened.identity)
    if others := describe_other_code(code_by_run(opened.runs)):
        print(f"note: {opened.workdir} has runs of other code, which are kept: {others}", file=sys.stderr)
    with stop_request() as stop_requested:
        stopped = _do_runs(opened, make_programs, runs_of_part(opened.runs, part), retries, stop_requested)
    if stopped:
        print(f"stopped and saved {stopped}; the same command continues")
        return TRY_AGAIN, None
    records = [read_record(run) for run in opened.runs]
    done = [record for record in records if is_done(record, retries)]
    if len(done) < len(records):
        print(f"{len(done)} of {len(records)} runs are done; the process that does the last one writes the results")
        return 0, None
    results = write_results(opened.study, opened.cells, opened.workdir, opened.identity)
    write_page(opened.workdir / REPORT, "--workdir", study_report.sections(opened.workdir))
    return 0, results


def _check_missing(opened: OpenStudy, part: tuple[int, int], retries: int) -> None:
    """Raise UserError if the first missing run of a cell cannot begin: it must not show after the hours of others."""
    missing = [run for run in runs_of_part(opened.runs, part) if not is_done(read_record(run), retries)]
    for run in {run.cell.name: run for run in reversed(missing) if not run.cell.models}.values():
        config = run.cell.run_config(run.index)
        try:
            pretraining.check_run(config, list(opened.parts), run.directory, init_from.check_source)
        except UserError as error:
            raise UserError(f"study {opened.study.name}, {run.cell.name}: {error}") from error


def _do_runs(
    opened: OpenStudy, make_programs: MakePrograms, mine: Sequence[CellRun], retries: int, stop_requested: StopRequest
) -> str:
    """Do the runs that are missing; returns where a signal stopped them, or nothing.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
    """
    for number, run in enumerate(mine, 1):
        label = f"run {number} of {len(mine)}, {run.cell.name} seed {run.index}"
        while not is_done(record := read_record(run), retries):
            attempts = record["attempts"] if record else 0
            print(f"{label}{f', attempt {attempts + 1}' if attempts else ''}", file=sys.stderr, flush=True)
            try:
                if stop_requested() or not _attempt(opened, run, record, make_programs):
                    if stop_requested.interrupted:
                        raise KeyboardInterrupt(f"stopped in {label}; the same command continues")
                    return f"in {label}"
            except InUseError as error:
                print(f"note: {error}", file=sys.stderr)
                break
    return ""


def is_done(record: RunRecord | None, retries: int) -> bool:
    """Whether a run needs no further attempt."""
    return record is not None and (not record["error"] or record["attempts"] > retries)


def _attempt(opened: OpenStudy, run: CellRun, before: RunRecord | None, make_programs: MakePrograms) -> bool:
    """Train and measure a run and write its record; False: it was stopped and saved."""
    start, error = time.monotonic(), ""
    metrics: dict[str, float] = {}
    curve: list[CurvePoint] = []
    tasks: dict[str, TaskScores] = {}
    tokens = 0
    try:
        if not run.cell.models:
            progress = pretraining.pretrain(
                run.cell.run_config(run.index),
                list(opened.parts),
                run.directory,
                load_initial_params=init_from.load_initial_params,
                make_programs=make_programs,
            )
            if not progress.ended:
                return False
            tokens = progress.tokens_seen
        metrics, curve = measure(opened, run, make_programs)
        for task, options in run.cell.tasks.items():
            assert opened.task_data is not None
            scores = finetuned.score_task(run, task, opened.task_data / task, options, make_programs)
            if scores is None:
                return False
            tasks[task] = scores
            if (finite := finite_scores(scores)) and task in opened.study.margins:
                metrics[task] = sum(finite) / len(finite)
        lost = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        lost += [f"mlm_loss of step {point['step']}" for point in curve if not math.isfinite(point["mlm_loss"])]
        if lost:
            metrics, curve, tasks, error = {}, [], {}, f"not finite: {', '.join(lost)}"
    except (InUseError, PeerError):
        raise
    except Exception as exception:
        if describe_error(exception):  # of the disk or store, not of the run
            raise
        if not isinstance(exception, UserError):
            traceback.print_exc()
        error = " ".join(f"{type(exception).__name__}: {exception}".split())
        error = error.removeprefix("UserError: ")
        metrics, curve, tasks = {}, [], {}
    seconds = time.monotonic() - start + (before["timing"]["seconds"] if before else 0.0)
    record: RunRecord = {
        "format_version": FORMAT_VERSION,
        "attempts": 1 + (before["attempts"] if before else 0),
        "error": error,
        "metrics": metrics,
        "curve": curve,
        "finetuned": tasks,
        "tokens": tokens,
        "timing": {"seconds": round(seconds, 1)},
        "code": code(),
    }
    write_record(run, record)
    if error:
        print(f"failed: {run.cell.name} seed {run.index}: {error}", file=sys.stderr, flush=True)
    return True


def measure(opened: OpenStudy, run: CellRun, make_programs: MakePrograms) -> tuple[dict[str, float], list[CurvePoint]]:
    """The metrics of a run or a model and its curve, on the held-out rows that all runs of its study are scored on."""
    config, pair = run.cell.config, run.cell.config.objective.pair
    compared = {metric.partition("_")[0] for metric in run.cell.metrics}
    measured: dict[str, float] = {}
    curve: list[CurvePoint] = []
    if "mlm" in compared and run.cell.models:
        measured = _evaluate(opened, run.model, opened.study.rows.format, make_programs)
    elif "mlm" in compared:
        for checkpoint in reversed(list(committed_checkpoint_paths(checkpoint_directory(run.directory)))):
            step = int(checkpoint.name)
            if step % config.checkpoint.every and step != config.total_steps:
                continue  # of a stop
            found = _evaluate(opened, checkpoint, opened.study.rows.format, make_programs)
            if "mlm_loss" not in found:
                continue  # of a causal phase
            measured = found
            curve.append({"step": step, "tokens": positions_before(config, step), "mlm_loss": measured["mlm_loss"]})
    if pair in compared:
        values = _evaluate(opened, run.directory, PAIR_FORMATS[pair][0], make_programs)
        measured |= {f"{pair}_accuracy": values["pair_accuracy"]}
    return {metric: measured[metric] for metric in opened.study.margins if metric in measured}, curve


def _evaluate(opened: OpenStudy, source: StoredPath, form: str, make_programs: MakePrograms) -> dict[str, float]:
    """Held-out metrics of a run, a checkpoint or a model, on rows of a format."""
    rows, parts = opened.study.rows, list(opened.parts)
    options = {"form": form, "seq_len": rows.seq_len, "rows": rows.count}
    return held_out.score(source, parts, **options, make_programs=make_programs).metrics
