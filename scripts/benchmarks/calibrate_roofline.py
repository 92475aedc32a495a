"""Predicted over measured step time: accuracy of the roofline of `bert-jax plan`, and the efficiencies that fit.

    python scripts/benchmarks/calibrate_roofline.py --sweep sweep.json   # of `bert-jax bench --sweep`
    python scripts/benchmarks/calibrate_roofline.py --published

With `--sweep`, the cases and times are those of the file, which one device of bert_jax/chips.py has measured: groups
that compare implementations of attention serve to fit (role `fitted`), the others check (`checked`). The result of a
case is the median over rounds of predicted / measured. With `--published`, the published runs of
bert_jax/planning/published_runs.py are compared with the prediction, and all serve to fit one factor for all
efficiencies of a family of chips. Nothing is measured here. Needs jax, flax, optax, numpy, scipy and tyro.
"""

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from bert_jax.bench import harness, sweep
from bert_jax.bench.train_step import Case, config_of
from bert_jax.chips import GPU, TPU, Chip, Efficiency, Sizes, chip_of
from bert_jax.errors import require
from bert_jax.planning.published_runs import RUNS, PublishedRun, predicted_rows_per_second
from bert_jax.planning.roofline import Prediction, predict

TARGET = 0.25
"""Largest accepted deviation of predicted / measured from 1."""


def name_of(case: Case) -> str:
    """Name in the table."""
    parts = [f"{case.preset} {case.seq_len} x {case.batch}", case.optimizer, f"dropout {case.dropout}", case.attention]
    parts += [f"accumulation {case.accumulation}"] * (case.accumulation > 1)
    parts += [f"remat {case.remat}"] * (case.remat != "none")
    parts += [case.dense_dtype] * (case.dense_dtype != "compute") + [f"{case.rows} rows"] * (case.rows != "full")
    return ", ".join(parts)


def predicted(case: Case, chip: Chip) -> Prediction:
    """Prediction for a case on one device."""
    return predict(config_of(case), 0, Sizes(), case.accumulation, chip)


def judge(case: Case, seconds: Sequence[float], chip: Chip) -> dict[str, Any]:
    """Compare the measured seconds of a case with the prediction."""
    prediction = predicted(case, chip)
    ratios = [prediction.step_seconds / one for one in seconds]
    return {
        "case": name_of(case),
        "measured": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "bound": prediction.bound,
        "seconds": prediction.seconds,
    }


