"""The report of a study: verdicts, comparisons, runs, budgets and times, as sections of `bert_jax.report`."""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from bert_jax import provenance
from bert_jax.experiments.cell_records import FORMAT_VERSION, RESULTS, STUDY, StudyFile, StudyValues
from bert_jax.experiments.failure_rates import FailureRate
from bert_jax.experiments.results import MIN_SEEDS, POWER_SEEDS, Comparison, Results, RunResult
from bert_jax.experiments.study import AREA, TOKENS_TO_LOSS, study_files
from bert_jax.experiments.variances import VarianceSplit
from bert_jax.report import Command, Curves, Interval, Intervals, Note, Section, Series, Table
from bert_jax.report.cells import cell, make_table
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath

ADVICE = "run bert-jax ablate again"
STUDY_ADVICE = "restore a copy of it; bert-jax ablate does not continue this study"
VERDICTS = {
    "higher": "higher",
    "lower": "lower",
    "equal": "equal within the margin",
    "undecided": "undecided",
    None: f"no verdict: fewer than {MIN_SEEDS} seeds with scores",
}

TIME_NOTE = Note(
    "Of the start that finished a run, and of failed attempts; not of starts that a signal or a kill ended."
)


def sections(directory: StoredPath) -> list[Section]:
    """The report of a study whose results have been written.

    Raises:
      UserError: there are no results yet, or a file is damaged or of another version.
    """
    results: Results = read_json_as(directory / RESULTS, Results, ADVICE, FORMAT_VERSION)
    identity: StudyFile = read_json_as(directory / STUDY, StudyFile, STUDY_ADVICE, FORMAT_VERSION)
    study, models = identity["study"], identity["models"]
    comparisons = results["comparisons"]
    by_factor = {factor: [row for row in comparisons if row["factor"] == factor] for factor in results["baseline"]}
    return [
        Section(f"study {results['study']}", tuple(_overview(results, study)), level=1),
        Section("verdicts", (_verdict_table(comparisons),)),
        *(Section(f"factor {factor}", tuple(_details(rows, results))) for factor, rows in by_factor.items() if rows),
        *(Section("loss by tokens", blocks) for blocks in [_curve_blocks(results)] if blocks),
        Section("failure rates", tuple(_failure_blocks(results["failure_rates"], results["alpha"]))),
        Section("runs", (_run_table(results),)),
        *(Section("variance", blocks) for blocks in [_variance_blocks(results["variances"])] if blocks),
        Section(*("models", (_model_table(results, models),)) if models else ("budget", (_budget_table(results),))),
        Section("time", (TIME_NOTE, _time_table(results["timing"]))),
        *provenance.sections({"study": results["provenance"]}),
    ]


def verdict_sections(directory: StoredPath) -> list[Section]:
    """The part of the report that `bert-jax ablate` prints."""
    return sections(directory)[:2]


def _overview(results: Results, study: StudyValues) -> list[Note | Command]:
    rows, failed = study["rows"], [run for run in results["runs"] if run["error"]]
    sampled = "; ".join(f"{name}: {text}" for name, text in results["sampled"].items())
    margins = ", ".join(f"{metric} {margin:g}" for metric, margin in results["margins"].items())
    name = results["study"] if results["study"] in study_files() else f"{results['study']}.py"
    of_models, held_out = bool(results["cells"][0]["models"]), "held-out rows" in results["sampled"]
    corpus = ["--corpus", "DIR"] if held_out or not of_models else []
    words = ["bert-jax", "ablate", name, *corpus, "--workdir", "DIR"]
    budget = "nothing was pretrained" if of_models else f"equal {results['equal']}"
    scored = (
        f"Metrics of pretraining are of at most {rows['count']} held-out rows of {rows['seq_len']} tokens, format "
        f"{rows['format']}, the same for all runs; those of a pair objective are of rows with its labels. "
    )
    if any(run["finetuned"] for run in results["runs"]):
        words += ["--task-data", "DIR"]
    return [
        *provenance.warnings(results["provenance"]),
        Command(shlex.join(words)),
        Note(
            f"{len(results['cells'])} cells (seeds of each: {study['seeds']}); {budget}. {scored if held_out else ''}"
            f"{len(failed)} of {len(results['runs'])} runs failed{_failed_finetuning(results['runs'])}. Every run with "
            "a score is part of the means and tests, failed or not; runs without one are counted."
        ),
        Note(
            f"Margins of equivalence: {margins}. P-values are adjusted for the number of comparisons, "
            f"{len(results['comparisons'])} (Holm), at the level {results['alpha']:g}; intervals are not adjusted."
        ),
        Note(f"Sources of variation. {sampled}."),
    ]


