"""Step time, tokens/s and MFU of the train step, compared with the machine's matmul ceiling and a peer library.

    python scripts/benchmarks/bench.py                                       # a small set for the device
    python scripts/benchmarks/bench.py --presets bert_base --seq-lens 128 --batch 8 --dropout 0.1,0 --scan-unroll 1,12
    python scripts/benchmarks/bench.py --peer transformers --threads 2 --json bench.json

One process. Cases of one preset and sequence length form a group and are interleaved: A, B, C, A, B, C, ... Warm-up
and compilation are not timed. MFU is the FLOPs that the model needs (bert_jax/model/flops.py) over the ceiling measured
in this run for the type of the case. Needs only jax, flax, optax, numpy and tyro.
"""

import argparse
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import bench_report
import harness
import jax
import train_step
from harness import listed, one_of, positive
from train_step import PRESETS, Case

from bert_jax.errors import UserError

RESERVE = 2.0
"""Seconds of the budget that are reserved for the table and the JSON file."""


@dataclass
class Row:
    """Result of a case."""

    case: Case
    status: str = "not measured"
    """measured, out of memory, unsupported, failed, or not measured (the budget ended first)."""
    detail: str = ""
    samples: list[float] | None = None
    """Seconds per step, one number per round."""
    cpu_samples: list[float] | None = None
    """CPU seconds of the process per step."""
    setup_seconds: float | None = None
    compile_seconds: float | None = None
    memory_bytes: int | None = None
    loss: float | None = None


class Budget:
    """Time budget of the whole run in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock, self.end = clock, clock() + seconds

    def left(self) -> float:
        """Remaining seconds, without RESERVE."""
        return self.end - self.clock() - RESERVE


def measure_group(
    rows: Sequence[Row], build: Callable[[Case], Any], budget: Budget, rounds: int, slowest_builds: dict[str, float]
) -> None:
    """Build the cases of a group, then time them in turn for several rounds while the budget lasts.

    A case is built only if the remaining time allows for the slowest build of its program so far and one round of the
    cases built so far. A round is started only if there is time for another one like the last.

    Args:
      rows: filled in place.
      build: makes a step from a case; its errors become the row's status.
      budget: of the whole run.
      rounds: maximum number of rounds.
      slowest_builds: seconds of the slowest build by program; kept over groups, updated here.
    """
    steps: list[tuple[Row, Any, int]] = []
    round_seconds = 0.0
    for row in rows:
        expected = slowest_builds.get(row.case.program, 0.0)
        if budget.left() < expected + round_seconds:
            row.detail = f"budget: {max(budget.left(), 0):.0f} s left, a build took {expected:.0f} s"
            continue
        start = budget.clock()
        try:
            step = build(row.case)
            step.run(1)
            warm = step.run(1)
        except Exception as error:  # Running out of memory is a result, too.
            row.status, row.detail = explain(error)
            continue
        row.setup_seconds = budget.clock() - start
        row.compile_seconds, row.memory_bytes = step.compile_seconds, step.memory_bytes
        slowest_builds[row.case.program] = max(expected, row.setup_seconds)
        # Enough steps per round that dispatch and clock resolution do not matter.
        count = max(1, min(20, round(0.3 / max(warm, 1e-6))))
        round_seconds += count * warm
        steps.append((row, step, count))
        # Kept only if the budget ends before the first round.
        row.samples, row.detail = [warm], "one warm-up step, not interleaved: the budget ended"
    for done in range(rounds):
        if not steps or budget.left() < round_seconds:
            break
        start = budget.clock()
        for row, step, count in steps:
            if not done:
                row.samples, row.detail = [], ""
            _time(row, step, count)
        round_seconds = budget.clock() - start
    for row, step, _ in steps:
        if row.samples:
            row.status, row.loss = "measured", step.loss()


def _time(row: Row, step: Any, count: int) -> None:
    if row.samples is None:
        return
    try:
        seconds, timing = harness.timed(lambda: step.run(count), count)
    except Exception as error:
        row.status, row.detail = explain(error)
        row.samples = None
        return
    row.samples.append(seconds / count)
    row.cpu_samples = [*(row.cpu_samples or []), timing["cpu"]]


def explain(error: Exception) -> tuple[str, str]:
    """Status and a one-line description of a case that failed."""
    text = f"{type(error).__name__}: {error}"
    line = " ".join(text.split())[:200]
    if isinstance(error, UserError):
        return "unsupported", str(error)
    signs = ("RESOURCE_EXHAUSTED", "OutOfMemory", "out of memory", "can't allocate memory", "MemoryError")
    if any(sign in text for sign in signs):
        return "out of memory", line
    # jax.nn and XLA report unsupported kernels with one of these.
    if isinstance(error, NotImplementedError) or "UNIMPLEMENTED" in text or "cudnn" in text.lower():
        return "unsupported", line
    return "failed", line


def group_cases(cases: Iterable[Case]) -> list[list[Case]]:
    """Group cases by (preset, sequence length), in the order of their first case."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.preset, case.seq_len), []).append(case)
    return list(groups.values())


def with_peers(cases: Sequence[Case]) -> list[Case]:
    """Add the two variants of the peer after the first case of each set of shapes."""
    result, seen = [], set()
    for case in cases:
        result.append(case)
        if case.shapes not in seen:
            seen.add(case.shapes)
            plain = Case(*case.shapes, pair="none")
            result += [replace(plain, variant=variant) for variant in ("stock", "gathered")]
    return result


