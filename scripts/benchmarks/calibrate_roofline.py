"""Predicted over measured step time: accuracy of the roofline of `bert-jax plan` on this machine.

    python scripts/benchmarks/calibrate_roofline.py --json roofline.json

Compiles the train step in several shapes. In each round, every case is sampled in turn: the machine's rates (matrix
products, memory, elementwise work) and a few steps are measured within seconds of each other, because the speed of a
shared machine varies; the prediction uses the rates of this sample. The result is the median over rounds of predicted /
measured. On a CPU, everything is timed twice: in wall-clock time, and in CPU seconds of all threads divided by their
number, the time of a step if nothing else ran and no thread waited.

On an accelerator of bert_jax/chips.py, the published figures replace the measured rates. On other devices the
efficiencies are those of `chips.CPU`: some cases served to fit them (role `fitted`), the others check them. `--fit`
prints the efficiencies that fit the fitting cases of this run.

Needs jax, flax, optax, numpy and scipy.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts" / "benchmarks")) if path not in sys.path]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench import PRESETS, Case  # noqa: E402
from bench_bert_jax import BertJaxStep, describe_device  # noqa: E402
from bench_command import positive, stamped, write  # noqa: E402
from scipy.optimize import lsq_linear  # noqa: E402

from bert_jax.chips import CPU, Chip, Efficiency, Sizes, chip_of  # noqa: E402
from bert_jax.model.layers import DropoutKey, dropout, gelu  # noqa: E402
from bert_jax.planning.roofline import ACTIVATION_OPS, HASH_OPS, predict  # noqa: E402

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
RATES = ("peak_flops", "vector_ops", "memory_bandwidth")


CLOCKS = ("clock", "cpu")
Chips = dict[str, Chip]
"""Measured machine, by clock."""


class Sample(NamedTuple):
    """One sample of a case, by clock."""

    seconds: dict[str, float]
    """Seconds of a step."""
    chips: Chips
    """Rates of the machine at the time of the sample."""


def timed(call: Callable[[], Any], times: int) -> dict[str, float]:
    """Seconds per call over several queued calls, until the last result is ready."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    start = time.perf_counter(), time.process_time()
    for _ in range(times):
        result = call()
    jax.block_until_ready(result)
    clock, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    return {"clock": clock / times, "cpu": cpu / threads / times}


class Machine:
    """Measured rates of a device without published figures. A sample takes a few tenths of a second."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0).standard_normal
        shapes = [((ROWS, width), (width, 4 * width)) for width in WIDTHS]
        self.products = [tuple(jnp.asarray(draw(shape, np.float32)) for shape in pair) for pair in shapes]
        self.multiply = jax.jit(jnp.matmul)
        self.values = jnp.asarray(draw((8, VECTOR_ELEMENTS // 8), np.float32))
        dropout_key = DropoutKey(jnp.uint32(1), jnp.arange(8))
        self.hash = jax.jit(lambda x: dropout(x, 0.1, dropout_key))
        self.gelu = jax.jit(jax.grad(lambda x: gelu(x).sum()))
        # Writes to newly allocated memory, as a CPU program's temporaries do.
        self.copy = jax.jit(lambda x: x + 1)
        self.memory = jnp.zeros((MEMORY_ELEMENTS,), jnp.float32)

    def sample(self) -> Chips:
        """Measure the current rates of the machine."""
        flops = [_rates(2 * a.size * b.shape[1], lambda a=a, b=b: self.multiply(a, b), CALLS) for a, b in self.products]
        hashes = _rates(HASH_OPS * VECTOR_ELEMENTS, lambda: self.hash(self.values), CALLS)
        gelus = _rates(ACTIVATION_OPS["gelu"] * VECTOR_ELEMENTS, lambda: self.gelu(self.values), CALLS)
        memory = _rates(2 * self.memory.nbytes, lambda: self.copy(self.memory), CALLS)
        return {
            clock: measured_chip(
                statistics.median(rates[clock] for rates in flops), (hashes[clock] * gelus[clock]) ** 0.5, memory[clock]
            )
            for clock in CLOCKS
        }


def _rates(work: float, call: Callable[[], Any], times: int) -> dict[str, float]:
    """Work per second, after an untimed call."""
    jax.block_until_ready(call())
    return {clock: work / seconds for clock, seconds in timed(call, times).items()}


def measured_chip(flops: float, vector_ops: float, bandwidth: float, efficiency: Efficiency = CPU) -> Chip:
    """A chip with measured rates, without links."""
    return Chip(
        "here",
        device_kinds=(),
        peak_flops=flops,
        float32_share=1.0,
        vector_ops=vector_ops,
        memory_bandwidth=bandwidth,
        memory=0.0,
        link_bandwidth=bandwidth,
        torus_dimensions=0,
        ring_size=1,
        slice_devices=1,
        network_bandwidth=bandwidth,
        efficiency=efficiency,
        source="measured here",
    )


def name_of(case: Case) -> str:
    """Name in the table."""
    parts = [f"{case.preset} {case.seq_len} x {case.batch}", case.optimizer, f"dropout {case.dropout}"]
    parts += [f"accumulation {case.accumulation}"] * (case.accumulation > 1)
    parts += [f"remat {case.remat}"] * (case.remat != "none")
    return ", ".join(parts)


def measure(
    cases: Sequence[Case], rounds: int, seconds: float, sample: Callable[[], Chips]
) -> list[tuple[Any, list[Sample]]]:
    """Config and samples of every case; the cases are sampled in turn."""
    steps = []
    for case in cases:
        step = BertJaxStep(case, 1)
        step.run(1)
        steps.append((step, max(1, round(seconds / step.run(1))), []))
        print(f"compiled {name_of(case)}", file=sys.stderr, flush=True)
    for _ in range(rounds):
        for step, count, samples in steps:
            before = sample()
            taken = timed(lambda step=step, count=count: step.run(count), 1)
            after = sample()
            chips = {clock: _between(before[clock], after[clock]) for clock in before}
            samples.append(Sample({clock: taken[clock] / count for clock in before}, chips))
    return [(step.config, samples) for step, _, samples in steps]


def _between(before: Chip, after: Chip) -> Chip:
    """Mean of the rates before and after."""
    return dataclasses.replace(
        before, **{rate: statistics.mean((getattr(before, rate), getattr(after, rate))) for rate in RATES}
    )


def judge(case: Case, config: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians over the samples of a case, by clock."""
    result: dict[str, Any] = {"case": name_of(case)}
    for clock in samples[0].chips:
        predictions = [predict(config, 0, Sizes(), case.accumulation, sample.chips[clock]) for sample in samples]
        ratios = [p.step_seconds / sample.seconds[clock] for p, sample in zip(predictions, samples, strict=True)]
        middle = predictions[ratios.index(statistics.median_low(ratios))]
        result[clock] = {
            "measured": statistics.median(sample.seconds[clock] for sample in samples),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "bound": middle.bound,
            "seconds": middle.seconds,
        }
    return result


