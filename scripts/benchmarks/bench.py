"""Step time, tokens/s and MFU of the train step, compared with the machine's matmul ceiling and a peer library.

    python scripts/benchmarks/bench.py                                       # a small set for the device
    python scripts/benchmarks/bench.py --presets bert_base --seq-lens 128 --batch 8 --dropout 0.1,0 --scan-unroll 1,12
    python scripts/benchmarks/bench.py --peer transformers --threads 2 --json bench.json

One process. Cases of one preset and sequence length form a group and are interleaved: A, B, C, A, B, C, ... Warm-up
and compilation are not timed. MFU is the FLOPs that the model needs (bert_jax/model/flops.py) over the ceiling measured
in this run for the type of the case. Needs only jax, flax, optax and numpy.
"""

import argparse
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts" / "benchmarks")) if path not in sys.path]

import bench_report  # noqa: E402
from bench_command import positive, stamped, write  # noqa: E402

from bert_jax.errors import UserError  # noqa: E402

# (layers, width): Turc et al. 2019, table 1; Devlin et al. 2019, section 3.
PRESETS = {
    "bert_tiny": (2, 128),
    "bert_mini": (4, 256),
    "bert_small": (4, 512),
    "bert_medium": (8, 512),
    "bert_base": (12, 768),
    "bert_large": (24, 1024),
}
RESERVE = 2.0
"""Seconds of the budget that are reserved for the table and the JSON file."""


@dataclass(frozen=True)
class Case:
    """One program on one set of shapes."""

    preset: str
    seq_len: int
    batch: int
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    dtype: str = "float32"
    attention: str = "reference"
    optimizer: str = "adamw"
    accumulation: int = 1
    scan_unroll: int = 1
    remat: str = "none"
    pair: str = "nsp"
    variant: str | None = None
    """Variant of the peer: stock or gathered; None is bert_jax."""
    compiled: bool = False
    """Whether the peer uses torch.compile."""

    @property
    def size(self) -> tuple[int, int]:
        """Layers and width."""
        return PRESETS[self.preset]

    @property
    def program(self) -> str:
        """Name of the measured program."""
        return f"transformers {self.variant}" if self.variant else "bert_jax"

    @property
    def dropout(self) -> str:
        """One rate, or hidden/attention."""
        same = self.hidden_dropout == self.attention_dropout
        return f"{self.hidden_dropout:g}" + ("" if same else f"/{self.attention_dropout:g}")

    @property
    def shapes(self) -> tuple:
        """Settings that must be equal for a comparison with the peer."""
        return self.preset, self.seq_len, self.batch, self.hidden_dropout, self.attention_dropout, self.dtype


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
    """CPU seconds of the process per step: on a shared machine they vary less than wall-clock time."""
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
    cpu = time.process_time()
    try:
        seconds = step.run(count)
    except Exception as error:
        row.status, row.detail = explain(error)
        row.samples = None
        return
    row.samples.append(seconds / count)
    row.cpu_samples = [*(row.cpu_samples or []), (time.process_time() - cpu) / count]


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


