"""Metrics of one or several runs: curves, final values, throughput, goodput."""

import math
import statistics
from collections.abc import Sequence

from bert_jax.provenance import MISSING
from bert_jax.report import Bars, Curves, Note, Series, Table
from bert_jax.report.cells import cell
from bert_jax.run_report.run_files import RunFiles
from bert_jax.training.eval_metrics import BASELINES
from bert_jax.training.run_directory import goodput

HELD_OUT, TRAINING = "validation", "train"
SPLITS = {HELD_OUT: "held out", TRAINING: "training"}
NOT_DRAWN = {"tokens_seen", "skipped_steps"}
LOGARITHMIC = {"gradient_norm", "update_norm"}
TIMING = {
    "tokens_per_second": "tokens per second",
    "step_seconds": "seconds per step",
    "mfu": "model FLOP/s utilization (MFU)",
    "data_wait": "share of the time spent waiting for rows",
}
"""Entries of `timing` in a line of metrics."""
MAX_POINTS = 1000
"""Points of a curve; longer curves are drawn with every n-th point."""


def held_out_curves(runs: Sequence[RunFiles]) -> list[Curves]:
    """A figure for each held-out metric, with its baseline; perplexities are left out, the losses show the same."""
    names = [name for name in _names(runs, HELD_OUT) if not name.endswith("_perplexity")]
    return [_curves(runs, HELD_OUT, name) for name in names]


def training_curves(runs: Sequence[RunFiles]) -> list[Curves]:
    """A figure for each metric of training steps, and for the speed; values of single layers are left out."""
    names = [name for name in _names(runs, TRAINING) if "/" not in name and name not in NOT_DRAWN]
    speed = [name for name in ("tokens_per_second",) if any(run.curve(TRAINING, name)[0] for run in runs)]
    return [_curves(runs, TRAINING, name) for name in (*names, *speed)]


def _names(runs: Sequence[RunFiles], *splits: str) -> list[str]:
    return list(dict.fromkeys(name for split in splits for run in runs for name in run.metric_names(split)))


def _curves(runs: Sequence[RunFiles], split: str, name: str) -> Curves:
    several, series = len(runs) > 1, []
    baseline, label = BASELINES.get(name, ("", ""))
    drawn: set[tuple[float, ...]] = set()
    for color, run in enumerate(runs):
        steps, values = _thinned(*run.curve(split, name))
        if steps:
            series.append(Series(run.name if several else name, steps, values, color=color))
        points = dict(zip(*run.curve(split, baseline), strict=True))  # in all phases, whatever they predict
        measured = [step for step in run.curve(split, name)[0] if step in points]
        steps, values = _thinned(measured, [points[step] for step in measured])
        # Baselines of training steps are those of single batches. Runs on the same rows have the same baseline.
        if steps and split == HELD_OUT and values[-1:] not in drawn:
            drawn.add(values[-1:])
            series.append(Series(f"{label}, {run.name}" if several else label, steps, values, dashed=True, color=color))
    return Curves(f"{TIMING.get(name, name)}, {SPLITS[split]}", tuple(series), "step", log_y=name in LOGARITHMIC)


def _thinned(steps: list[int], values: list[float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """At most about MAX_POINTS points, the last one included."""
    stride = -(-len(steps) // MAX_POINTS) or 1
    last = len(steps) - 1
    kept = [i for i in range(len(steps)) if (last - i) % stride == 0]
    return tuple(steps[i] for i in kept), tuple(values[i] for i in kept)


def final_metrics(run: RunFiles) -> tuple[Note, Table]:
    """The last held-out and training value of each metric, beside the baseline of the held-out one."""
    last = {title: run.last(split) for split, title in SPLITS.items()}
    last = {title: values for title, values in last.items() if values}
    names = [name for name in _names([run], HELD_OUT, TRAINING) if "/" not in name and name != "tokens_seen"]
    names = [name for name in names if any(name in values for values in last.values())]
    rows = []
    for name in names:
        baseline, label = BASELINES.get(name, ("", ""))
        value = last.get(SPLITS[HELD_OUT], {}).get(baseline)
        shown = "" if value is None else f"{_number(value)} ({label})"
        rows.append((name, *(_number(values.get(name)) for values in last.values()), shown))
    steps = ", ".join(f"{title}: after step {values['step']:,}" for title, values in last.items())
    return Note(f"Last values, {steps}."), Table(("metric", *last, "baseline, held out"), tuple(rows))


def compared_metrics(runs: Sequence[RunFiles], split: str) -> Table | None:
    """The last value of each metric of a split, with differences to the first run; None without such metrics."""
    last = [run.last(split) for run in runs]
    names = [name for name in _names(runs, split) if "/" not in name and any(name in one for one in last)]
    if not names:
        return None
    rows = [("step", *(f"{one['step']:,}" if one else MISSING for one in last))]
    for name in names:
        first = last[0].get(name)
        cells = [_number(first)]
        for one in last[1:]:
            value = one.get(name)
            both = value is not None and first is not None
            cells.append(f"{_number(value)} ({value - first:+.4g})" if both else _number(value))
        baseline = last[0].get(BASELINES[name][0]) if name in BASELINES and split == HELD_OUT else None
        rows.append((name if baseline is None else f"{name} ({BASELINES[name][1]} {_number(baseline)})", *cells))
    return Table((f"{SPLITS[split]}, last", *(run.name for run in runs)), tuple(rows))


def _number(value: float | None) -> str:
    is_whole = value is not None and float(value).is_integer() and abs(value) < 1e15
    return cell(value, "," if is_whole else ".5g", MISSING)


def throughput_table(runs: Sequence[RunFiles]) -> Table | None:
    """Medians of the speeds in the lines of metrics, and totals; None if nothing was timed."""
    rows = []
    for name, title in TIMING.items():
        values = [[v for v in run.curve(TRAINING, name)[1] if math.isfinite(v)] for run in runs]
        if any(values):
            rows.append((f"{title}, median", *(f"{statistics.median(one):,.4g}" if one else MISSING for one in values)))
    seen = [run.last(TRAINING).get("tokens_seen") for run in runs]
    if any(value is not None for value in seen):
        rows.append(("tokens seen", *map(_number, seen)))
    header = ("throughput", *(run.name for run in runs)) if len(runs) > 1 else ("throughput", "")
    return Table(header, tuple(rows)) if rows else None


def goodput_blocks(runs: Sequence[RunFiles]) -> list[Bars | Note | Table]:
    """The shares of each run's time by kind."""
    kinds = {"step": "steps of the result"} | {
        kind: kind.replace("_", " ") for kind in (*goodput.KINDS, "lost", "down")
    }
    runs = [run for run in runs if run.goodput["wall"] > 0]
    if not runs:
        return []
    if len(runs) == 1:
        seconds = runs[0].goodput
        shares = tuple(seconds[kind] / seconds["wall"] for kind in kinds)
        text = f"{seconds['goodput']:.1%} of {seconds['wall']:,.0f} s were spent on steps that are part of the result."
        lost = "Lost are steps that were repeated later; down is the time between attempts."
        slow = [Note(text, warning=True) for text in runs[0].slow_processes]
        return [Note(f"{text} {lost}"), Bars(tuple(kinds.values()), shares, whole=True), *slow]
    rows = [
        (title, *(f"{run.goodput[kind] / run.goodput['wall']:.1%}" for run in runs)) for kind, title in kinds.items()
    ]
    rows.append(("seconds in total", *(f"{run.goodput['wall']:,.0f}" for run in runs)))
    return [Table(("share of the time", *(run.name for run in runs)), tuple(rows))]
