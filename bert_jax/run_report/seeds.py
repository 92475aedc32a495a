"""The report on several seeds of one fine-tuning: their scores, the mean with its interval, and the baseline."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from bert_jax import provenance
from bert_jax.provenance import Provenance
from bert_jax.report import Interval, Intervals, Note, Section, Table
from bert_jax.report.cells import cell
from bert_jax.run_report.run_files import SeedEntry
from bert_jax.statistics import Estimate, t_estimate
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.workdir import CONFIG

RESULTS = "results.json"
MOST_DRAWN = 30
"""Seeds of a figure; of more, only their mean is drawn."""


class SeedScore(SeedEntry):
    """The result of a seed with its metrics."""

    metrics: dict[str, float]


class TeacherScore(TypedDict):
    """The teacher of a distillation."""

    score: float


class _OfDistillation(TypedDict, total=False):
    teacher: TeacherScore


class SeedResults(_OfDistillation):
    """The content of results.json of `bert-jax finetune` and `compress distil`, as far as the report needs it."""

    task: str
    baseline: float
    seeds: list[SeedScore]
    provenance: Provenance


def has_seeds(directory: StoredPath) -> bool:
    """Whether a directory holds the results of a fine-tuning with a directory for each seed."""
    return (directory / RESULTS).exists() and any((one / CONFIG).exists() for one in directory.glob("seed*"))


def sections(directory: StoredPath) -> list[Section]:
    """The report on the seeds of a directory.

    Raises:
      UserError: results.json is damaged, or of another version.
    """
    results: SeedResults = read_json_as(directory / RESULTS, SeedResults, "run bert-jax finetune again")
    seeds = results["seeds"]
    return [
        Section(f"Fine-tuning on {results['task']}: {len(seeds)} seeds", tuple(_summary(results)), level=1),
        Section("Scores", (_score_table(results), *_figure(results))),
        *provenance.sections({"runs": results["provenance"]}),
    ]


def _summary(results: SeedResults) -> list[Note]:
    seeds, baseline = results["seeds"], results["baseline"]
    scores = _scores(seeds)
    notes = [*provenance.warnings(results["provenance"])]
    if failed := sum(one["failed"] for one in seeds):
        diverged = len(seeds) - len(scores)
        lost = f", {diverged} of them diverged, without a score" * bool(diverged)
        text = f"{failed} of {len(seeds)} runs failed{lost}. The mean is of all scores, those of failed runs included."
        notes.append(Note(text, warning=True))
    if (above := _estimate([score - baseline for score in scores])) is not None:
        text = f"The mean of {len(scores)} scores is {above.difference + baseline:.4f}, {above.difference:+.4f} above"
        interval = f"95 % interval {above.low:+.4f} to {above.high:+.4f}, p {above.p_value:.2g} (Student's t)"
        notes.append(Note(f"{text} the best constant prediction, {baseline:.4f}: {interval}."))
    if "teacher" in results:
        notes.append(Note(f"The teacher has the score {results['teacher']['score']:.4f}."))
    text = "The interval is over seeds: head, order of examples and dropout. It is not over examples or pretraining."
    return [*notes, Note(text)]


def _scores(seeds: Sequence[SeedScore]) -> list[float]:
    return [one["score"] for one in seeds if one["score"] is not None]


def _estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, interval and test of a mean of 0; None for fewer than two values."""
    return t_estimate(values, [0.0] * len(values), paired=True) if len(values) > 1 else None


def _score_table(results: SeedResults) -> Table:
    """A row for each seed; then mean, standard deviation and the 95 % interval of each column."""
    seeds = results["seeds"]
    names = list(dict.fromkeys(name for one in seeds for name in one["metrics"]))
    columns: dict[str, list[float]] = {"score": _scores(seeds)}
    columns |= {name: [one["metrics"][name] for one in seeds if name in one["metrics"]] for name in names}
    rows = [
        (f"seed {one['seed']}", cell(one["score"], ".4f"), *(cell(one["metrics"].get(name), ".4f") for name in names))
        for one in seeds
    ]
    rows.append(("best constant prediction", cell(results["baseline"], ".4f"), *("" for _ in names)))
    overall = {name: _mean_and_spread(values) for name, values in columns.items()}
    rows += [(title, *(one[title] for one in overall.values())) for title in overall["score"]]
    marked = frozenset(i for i, one in enumerate(seeds) if one["failed"])
    return Table(("", *columns), tuple(rows), marked=marked)


def _mean_and_spread(values: Sequence[float]) -> Mapping[str, str]:
    estimate = _estimate(values)
    interval = "-" if estimate is None else f"{estimate.low:.4f} to {estimate.high:.4f}"
    mean = statistics.fmean(values) if values else None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": cell(mean, ".4f"), "standard deviation": cell(deviation, ".4f"), "95 % interval": interval}


def _figure(results: SeedResults) -> list[Intervals]:
    """The scores of the seeds and the interval of their mean, as differences to the best constant prediction."""
    seeds, baseline = results["seeds"], results["baseline"]
    above = {f"seed {one['seed']}": one["score"] - baseline for one in seeds if one["score"] is not None}
    mean = _estimate(list(above.values()))
    if mean is None:
        return []
    points = [Interval(name, value, value, value) for name, value in above.items()] if len(above) <= MOST_DRAWN else []
    intervals = (*points, Interval("mean", mean.difference, mean.low, mean.high))
    label = f"difference of the score to the best constant prediction, {baseline:.4f}"
    return [Intervals("seeds, and the 95 % interval of their mean", intervals, label)]
