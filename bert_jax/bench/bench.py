"""Step time, tokens/s and MFU of the train step, beside limits of the device
and a peer library.

    bert-jax bench                                # a small set for the device
    bert-jax bench --presets bert_base --seq-lens 128 --batch 8 --dropout 0.1,0
    bert-jax bench --peer transformers --floor --json bench.json
    bert-jax bench --sweep --json sweep.json --budget 540
                                    # the same command continues a sweep
    bert-jax bench --serve MODEL [MODEL ...] --help
                                    # instead: models in their runtimes

One process. Cases of one preset and sequence length form a group and are
interleaved: A, B, C, A, B, C, ... Warm-up and compilation are not timed. MFU is
the FLOP/s of the model (bert_jax/model/flops.py) over the rate of large matrix
products that this run measures in the type of the case.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, get_args, get_type_hints

import jax

from bert_jax.bench import floor, harness, sweep, train_step
from bert_jax.bench.harness import listed, one_of, positive
from bert_jax.bench.train_step import CONTENTS, PEERS, PRESETS, Case, with_variants
from bert_jax.chips import Sizes
from bert_jax.config import OptimizerConfig
from bert_jax.distributed import jax_setup
from bert_jax.errors import UserError
from bert_jax.planning.memory_model import estimate_memory

OPTIMIZERS = get_args(get_type_hints(OptimizerConfig)["name"])
IN_SWEEPS = ("sweep", "peer", "devices", "rounds", "budget")
"""Options that a sweep takes."""
RESERVE = 2.0
"""Seconds of the budget that are reserved for the table and the JSON file."""


@dataclasses.dataclass
class CaseResult:
    """Measurements of a case."""

    case: Case
    group: str = ""
    """Cases of a group are interleaved."""
    status: str = "not measured: the budget ended"
    samples: list[float] = dataclasses.field(default_factory=list)
    """Seconds per step, one number per round."""
    memory_bytes: int | None = None
    loss: float | None = None


def measure_group(
    results: Sequence[CaseResult], build: Callable[[Case], Any], left: Callable[[], float], rounds: int, slowest: float
) -> float:
    """Build the cases of a group, then time them in turn for several rounds while the budget lasts.

    A case is built only if the remaining time allows for the slowest build so far and one round of the cases built so
    far. A round is started only if there is time for another one like the last.

    Args:
      results: filled in place.
      build: makes a step from a case; an error is the status of the case: running out of memory is a result, too.
      left: the remaining seconds.
      rounds: maximum number of rounds.
      slowest: seconds of the slowest build in earlier groups.

    Returns:
      `slowest` for the next group.
    """
    steps: list[tuple[CaseResult, Any, int]] = []
    round_seconds = 0.0
    for result in results:
        before = left()
        if before < slowest + round_seconds:
            continue
        try:
            step = build(result.case)
            step.time_steps(1)
            warm = step.time_steps(1)
        except Exception as error:
            result.status = explain(error)
            continue
        slowest = max(slowest, before - left())
        result.memory_bytes = step.memory_bytes
        # Enough steps per round that dispatch and clock resolution do not matter.
        count = max(1, min(20, round(0.3 / max(warm, 1e-6))))
        steps.append((result, step, count))
        round_seconds += count * warm
    for _ in range(rounds):
        before = left()
        if before < round_seconds:
            break
        for result, step, count in list(steps):
            try:
                result.samples.append(step.time_steps(count) / count)
                result.status, result.loss = "measured", step.loss()
            except Exception as error:
                result.status, result.samples = explain(error), []
                steps.remove((result, step, count))
        round_seconds = before - left()
    return slowest


def explain(error: Exception) -> str:
    """Why a case has no measurement, on one line: refused, out of memory, or failed."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    is_memory = "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    kind = "refused" if isinstance(error, UserError) else "out of memory" if is_memory else "failed"
    return f"{kind}: {' '.join(text.split())[:200]}"


def name_of(case: Case) -> str:
    """Shapes and settings of a case that are not defaults."""
    fields = dataclasses.fields(case)[3:]
    changed = [f"{f.name} {getattr(case, f.name)}" for f in fields if getattr(case, f.name) != f.default]
    return ", ".join([f"{case.preset}, {case.batch} rows of {case.seq_len}", *changed])