def _failed_finetuning(runs: Sequence[RunResult]) -> str:
    """How many fine-tuning runs failed, if there are any."""
    scores = [one for run in runs for one in run["finetuned"].values()]
    failed, total = sum(one["failed"] for one in scores), sum(len(one["scores"]) for one in scores)
    diverged = sum(one["scores"].count(None) for one in scores)
    return f", and {failed} of {total} fine-tuning runs, {diverged} of which diverged" if scores else ""


def _verdict_table(comparisons: Sequence[Comparison]) -> Table:
    columns = {
        "factor": "{factor}",
        "level against baseline": "{level} against {baseline}",
        "metric": "{metric}",
        "verdict": lambda row: VERDICTS[row["verdict"]] + _unscored_runs(row),
        "difference": lambda row: _number(row["difference"], "+"),
        "interval (t)": lambda row: _interval(row["low"], row["high"]),
    }
    return make_table(comparisons, columns, words=True)


def _unscored_runs(row: Comparison) -> str:
    """The runs without a score of both sides, if there are any."""
    sides = ((row["level"], row["unscored"]), (row["baseline"], row["unscored_baseline"]))
    text = "".join(f"; {count} runs of {level} have no score" for level, count in sides if count)
    sides = ((row["level"], row["censored"]), (row["baseline"], row["censored_baseline"]))
    return text + "".join(f"; {count} runs of {level} never reach the loss" for level, count in sides if count)


def _curve_blocks(results: Results) -> tuple[Curves | Note, ...]:
    """The mean curve of each cell with a band over its seeds; nothing if no run has two checkpoints."""
    series = []
    for one in results["cells"]:
        name, curves = one["name"], [run["curve"] for run in results["runs"] if run["cell"] == one["name"]]
        losses = [{point["tokens"]: point["mlm_loss"] for point in curve} for curve in curves if curve]
        tokens = sorted(set(losses[0]).intersection(*losses)) if losses else []
        if len(tokens) > 1:
            by_tokens = [[of_run[at] for of_run in losses] for at in tokens]
            mean, low, high = (tuple(map(take, by_tokens)) for take in (fmean, min, max))
            series.append(Series(name, tuple(map(float, tokens)), mean, low, high))
    if not series or (scale := results["curves"]) is None:
        return ()
    target = "" if scale["target_loss"] is None else f"; the loss of {TOKENS_TO_LOSS} is {scale['target_loss']:.4f}"
    note = (
        "Of the checkpoints that the runs kept: mean over seeds, and a band from the lowest to the highest seed. "
        f"Tokens are positions of all rows, padding included. {AREA} is the mean loss from {scale['first_tokens']:,} "
        f"to {scale['last_tokens']:,} tokens{target}. A run that never reaches it counts with the tokens of its last "
        "checkpoint, and gets no verdict of equality."
    )
    return Curves("held-out MLM loss by tokens", tuple(series), "tokens", "loss (nats)"), Note(note)