def default_cases(platform: str, options: argparse.Namespace) -> list[Case]:
    """Cases for the options, with defaults for missing ones, in order of priority."""
    on_cpu = platform == "cpu"
    shapes = [("bert_base", 128), ("bert_large", 512), ("bert_large", 128), ("bert_base", 512)]
    if on_cpu:
        shapes = [("bert_mini", 128), ("bert_base", 128)]
    if options.presets or options.seq_lens:
        presets = options.presets or list(dict.fromkeys(preset for preset, _ in shapes))
        lengths = options.seq_lens or list(dict.fromkeys(length for _, length in shapes))
        shapes = list(itertools.product(presets, lengths))
    dropouts = options.dropout or [(0.1, 0.1), (0.0, 0.0)]
    fused = ["xla"] if platform != "gpu" else ["xla", "cudnn"]
    cases = []
    for (preset, seq_len), dropout, dtype in itertools.product(
        shapes, dropouts, options.dtype or ["float32" if on_cpu else "bfloat16"]
    ):
        # Fused attention has no dropout; on a CPU it is no faster.
        allowed = ["reference", *(fused if dropout[1] == 0 and not on_cpu else [])]
        tokens = 1024 if on_cpu else 32768 if preset != "bert_large" else 16384
        for batch, *settings in itertools.product(
            options.batch or [max(1, tokens // seq_len)],
            options.attention or allowed,
            options.optimizer,
            options.accumulation,
            options.scan_unroll,
            options.remat,
        ):
            cases.append(Case(preset, seq_len, batch, *dropout, dtype, *settings, "none" if options.peer else "nsp"))
    return cases


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--presets", type=listed(one_of(*PRESETS)), help=f"of {', '.join(PRESETS)}")
    add("--seq-lens", type=listed(positive), help="tokens per row, e.g. 128,512")
    add("--batch", type=listed(positive), help="rows per step; default: 1,024 tokens on CPU, 16 or 32 k elsewhere")
    add("--dropout", type=listed(_rates), help="rate, or hidden/attention, e.g. 0.1,0,0.1/0; default 0.1,0")
    add("--dtype", type=listed(one_of("float32", "bfloat16")), help="compute type; default float32 on CPU, bfloat16")
    add("--attention", type=listed(one_of("reference", "xla", "cudnn")), help="default: all that the case allows")
    add("--optimizer", type=listed(one_of("adamw", "lamb")), default=["adamw"], help="of bert_jax; the peer has AdamW")
    add("--accumulation", type=listed(positive), default=[1], help="micro-batches per step")
    add("--scan-unroll", type=listed(positive), default=[1], help="layers per iteration of the scan over depth")
    add("--remat", type=listed(one_of("none", "dots", "full")), default=["none"], help="remat policy")
    add("--peer", choices=("transformers",), help="its BertForMaskedLM, too; then nothing is trained on pairs")
    add("--devices", type=positive, default=1, help="devices that share the batch of bert_jax")
    add("--threads", type=positive, help="CPU cores for this process (jax and torch)")
    add("--rounds", type=positive, default=7, help="rounds over a group for the medians")
    add("--budget", type=float, default=600.0, help="seconds for the whole run; cases without time are listed")


def _rates(text: str) -> tuple[float, float]:
    rates = [float(part) for part in text.split("/")]
    if len(rates) > 2 or not all(0 <= rate < 1 for rate in rates):
        raise ValueError("it must be RATE or HIDDEN/ATTENTION, in [0, 1)")
    return rates[0], rates[-1]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ceilings and cases; returns the report for JSON.

    Raises:
      UserError: contradicting options, or something is missing.
    """
    budget = Budget(options.budget)
    if options.budget <= RESERVE:
        raise UserError(f"--budget {options.budget:g} is too short: give it at least 10 seconds")
    if options.threads:
        harness.pin(options.threads)
    if options.peer:
        if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
            raise UserError(f"--peer transformers needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        # Torch needs memory on the same device.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = jax.devices()[0].platform
    cases = default_cases(platform, options)

    def build(case: Case) -> Any:
        log(f"{case.preset} {case.seq_len}: {case.program}, batch {case.batch}, dropout {case.dropout}, {case.dtype}")
        if case.variant is None:
            return train_step.TrainStep(train_step.config_of(case), options.devices)
        import transformers_step

        return transformers_step.TransformersStep(case, platform, len(harness.usable_cores()))

    def log(message: str) -> None:
        harness.progress(f"[{max(budget.left(), 0):4.0f} s left] {message}")

    log("matmul and copy ceilings")
    ceiling = train_step.Ceiling(platform)
    ceiling.sample()
    rows, slowest_builds = [], {}
    for group in group_cases(with_peers(cases) if options.peer else cases):
        group_rows = [Row(case) for case in group]
        rows += group_rows
        measure_group(group_rows, build, budget, options.rounds, slowest_builds)
        # Free the group's arrays before the next group; sample again, as rates drift on a shared machine.
        gc.collect()
        if any(row.samples for row in group_rows) and budget.left() > 2:
            ceiling.sample()
    return bench_report.summarise(ceiling, rows, options.devices)


main = functools.partial(harness.run, __doc__, flags, measure, bench_report.render)


if __name__ == "__main__":
    raise SystemExit(main())
