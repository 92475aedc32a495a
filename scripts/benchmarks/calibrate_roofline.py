"""Predicted over measured step time: accuracy of the roofline of `bert-jax plan` on this machine.

    python scripts/benchmarks/calibrate_roofline.py --json roofline.json
    python scripts/benchmarks/calibrate_roofline.py --sweep sweep.json   # of `bert-jax bench --sweep`
    python scripts/benchmarks/calibrate_roofline.py --published

Compiles the train step in several shapes. In each round, every case is sampled in turn: the machine's rates (matrix
products, memory, elementwise work) and a few steps are measured within seconds of each other, because the speed of a
shared machine varies; the prediction uses the rates of this sample. The result is the median over rounds of predicted /
measured. On a CPU, times are CPU seconds of all threads divided by their number: the time of a step if nothing else ran
and no thread waited.

On an accelerator of bert_jax/chips.py, the published figures replace the measured rates. On other devices the
efficiencies are those of `chips.CPU`: some cases served to fit them (role `fitted`), the others check them. The last
line has the efficiencies that fit the fitting cases of this run. With `--sweep`, the cases and times are those of the
file: groups that compare implementations of attention serve to fit, the others check. With `--published`, nothing is
measured: the published runs of bert_jax/planning/published_runs.py are compared with the prediction, and all serve to
fit one factor for all efficiencies of a family of chips.

Needs jax, flax, optax, numpy, scipy and tyro.
"""

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import lsq_linear, minimize_scalar

from bert_jax.bench import harness, sweep
from bert_jax.bench.harness import listed, one_of, positive
from bert_jax.bench.train_step import PRESETS, Case, TrainStep, config_of
from bert_jax.chips import CPU, GPU, TPU, Chip, Efficiency, Sizes, chip_of
from bert_jax.errors import require
from bert_jax.model.layers import DropoutKey, dropout, gelu
from bert_jax.planning.published_runs import RUNS, PublishedRun, predicted_rows_per_second
from bert_jax.planning.roofline import ACTIVATION_OPS, HASH_OPS, Prediction, predict

TARGET = 0.25
"""Largest accepted deviation of predicted / measured from 1."""
FITTED = (
    Case("bert_tiny", 128, 16),
    Case("bert_tiny", 128, 64),
    Case("bert_tiny", 512, 4),
    Case("bert_mini", 128, 8),
    Case("bert_mini", 512, 2),
    Case("bert_small", 128, 4),
    Case("bert_medium", 128, 2),
)
CHECKED = (
    Case("bert_tiny", 128, 16, 0.0, 0.0),
    Case("bert_mini", 128, 8, 0.0, 0.0),
    Case("bert_mini", 512, 2, 0.0, 0.0),
    Case("bert_mini", 256, 8),
    Case("bert_mini", 128, 32),
    Case("bert_mini", 128, 8, optimizer="lamb"),
    Case("bert_mini", 128, 16, accumulation=2),
    Case("bert_mini", 128, 8, remat="full"),
    Case("bert_mini", 128, 8, remat="dots"),
    Case("bert_small", 512, 2),
    Case("bert_medium", 128, 4, optimizer="lamb"),
)
ROWS, WIDTHS = 1024, (128, 256, 512)
"""Shapes of the measured products: [ROWS, width] with [width, 4 width], as in a feed-forward layer."""
MEMORY_ELEMENTS = 2**24
VECTOR_ELEMENTS = 2**20
CALLS = 6
"""Calls per measurement of a rate."""


class Sample(NamedTuple):
    """One sample of a case."""

    seconds: float
    """Seconds of a step."""
    chip: Chip
    """Rates of the machine at the time of the sample."""


def timed(call: Callable[[], Any], times: int) -> float:
    """Seconds per call over several queued calls, until the last result is ready."""
    with harness.clocked(times) as timing:
        for _ in range(times):
            result = call()
        jax.block_until_ready(result)
    is_cpu = jax.default_backend() == "cpu"
    return timing["cpu"] / len(harness.usable_cores()) if is_cpu else timing["seconds"]