def _failure_blocks(rates: Sequence[FailureRate], alpha: float) -> list[Note | Table]:
    """Failure rates of all levels, with tests of their own."""

    def counts(side: str) -> Callable[[FailureRate], str]:
        def write(row: FailureRate) -> str:
            failed, runs, diverged = (row[f"{name}{side}"] for name in ("failed", "runs", "diverged"))
            return f"{failed} of {runs}" + (f" ({diverged} diverged)" if diverged else "")

        return write

    columns = {
        "factor": "{factor}",
        "level against baseline": "{level} against {baseline}",
        "runs of": "{runs_of}",
        "level failed": counts(""),
        "baseline failed": counts("_baseline"),
        "p (Holm)": "{p_value_holm:.4f}",
    }
    return [
        Note(
            "A fine-tuning run fails if its score is not above that of the best constant prediction or if it diverges, "
            f"a pretraining run if it has no score. P-values are of permutations of seeds, at the level {alpha:g}, "
            "adjusted for the number of rows (Holm); n pairs of seeds have at least 2 / 2^n, so 6 can show a "
            "difference."
        ),
        make_table(rates, columns, words=True),
    ]


def _details(rows: Sequence[Comparison], results: Results) -> list[Note | Table | Intervals]:
    columns = {
        "comparison": _name,
        "seeds": "{seeds}",
        "without score": "{unscored} and {unscored_baseline}",
        "level": lambda row: _mean(row["level_mean"], row["level_deviation"]),
        "baseline": lambda row: _mean(row["baseline_mean"], row["baseline_deviation"]),
        "BCa": lambda row: _interval(row["bca_low"], row["bca_high"]),
        "seeds and examples": lambda row: _interval(row["bootstrap_low"], row["bootstrap_high"]),
        "p (Holm)": "{p_value_holm:.4f}",
        "p of equivalence (Holm)": "{equivalence_holm:.4f}",
    }
    table = make_table(rows, columns)
    powered = [row for row in rows if {str(row["seeds"]), *map(str, POWER_SEEDS)} <= {*(row["detectable"] or ())}]
    return [*_figures(rows, results["margins"]), table, *_power(powered, results["alpha"])]


def _figures(rows: Sequence[Comparison], margins: dict[str, float]) -> list[Intervals]:
    """The differences of each metric with their t intervals and the margin of equivalence."""
    figures = []
    for metric, margin in margins.items():
        intervals = tuple(
            Interval(f"{row['level']} - {row['baseline']}", row["difference"], row["low"], row["high"])
            for row in rows
            if row["metric"] == metric and None not in (row["difference"], row["low"], row["high"])
        )
        if intervals:
            figures.append(Intervals(f"differences of {metric}", intervals, f"difference of {metric}", margin))
    return figures


def _name(row: Comparison) -> str:
    return f"{row['level']} against {row['baseline']}, {row['metric']}"


def _power(rows: Sequence[Comparison], alpha: float) -> list[Note | Table]:
    """The smallest differences that numbers of seeds can show."""
    if not rows:
        return []
    lines = [
        f"{_name(row)}: with the observed spread, {row['seeds']} {'paired seeds' if row['paired'] else 'seeds a level'}"
        f" can show a difference of {row['detectable'][str(row['seeds'])]:.2g} with 80 % power."
        for row in rows
    ]

    def detectable(count: int) -> Callable[[Comparison], str]:
        return lambda row: cell(row["detectable"][str(count)], ".2g")

    columns = {f"{count} seeds": detectable(count) for count in POWER_SEEDS}
    return [
        *map(Note, lines),
        make_table(rows, {"difference shown with 80 % power": _name} | columns),
        Note(
            f"Power is at the level {alpha:g}, before adjustment. With few seeds, the spread itself is uncertain, t "
            "intervals rest on the normal distribution, and BCa intervals are too narrow."
        ),
    ]


def _run_table(results: Results) -> Table:
    def score(metric: str) -> Callable[[RunResult], str]:
        return lambda run: _number(run["metrics"].get(metric))

    metrics = {metric: score(metric) for metric in results["margins"]}
    if any(one["learning_rates"] for run in results["runs"] for one in run["finetuned"].values()):
        metrics["chosen learning rates"] = _chosen_rates
    first, last = {"cell": "{cell}", "seed": "{seed}"}, {"tokens without padding": "{tokens:,}", "failure": _failures}
    return make_table(results["runs"], first | metrics | last)