def fit(cases: Sequence[Case], measured: Sequence[tuple[Any, Sequence[Sample]]]) -> Efficiency:
    """Efficiencies that minimise the relative error of these cases in CPU seconds.

    They are not negative, and products are not faster than the measured ones: matmul is at most 1.
    """
    kinds = Efficiency._fields
    lines = []
    for case, (config, samples) in zip(cases, measured, strict=True):
        for sample in samples:
            perfect = dataclasses.replace(sample.chips["cpu"], efficiency=Efficiency(*[1.0] * len(kinds)))
            seconds = predict(config, 0, Sizes(), case.accumulation, perfect).seconds
            lines.append([seconds[kind] / sample.seconds["cpu"] for kind in kinds])
    least = [float(kind == "matmul") for kind in kinds]
    shares = lsq_linear(np.array(lines), np.ones(len(lines)), bounds=(least, np.inf)).x
    return Efficiency(*(float(1 / share) if share > 0 else float("inf") for share in shares))


def report(results: Sequence[dict[str, Any]], clocks: Sequence[str]) -> None:
    """Print the table, and the number of checked cases within TARGET."""
    columns = " | ".join(f"seconds, {clock} | predicted / measured, {clock}" for clock in clocks)
    print(f"| case | role | {columns} | bound |\n|---|---|{'---|---|' * len(clocks)}---|")
    for line in results:
        cells = " | ".join(f"{line[clock]['measured']:.3f} | {line[clock]['ratio']:.2f}" for clock in clocks)
        print(f"| {line['case']} | {line['role']} | {cells} | {line[clocks[-1]]['bound']} |")
    for clock in clocks:
        off = [abs(line[clock]["ratio"] - 1) for line in results if line["role"] == "checked"]
        within = sum(value <= TARGET for value in off)
        largest = f"largest deviation: {max(off, default=0):.0%}"
        print(f"{clock}: checked cases within {TARGET:.0%}: {within} of {len(off)}; {largest}")


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of steps per sample")
    parser.add_argument("--presets", default=",".join(PRESETS), help="only cases of these presets")
    parser.add_argument("--fit", action="store_true", help="also print efficiencies that fit this run's fitting cases")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args(arguments)
    wanted = set(options.presets.split(","))
    fitted, checked = ([case for case in cases if case.preset in wanted] for cases in (FITTED, CHECKED))
    known = chip_of(jax.devices()[0].device_kind)
    sample = (lambda: {"clock": known}) if known else Machine().sample
    cases = fitted + checked
    measured = measure(cases, options.rounds, options.seconds, sample)
    results = [
        judge(case, *one) | {"role": "fitted" if case in fitted and not known else "checked"}
        for case, one in zip(cases, measured, strict=True)
    ]
    report(results, CLOCKS[:1] if known else CLOCKS)
    if options.fit and not known:
        print(fit(fitted, measured[: len(fitted)]))
    about = stamped(describe_device(1), "calibrate_roofline", arguments)
    samples = [sample for _, samples in measured for sample in samples]
    about["rates"] = {
        f"{rate}, {clock}": statistics.median(getattr(sample.chips[clock], rate) for sample in samples)
        for rate in RATES
        for clock in samples[0].chips
    }
    print("; ".join(f"{name} {value:.3g}" for name, value in about["rates"].items()))
    write(about | {"cases": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
