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

Needs jax, flax, optax, numpy, scipy and tyro.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import listed, one_of, positive
from scipy.optimize import lsq_linear
from train_step import PRESETS, Case, TrainStep, config_of

from bert_jax.chips import CPU, Chip, Efficiency, Sizes, chip_of
from bert_jax.model.layers import DropoutKey, dropout, gelu
from bert_jax.planning.roofline import ACTIVATION_OPS, HASH_OPS, predict

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
    with harness.clocked(times) as timing:
        for _ in range(times):
            result = call()
        jax.block_until_ready(result)
    return {"clock": timing["seconds"], "cpu": timing["cpu"] / len(harness.usable_cores())}


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
        step = TrainStep(config_of(case))
        step.run(1)
        steps.append((step, max(1, round(seconds / step.run(1)))))
        harness.progress(f"compiled {name_of(case)}")

    def take(step: TrainStep, count: int) -> Sample:
        before = sample()
        taken = timed(lambda: step.run(count), 1)
        after = sample()
        chips = {clock: _between(before[clock], after[clock]) for clock in before}
        return Sample({clock: taken[clock] / count for clock in before}, chips)

    sides = {str(i): functools.partial(take, step, count) for i, (step, count) in enumerate(steps)}
    samples = harness.interleave(sides, rounds).values()
    return [(config_of(case), of) for case, of in zip(cases, samples, strict=True)]


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


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases of the presets, and judge each."""
    fitted, checked = ([case for case in cases if case.preset in options.presets] for cases in (FITTED, CHECKED))
    known = chip_of(jax.devices()[0].device_kind)
    sample = (lambda: {"clock": known}) if known else Machine().sample
    cases = fitted + checked
    measured = measure(cases, options.rounds, options.seconds, sample)
    samples = [sample for _, samples in measured for sample in samples]
    rates = {
        f"{rate}, {clock}": statistics.median(getattr(sample.chips[clock], rate) for sample in samples)
        for rate in RATES
        for clock in samples[0].chips
    }
    results = [
        judge(case, *one) | {"role": "fitted" if case in fitted and not known else "checked"}
        for case, one in zip(cases, measured, strict=True)
    ]
    efficiencies = fit(fitted, measured[: len(fitted)])._asdict() if options.fit and not known else None
    return {"clocks": list(samples[0].chips), "rates": rates, "cases": results, "fit": efficiencies}


def render(report: dict[str, Any]) -> list[str]:
    """The table, the number of checked cases within TARGET, and the rates."""
    clocks = report["clocks"]
    columns = " | ".join(f"seconds, {clock} | predicted / measured, {clock}" for clock in clocks)
    lines = [f"| case | role | {columns} | bound |", f"|---|---|{'---|---|' * len(clocks)}---|"]
    for case in report["cases"]:
        cells = " | ".join(f"{case[clock]['measured']:.3f} | {case[clock]['ratio']:.2f}" for clock in clocks)
        lines.append(f"| {case['case']} | {case['role']} | {cells} | {case[clocks[-1]]['bound']} |")
    for clock in clocks:
        off = [abs(case[clock]["ratio"] - 1) for case in report["cases"] if case["role"] == "checked"]
        within = sum(value <= TARGET for value in off)
        largest = f"largest deviation: {max(off, default=0):.0%}"
        lines.append(f"{clock}: checked cases within {TARGET:.0%}: {within} of {len(off)}; {largest}")
    if report["fit"]:
        lines.append("efficiencies that fit: " + ", ".join(f"{name} {x:.3g}" for name, x in report["fit"].items()))
    return [*lines, "; ".join(f"{name} {value:.3g}" for name, value in report["rates"].items())]


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--rounds", type=positive, default=5)
    add("--seconds", type=float, default=0.5, help="seconds of steps per sample")
    add("--presets", type=listed(one_of(*PRESETS)), default=list(PRESETS), help="only cases of these presets")
    add("--fit", action="store_true", help="also print efficiencies that fit this run's fitting cases")


main = functools.partial(harness.run, __doc__, flags, measure_all, render)


if __name__ == "__main__":
    raise SystemExit(main())