def default_cases(platform: str, options: argparse.Namespace) -> list[Case]:
    """Cases for the options, with defaults for missing ones, in order of priority."""
    on_cpu = platform == "cpu"
    shapes = [("bert_base", 128), ("bert_large", 512), ("bert_large", 128), ("bert_base", 512)]
    if on_cpu:
        shapes = [("bert_mini", 128), ("bert_base", 128)]
    if options.presets or options.seq_lens:
        presets = options.presets or dict.fromkeys(preset for preset, _ in shapes)
        shapes = list(itertools.product(presets, options.seq_lens or dict.fromkeys(length for _, length in shapes)))
    dropouts = options.dropout or [(0.1, 0.1), (0.0, 0.0)]
    dtypes = options.dtype or ["float32" if on_cpu else "bfloat16"]
    # `xla` and `cudnn` have no dropout; on a CPU they are no faster.
    fused = {"cpu": [], "gpu": ["xla", "cudnn"]}.get(platform, ["xla"])
    with_dropout = ["deferred", "reference"] if on_cpu else ["reference", f"pallas_{platform}"]
    pair, cases = "none" if options.peer or options.floor else "nsp", []
    for (preset, seq_len), dropout, dtype in itertools.product(shapes, dropouts, dtypes):
        tokens = 1024 if on_cpu else 32768 if preset != "bert_large" else 16384
        for batch, *settings in itertools.product(
            options.batch or [max(1, tokens // seq_len)],
            options.attention or [*with_dropout, *(fused if dropout[1] == 0 else [])],
            options.optimizer,
            options.accumulation,
            options.scan_unroll,
            options.remat,
            options.dense_dtype,
            options.rows,
        ):
            cases.append(Case(preset, seq_len, batch, *dropout, dtype, *settings, pair))
    return cases


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--sweep", action="store_true", help="a fixed set of cases instead of the options below; needs --json")
    add("--presets", type=listed(one_of(*PRESETS)), help=f"of {', '.join(PRESETS)}")
    add("--seq-lens", type=listed(positive), help="tokens per row, e.g. 128,512")
    add("--batch", type=listed(positive), help="rows per step; default: 1,024 tokens on CPU, else 16,384 or 32,768")
    add("--dropout", type=listed(_rates), help="rate, or hidden/attention, e.g. 0.1,0,0.1/0; default 0.1,0")
    add(
        "--dtype",
        type=listed(one_of("float32", "bfloat16")),
        help="compute type; default float32 on CPU, else bfloat16",
    )
    attention = one_of("reference", "deferred", "xla", "cudnn", "pallas_gpu", "pallas_tpu")
    add("--attention", type=listed(attention), help="default: all that the case allows")
    add(
        "--optimizer",
        type=listed(one_of(*OPTIMIZERS)),
        default=["adamw"],
        help=f"of bert_jax: {', '.join(OPTIMIZERS)}; the peer has AdamW",
    )
    add("--accumulation", type=listed(positive), default=[1], help="micro-batches per step")
    add("--scan-unroll", type=listed(positive), default=[None], help="layers per iteration of the scan over depth")
    add("--remat", type=listed(one_of("none", "dots", "full")), default=["none"], help="none, dots or full")
    add(
        "--dense-dtype",
        type=listed(one_of("compute", "float8", "int8")),
        default=["compute"],
        help="operands of dense layers: compute, float8, int8",
    )
    add(
        "--rows",
        type=listed(one_of(*CONTENTS)),
        default=["full"],
        help="of one example: full, padded to twice its length; packed: of two",
    )
    add("--peer", choices=("transformers",), help="its BertForMaskedLM, too; nothing is then trained on pairs")
    add("--floor", action="store_true", help="the work of a step alone, too; nothing is then trained on pairs")
    add("--devices", type=positive, default=1, help="devices that share the batch of bert_jax")
    add("--rounds", type=positive, default=7, help="rounds over a group for the medians")
    add("--budget", type=_seconds, default=600.0, help="seconds, from 10; cases without time are listed")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 10 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}': it must be a number of seconds from 10")
    return seconds


def _rates(text: str) -> tuple[float, float]:
    try:
        rates = [float(part) for part in text.split("/")]
    except ValueError:
        rates = []
    if len(rates) not in (1, 2) or not all(0 <= rate < 1 for rate in rates):
        raise ValueError("it must be RATE or HIDDEN/ATTENTION, in [0, 1)")
    return rates[0], rates[-1]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ceilings and cases.

    Raises:
      UserError: contradicting options, or something is missing.
    """
    end = time.monotonic() + options.budget - RESERVE
    if options.peer:
        if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
            raise UserError(f"--peer transformers needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        # Torch needs memory on the same device.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax_setup.keep_freed_memory()
    # The first use of a device, which reads the environment and creates threads.
    if jax.device_count() < options.devices:
        raise UserError(f"--devices {options.devices}: jax sees {jax.device_count()}")
    platform = jax.devices()[0].platform
    groups, earlier = groups_and_earlier_rows(platform, options)

    def left() -> float:
        return end - time.monotonic()

    def build(case: Case) -> Any:
        harness.progress(f"[{left():4.0f} s left] {name_of(case)}")
        if case.variant is None:
            return train_step.TrainStep(train_step.config_of(case), options.devices, case.rows)
        if case.variant == "floor":
            return floor.FloorStep(case)
        from bert_jax.bench import transformers_step

        return transformers_step.TransformersStep(case, platform, len(harness.usable_cores()))

    ceiling = train_step.Ceiling(jax.devices()[0])
    ceiling.add_samples()
    results, slowest = [], 0.0
    for name, group in groups.items():
        group_results = [CaseResult(case, name) for case in group]
        results += group_results
        slowest = measure_group(group_results, build, left, options.rounds, slowest)
        options.save(describe(ceiling, results, options.devices, earlier))
        # Free the group's arrays before the next group; sample again, as rates drift on a shared machine.
        gc.collect()
        if left() > 2:
            ceiling.add_samples()
    if results and not any(result.samples for result in results):
        raise UserError(f"no case was measured; the first one was {results[0].status}")
    return describe(ceiling, results, options.devices, earlier)


def groups_and_earlier_rows(
    platform: str, options: argparse.Namespace
) -> tuple[dict[str, list[Case]], list[dict[str, Any]]]:
    """The groups of cases to measure, and the rows of the cases that earlier calls of a sweep have measured.

    Raises:
      UserError: as `sweep.earlier_rows`; or a sweep without a file, or with options of its own.
    """
    if not options.sweep:
        if (options.peer or options.floor) and options.rows != ["full"]:
            raise UserError("--peer and --floor measure full rows: leave out --rows")
        cases = default_cases(platform, options)
        variants = [*(PEERS if options.peer else ()), *(["floor"] if options.floor else [])]
        cases = with_variants(cases, variants)
        by_shape = itertools.groupby(cases, lambda case: (case.preset, case.seq_len))
        return {f"{preset} at {seq_len}": list(group) for (preset, seq_len), group in by_shape}, []
    if options.json is None:
        raise UserError("--sweep writes a file after every group of cases: give --json FILE")
    parser = argparse.ArgumentParser()
    flags(parser.add_argument)
    for name, default in vars(parser.parse_args([])).items():
        if name not in IN_SWEEPS and getattr(options, name) != default:
            raise UserError(f"--sweep has cases of its own: leave out --{name.replace('_', '-')}")
    device = jax.devices()[0].device_kind
    rows = sweep.earlier_rows(options.json, device, options.devices)
    groups = sweep.groups(platform, options.peer is not None)
    return {name: group for name, group in groups.items() if not sweep.is_measured(name, group, rows)}, rows


def describe(
    ceiling: Any, results: Sequence[CaseResult], devices: int, earlier: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """The ceilings of one device, and a row per case, after the rows of earlier calls that were not measured again.

    Units: seconds, GiB, FLOP/s; "plan GiB" is the estimate of `bert-jax plan`. tokens/s, without padding, and MFU
    belong to the median step. "times stock" and "times gathered" are the peer's time over bert_jax's, and
    "floor / step" that of the floor, by round, which cancels changes of the machine's speed.
    """
    ceilings = {
        name: {"size": ceiling.sizes[name], "per second": harness.spread(rates)}
        for name, rates in ceiling.samples.items()
    }
    by_group = {name: list(group) for name, group in itertools.groupby(results, lambda result: result.group)}
    # A measurement of an earlier call is replaced with its whole group, as its ratios belong to it.
    again = [name for name, group in by_group.items() if any(result.samples for result in group)]
    rows = [row for row in earlier if row["group"] not in again]
    kept = {row["group"] for row in rows}
    for result in results:
        if result.group in kept:
            continue
        case, samples = result.case, result.samples
        row = dataclasses.asdict(case) | {"group": result.group, "samples": samples}
        if samples:
            row["seconds"] = harness.spread(samples)
            typical = row["seconds"]["median"]
            row["tokens/s"] = math.prod(case.examples) / typical
            if case.variant != "floor":
                rate = ceilings[case.dtype]["per second"]["median"]
                row["MFU"] = train_step.step_flops(case) / typical / rate / devices
            row |= {"GiB": result.memory_bytes and result.memory_bytes / 2**30, "loss": result.loss}
            if case.variant is None:
                others = [one for one in by_group[result.group] if one.case.variant and one.samples]
                others = [one for one in others if one.case.shapes == case.shapes and case.rows == "full"]
                row["plan GiB"] = planned_bytes(case, devices) / 2**30
                for other in others:
                    if other.case.variant != "floor":
                        row[f"times {other.case.variant}"] = harness.ratio(other.samples, samples)
                    elif devices == 1 and floor.is_floor_of(case):
                        row["floor / step"] = harness.ratio(other.samples, samples)
        rows.append(row | {"status": result.status})
    return {"devices": devices, "ceilings": ceilings, "cases": rows}


def planned_bytes(case: Case, devices: int) -> int:
    """The estimate of `bert-jax plan` for the memory of a device."""
    config = train_step.config_of(case)
    return sum(estimate_memory(config, 0, Sizes(data=devices), case.accumulation).values())


measure_steps = functools.partial(
    harness.run,
    __doc__,
    flags,
    measure,
    harness.report_lines,
    prog="bert-jax bench",
    continues=lambda options: options.sweep,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure train steps or, with --serve, models in their runtimes, which needs more packages."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--serve" in words:
        from bert_jax.bench import serve

        return serve.main(words)
    return measure_steps(words)