def with_peers(cases: Sequence[Case], compiled: bool) -> list[Case]:
    """Add the two variants of the peer after the first case of each set of shapes."""
    result, seen = [], set()
    for case in cases:
        result.append(case)
        if case.shapes not in seen:
            seen.add(case.shapes)
            plain = Case(*case.shapes, pair="none", compiled=compiled)
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
        for batch, attention, optimizer, accumulation, unroll, remat in itertools.product(
            options.batch or [max(1, tokens // seq_len)],
            options.attention or allowed,
            options.optimizer,
            options.accumulation,
            options.scan_unroll,
            options.remat,
        ):
            settings = (attention, optimizer, accumulation, unroll, remat, options.pair)
            cases.append(Case(preset, seq_len, batch, *dropout, dtype, *settings))
    return cases


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; an error is one line and exit code 2."""
    parser = _OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--presets", type=_listed(_one_of(*PRESETS)), help=f"of {', '.join(PRESETS)}")
    add("--seq-lens", type=_listed(positive), help="tokens per row, e.g. 128,512")
    add("--batch", type=_listed(positive), help="rows per step; default: 1,024 tokens on CPU, 16 or 32 k elsewhere")
    add("--dropout", type=_listed(_rates), help="rate, or hidden/attention, e.g. 0.1,0,0.1/0; default 0.1,0")
    add("--dtype", type=_listed(_one_of("float32", "bfloat16")), help="compute type; default float32 on CPU, bfloat16")
    add("--attention", type=_listed(_one_of("reference", "xla", "cudnn")), help="default: all that the case allows")
    add(
        "--optimizer", type=_listed(_one_of("adamw", "lamb")), default=["adamw"], help="of bert_jax; the peer has AdamW"
    )
    add("--accumulation", type=_listed(positive), default=[1], help="micro-batches per step")
    add("--scan-unroll", type=_listed(positive), default=[1], help="layers per iteration of the scan over depth")
    add("--remat", type=_listed(_one_of("none", "dots", "full")), default=["none"], help="remat policy")
    add("--pair", choices=("nsp", "none"), help="pair objective; default nsp, or none with --peer")
    add("--peer", choices=("transformers",), help="also time its BertForMaskedLM, stock and on gathered positions")
    add("--no-peer-compile", action="store_true", help="no torch.compile for the peer (CPU: never)")
    add(
        "--devices",
        type=positive,
        default=1,
        help="devices that share the batch of bert_jax; ceilings are multiplied",
    )
    add("--threads", type=positive, help="CPU cores for this process (jax and torch)")
    add("--rounds", type=positive, default=7, help="rounds over a group for the medians")
    add("--budget", type=float, default=600.0, help="seconds for the whole run; cases without time are listed")
    add("--json", type=Path, metavar="FILE", help="write all measurements there")
    options = parser.parse_args(arguments)
    options.pair = options.pair or ("none" if options.peer else "nsp")
    if options.budget <= RESERVE:
        parser.error(f"--budget {options.budget:g} is too short: give it at least 10 seconds")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.resolve().parent}")
    if options.peer == "transformers":
        from importlib.util import find_spec

        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if missing:
            parser.error(f"--peer transformers needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if options.threads and options.threads > cores:
        parser.error(f"--threads {options.threads}: this process may use {cores} cores")
    return options


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list]:
    def values(text: str) -> list:
        try:
            return [kind(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{text}': {error}") from None

    return values


def _rates(text: str) -> tuple[float, float]:
    rates = [float(part) for part in text.split("/")]
    if len(rates) > 2 or not all(0 <= rate < 1 for rate in rates):
        raise ValueError("it must be RATE or HIDDEN/ATTENTION, in [0, 1)")
    return rates[0], rates[-1]


def _one_of(*names: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise ValueError(f"it must be one of {', '.join(names)}")
        return text

    return check


def run(options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Measure ceilings and cases; returns the report for JSON.

    Raises:
      UserError: fewer devices than requested.
    """
    import bench_bert_jax

    about = bench_bert_jax.describe_device(options.devices)
    cases = default_cases(about["platform"], options)
    peer = None
    if options.peer:
        import bench_peer as peer

        about["versions"] |= peer.describe(about["threads"])
        cases = with_peers(cases, about["platform"] == "gpu" and not options.no_peer_compile)

    def build(case: Case) -> Any:
        log(f"{case.preset} {case.seq_len}: {case.program}, batch {case.batch}, dropout {case.dropout}, {case.dtype}")
        if case.variant is None:
            return bench_bert_jax.BertJaxStep(case, options.devices)
        rows = bench_bert_jax.synthetic_rows(case.batch, case.seq_len)
        masking = bench_bert_jax.predictions(case.seq_len), bench_bert_jax.MASK
        return peer.PeerStep(case, bench_bert_jax.model_config(case), rows, *masking, about["platform"])

    def log(message: str) -> None:
        print(f"[{max(budget.left(), 0):4.0f} s left] {message}", file=sys.stderr, flush=True)

    log("matmul and copy ceilings")
    ceiling = bench_bert_jax.Ceiling(about["platform"])
    ceiling.sample()
    rows, slowest_builds = [], {}
    for group in group_cases(cases):
        group_rows = [Row(case) for case in group]
        rows += group_rows
        measure_group(group_rows, build, budget, options.rounds, slowest_builds)
        # Free the group's arrays before the next group; sample again, as rates drift on a shared machine.
        gc.collect()
        if any(row.samples for row in group_rows) and budget.left() > 2:
            ceiling.sample()
    return bench_report.summarise(about, ceiling, rows, bench_bert_jax.step_flops, options.devices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns 0, or 2 for a user error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    budget = Budget(options.budget)
    if options.threads and hasattr(os, "sched_setaffinity"):
        # Before jax starts its thread pool, which has one thread per available core.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if options.peer:
        # Torch needs memory on the same device.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        report = run(options, budget)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = stamped(report, "bench", arguments)
    write(report, options.json)
    print(bench_report.render(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