def _chosen_rates(run: RunResult) -> str:
    """How often each learning rate was chosen, by task."""
    counts = {
        task: Counter(rate for pair in one["learning_rates"] for rate in pair) for task, one in run["finetuned"].items()
    }
    shown = {task: ", ".join(f"{rate:g} x {n}" for rate, n in sorted(found.items())) for task, found in counts.items()}
    return "; ".join(f"{task}: {rates}" for task, rates in shown.items() if rates)


def _failures(run: RunResult) -> str:
    if run["error"]:
        return f"failed after {run['attempts']} attempts: {run['error']}"
    return "; ".join(
        f"{task}: {one['failed']} of {len(one['scores'])} fine-tuning runs failed"
        + (f", {one['scores'].count(None)} of them diverged" if None in one["scores"] else "")
        for task, one in run["finetuned"].items()
        if one["failed"]
    )


def _budget_table(results: Results) -> Table:
    columns = {"cell": "{name}"} | {name: f"{{{name}:,}}" for name in ("steps", "tokens", "parameters")}
    return make_table(results["cells"], columns | {"FLOPs": "{flops:.3g}"})


def _model_table(results: Results, models: dict[str, str]) -> Table:
    """The models of each cell, with the SHA-256 of their config and parameters."""
    rows = [
        {"cell": cell["name"], "parameters": cell["parameters"], "model": path, "sha": models.get(path, "")}
        for cell in results["cells"]
        for path in cell["models"]
    ]
    columns = {"cell": "{cell}", "model": "{model}", "parameters": "{parameters:,}", "SHA-256": "{sha:.16}"}
    return make_table(rows, columns, words=True)


def _variance_blocks(variances: Sequence[VarianceSplit]) -> tuple[Note | Table, ...]:
    """The standard deviations of scores by source; nothing if there are no tasks."""
    if not variances:
        return ()

    def deviation(source: str) -> Callable[[VarianceSplit], str]:
        def write(row: VarianceSplit) -> str:
            variance = row[source]
            if variance is None:
                return "not sampled" if source != "finetuning" or row["models"] < 2 else "not apart"
            return _number(math.sqrt(max(0.0, variance)))

        return write

    columns = {
        "task": "{task}",
        "cell": "{cell}",
        "models": "{models}",
        "fine-tuning runs": "{finetuning_runs}",
        "pretraining seed": deviation("pretraining"),
        "fine-tuning seed": deviation("finetuning"),
        "test set": deviation("test_set"),
        "standard error": lambda row: _number(row["standard_error"]),
    }
    note = (
        "Standard deviations of the score of one run by source (random effects; 0.0000 also for a negative estimate), "
        "and the standard error of the cell's mean from those that were sampled. Of few seeds they are rough. Not "
        "apart: each model was fine-tuned once, so the column of the pretraining seed has both seeds. The examples of "
        "the test set are sampled where the score is the accuracy of texts, in two runs or more; levels share them, so "
        "much of their part cancels in differences."
    )
    return make_table(variances, columns), Note(note)


def _time_table(timing: dict[str, float]) -> Table:
    return Table(("run", "seconds"), tuple((name, cell(seconds, ",.0f")) for name, seconds in timing.items()))


def _mean(mean: float | None, deviation: float | None) -> str:
    return _number(mean) if deviation is None else f"{_number(mean)} (sd {_number(deviation)})"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{_number(low, '+')} to {_number(high, '+')}"


def _number(value: float | None, sign: str = "") -> str:
    """A score with four digits after the point, or a number of tokens with none."""
    return cell(value, f"{sign},.0f" if value is not None and abs(value) >= 1000 else f"{sign}.4f")