def machine() -> Callable[[], Chip]:
    """A function that measures the current rates of a device without published figures, in a few tenths of a second."""
    draw = np.random.default_rng(0).standard_normal
    pairs = [[jnp.asarray(draw(shape, np.float32)) for shape in ((ROWS, n), (n, 4 * n))] for n in WIDTHS]
    values = jnp.asarray(draw((8, VECTOR_ELEMENTS // 8), np.float32))
    key = DropoutKey(jnp.uint32(1), jnp.arange(8))
    hash_bits, multiply = jax.jit(lambda x: dropout(x, 0.1, key)), jax.jit(jnp.matmul)
    activate = jax.jit(jax.grad(lambda x: gelu(x).sum()))
    # Writes to newly allocated memory, as a CPU program's temporaries do.
    copy, memory = jax.jit(lambda x: x + 1), jnp.zeros((MEMORY_ELEMENTS,), jnp.float32)

    def rate(work: float, function: Callable[..., Any], *arguments: Any) -> float:
        jax.block_until_ready(function(*arguments))
        return work / timed(lambda: function(*arguments), CALLS)

    def measure() -> Chip:
        products = [rate(2 * a.size * b.shape[1], multiply, a, b) for a, b in pairs]
        hashes = rate(HASH_OPS * VECTOR_ELEMENTS, hash_bits, values)
        activations = rate(ACTIVATION_OPS["gelu"] * VECTOR_ELEMENTS, activate, values)
        bandwidth = rate(2 * memory.nbytes, copy, memory)
        return measured_chip(statistics.median(products), (hashes * activations) ** 0.5, bandwidth)

    return measure


def measured_chip(flops: float, vector_ops: float, bandwidth: float) -> Chip:
    """A chip with measured rates, without links."""
    return Chip("here", (), flops, vector_ops, bandwidth, 0.0, bandwidth, bandwidth, 0, 1, 1, 1.0, 0.0, CPU)


def name_of(case: Case) -> str:
    """Name in the table."""
    parts = [f"{case.preset} {case.seq_len} x {case.batch}", case.optimizer, f"dropout {case.dropout}", case.attention]
    parts += [f"accumulation {case.accumulation}"] * (case.accumulation > 1)
    parts += [f"remat {case.remat}"] * (case.remat != "none")
    parts += [case.dense_dtype] * (case.dense_dtype != "compute") + [f"{case.rows} rows"] * (case.rows != "full")
    return ", ".join(parts)


def measure(cases: Sequence[Case], rounds: int, seconds: float, rates: Callable[[], Chip]) -> list[list[Sample]]:
    """Samples of every case; the cases are sampled in turn."""

    def take(step: TrainStep, count: int) -> Sample:
        before = rates()
        taken = timed(lambda: step.run(count), 1) / count
        after = rates()
        names = ("peak_flops", "vector_ops", "memory_bandwidth")
        mean = {name: (getattr(before, name) + getattr(after, name)) / 2 for name in names}
        return Sample(taken, dataclasses.replace(before, **mean))

    sides = {}
    for case in cases:
        step = TrainStep(config_of(case))
        step.run(1)
        sides[name_of(case)] = functools.partial(take, step, max(1, round(seconds / step.run(1))))
        harness.progress(f"compiled {name_of(case)}")
    return list(harness.interleave(sides, rounds).values())


def predicted(case: Case, chip: Chip) -> Prediction:
    """Prediction for a case on one device."""
    return predict(config_of(case), 0, Sizes(), case.accumulation, chip)


def judge(case: Case, samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians over the samples of a case."""
    predictions = [predicted(case, sample.chip) for sample in samples]
    ratios = [p.step_seconds / sample.seconds for p, sample in zip(predictions, samples, strict=True)]
    middle = predictions[ratios.index(statistics.median_low(ratios))]
    return {
        "case": name_of(case),
        "measured": statistics.median(sample.seconds for sample in samples),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "bound": middle.bound,
        "seconds": middle.seconds,
    }


def fit(cases: Sequence[Case], measured: Sequence[Sequence[Sample]]) -> Efficiency:
    """Efficiencies that minimise the relative error of these cases.

    They are not negative, and products are not faster than the measured ones: matmul is at most 1.
    """
    kinds = Efficiency._fields
    lines = []
    for case, samples in zip(cases, measured, strict=True):
        for sample in samples:
            perfect = dataclasses.replace(sample.chip, efficiency=Efficiency(*[1.0] * len(kinds)))
            seconds = predicted(case, perfect).seconds
            lines.append([seconds[kind] / sample.seconds for kind in kinds])
    least = [float(kind == "matmul") for kind in kinds]
    shares = lsq_linear(np.array(lines), np.ones(len(lines)), bounds=(least, np.inf)).x
    return Efficiency(*(float(1 / share) if share > 0 else float("inf") for share in shares))


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases of the presets, or read those of a sweep or published ones, and judge each."""
    if options.published:
        return {
            "published": {
                family: judge_published(runs, {"GPU": GPU, "TPU": TPU}[family]) for family, runs in RUNS.items()
            }
        }
    if options.sweep:
        return judge_sweep(options.sweep)
    fitted, checked = ([case for case in cases if case.preset in options.presets] for cases in (FITTED, CHECKED))
    known = chip_of(jax.devices()[0].device_kind)
    cases = fitted + checked
    measured = measure(cases, options.rounds, options.seconds, (lambda: known) if known else machine())
    results = [
        judge(case, samples) | {"role": "fitted" if case in fitted and not known else "checked"}
        for case, samples in zip(cases, measured, strict=True)
    ]
    return {"cases": results, "fit": None if known else fit(fitted, measured[: len(fitted)])._asdict()}


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
    measured = [[Sample(seconds, chip) for seconds in row["samples"]] for row in rows]
    is_fitted = [" at " in row["group"] and not row["group"].startswith("peer") for row in rows]
    require(any(is_fitted), f"--sweep {file} has no measured group of attention implementations: continue the sweep")
    results = [
        judge(case, samples) | {"role": "fitted" if fits else "checked"}
        for case, samples, fits in zip(cases, measured, is_fitted, strict=True)
    ]
    chosen = [one for one in zip(cases, measured, is_fitted, strict=True) if one[2]]
    return {"cases": results, "fit": fit([one[0] for one in chosen], [one[1] for one in chosen])._asdict()}


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
            work = "; ".join(f"{one['seq_len']}: {one['batch_size']:,}, {one['rows']}" for one in run["work"])
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
    if report["fit"]:
        lines.append("efficiencies that fit: " + ", ".join(f"{name} {x:.3g}" for name, x in report["fit"].items()))
    return lines


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--rounds", type=positive, default=5)
    add("--seconds", type=float, default=0.5, help="seconds of steps per sample")
    add("--sweep", type=Path, metavar="FILE", help="judge and fit the cases of a sweep instead of measuring")
    add("--published", action="store_true", help="judge and fit published runs instead of measuring")
    add("--presets", type=listed(one_of(*PRESETS)), default=list(PRESETS), help="only cases of these presets")


main = functools.partial(harness.run, __doc__, flags, measure_all, render)


if __name__ == "__main__":
    raise SystemExit(main())