def fit(cases: Sequence[Case], measured: Sequence[Sequence[float]], chip: Chip) -> Efficiency:
    """Efficiencies that minimise the relative error of these cases.

    They are not negative, and products are not faster than the chip's: matmul is at most 1.
    """
    kinds, configs = Efficiency._fields, [config_of(case) for case in cases]

    def seconds(number: int, assumed: Chip) -> float:
        parts = predict(configs[number], 0, Sizes(), cases[number].accumulation, assumed).seconds
        return sum(parts[kind] for kind in kinds)

    def errors(shares: np.ndarray) -> list[float]:
        """Not linear: what the vector units bound does not depend on an efficiency."""
        assumed = dataclasses.replace(chip, efficiency=Efficiency(*(1.0 / shares).tolist()))
        found = [seconds(number, assumed) for number in range(len(cases))]
        return [took / one - 1.0 for took, samples in zip(found, measured, strict=True) for one in samples]

    least = np.array([1.0 if kind == "matmul" else 1e-6 for kind in kinds])
    shares = least_squares(errors, np.full(len(kinds), 1.5), bounds=(least, np.inf), xtol=1e-10, ftol=1e-12).x
    return Efficiency(*(float(1 / share) if share > 1e-5 else float("inf") for share in shares))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Judge the cases of a sweep, or the published runs."""
    require(options.published != bool(options.sweep), "give --sweep FILE or --published")
    if options.sweep:
        return judge_sweep(options.sweep)
    families = {"GPU": GPU, "TPU": TPU}
    return {"published": {family: judge_published(runs, families[family]) for family, runs in RUNS.items()}}


def judge_sweep(file: Path) -> dict[str, Any]:
    """Judge the cases that a sweep has measured on one device, by the published figures of its chip.

    Raises:
      UserError: it is not the file of a sweep on a chip with published figures, or has no cases to fit.
    """
    (device, devices), rows = sweep.read_report(file, "--sweep")
    require(devices == 1, f"--sweep {file} has measured {devices} devices: make one of a single device")
    rows = [row for row in rows if row["status"] == "measured" and row["variant"] is None]
    cases = [Case(**{field: row[field] for field in sweep.FIELDS if field in row}) for row in rows]
    chip = chip_of(device)
    require(
        chip is not None, f"--sweep {file} is of {device}, which bert_jax/chips.py does not have: leave out --sweep"
    )
    measured = [row["samples"] for row in rows]
    is_fitted = [" at " in row["group"] and not row["group"].startswith("peer") for row in rows]
    require(any(is_fitted), f"--sweep {file} has no measured group of attention implementations: continue the sweep")
    results = [
        judge(case, samples, chip) | {"role": "fitted" if fits else "checked"}
        for case, samples, fits in zip(cases, measured, is_fitted, strict=True)
    ]
    fitted, samples, _ = zip(*(one for one in zip(cases, measured, is_fitted, strict=True) if one[2]), strict=True)
    return {"cases": results, "fit": fit(fitted, samples, chip)._asdict()}


def judge_published(runs: Sequence[PublishedRun], efficiency: Efficiency) -> dict[str, Any]:
    """Compare published runs with the prediction, and fit one factor of the efficiency to them: that with the least
    squares of the logarithms of predicted / published.
    """

    def ratios(factor: float) -> list[float]:
        scaled = Efficiency(*(factor * share for share in efficiency))
        return [predicted_rows_per_second(run, scaled) / run.rows_per_second for run in runs]

    best = minimize_scalar(lambda x: sum(math.log(r) ** 2 for r in ratios(x)), bounds=(0.1, 10), method="bounded")
    return {
        "runs": [
            {
                "source": run.source,
                "hardware": run.hardware,
                "devices": run.devices,
                "work": [one._asdict() for one in run.work],
                "published": run.rows_per_second,
                "ratio": ratio,
            }
            for run, ratio in zip(runs, ratios(1.0), strict=True)
        ],
        "fit": Efficiency(*(float(best.x) * share for share in efficiency))._asdict(),
    }


def render_published(families: dict[str, Any]) -> list[str]:
    """A table of all runs, and for each family the largest deviation and the fit."""
    lines = ["| source | devices | tokens: batch, micro-batch | published rows/s | predicted | error |"]
    lines.append("|---|---|---|---|---|---|")
    notes = []
    for family, judged in families.items():
        for run in judged["runs"]:
            work = "; ".join(
                f"{one['seq_len']}: {one['batch_size']:,}, {one['per_device_rows']}" for one in run["work"]
            )
            rates = f"{run['published']:,.0f} | {run['ratio'] * run['published']:,.0f} | {run['ratio'] - 1:+.0%}"
            lines.append(f"| {run['source']} | {run['devices']:,} x {run['hardware']} | {work} | {rates} |")
        largest = max(abs(run["ratio"] - 1) for run in judged["runs"])
        fitted = ", ".join(f"{name} {share:.3g}" for name, share in judged["fit"].items())
        notes.append(f"{family}: {len(judged['runs'])} runs, all within {largest:.0%}; efficiencies that fit: {fitted}")
    return lines + notes


def render(report: dict[str, Any]) -> list[str]:
    """The table, the number of checked cases within TARGET, and the fit."""
    if "published" in report:
        return render_published(report["published"])
    lines = ["| case | role | seconds | predicted / measured | bound |", "|---|---|---|---|---|"]
    for case in report["cases"]:
        figures = f"{case['measured']:.3f} | {case['ratio']:.2f} | {case['bound']}"
        lines.append(f"| {case['case']} | {case['role']} | {figures} |")
    off = [abs(case["ratio"] - 1) for case in report["cases"] if case["role"] == "checked"]
    within, largest = sum(value <= TARGET for value in off), max(off, default=0)
    lines.append(f"checked cases within {TARGET:.0%}: {within} of {len(off)}; largest deviation: {largest:.0%}")
    lines.append("efficiencies that fit: " + ", ".join(f"{name} {x:.3g}" for name, x in report["fit"].items()))
    return lines


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--sweep", type=Path, metavar="FILE", help="judge the cases of a sweep, and fit the efficiencies to them")
    add("--published", action="store_true", help="judge published runs, and fit the efficiencies to them")


main = functools.partial(harness.run, __doc__, flags, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
