"""Time of masking relative to the train step that contains it, for every mask unit, unpacked and packed.

    python scripts/benchmarks/bench_masking.py --seq-len 128 --batch 8 --json masking.json

One process. Each round times one step and then some calls of each masking program, so that all see the same machine
state; ratios are of medians. Masking a packed row is also compared with the step on unpacked rows: packing only adds
predictions to the step, so the true ratio is a little smaller. A fourth of the synthetic tokens continue a word. Needs
jax, flax, optax and numpy.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts" / "benchmarks")) if path not in sys.path]

import bench_bert_jax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bench import PRESETS, Case  # noqa: E402
from bench_command import positive, stamped, write  # noqa: E402

from bert_jax.config import ObjectiveConfig  # noqa: E402
from bert_jax.objectives.masking import mask_tokens  # noqa: E402

UNITS = ("token", "word", "ngram", "span")
CONTINUED = 0.25
"""Share of ids that continue a word: a rough guess; the time hardly depends on it."""
MASKING_READS = ("input_ids", "segment_ids", "position_ids", "example_id", "mask_epoch")
TARGET = 0.01
"""Target for the share of masking in a step."""


def vocabulary() -> Any:
    """Vocabulary of the synthetic rows, with ids that continue words."""
    continues = np.random.default_rng(0).random(bench_bert_jax.VOCABULARY.size) < CONTINUED
    continues[: bench_bert_jax.FIRST_WORD] = False
    return bench_bert_jax.VOCABULARY._replace(continues_word=continues.tobytes())


def packed_rows(batch: int, seq_len: int, slots: int = 4) -> dict[str, np.ndarray]:
    """Inputs of masking for rows of `synthetic_rows`, each divided into `slots` examples of about equal length."""
    rows = bench_bert_jax.synthetic_rows(batch, seq_len)
    slot = np.minimum(np.arange(seq_len) * slots // seq_len, slots - 1).astype(np.int32)
    start = np.searchsorted(slot, np.arange(slots)).astype(np.int32)
    ids = rows["input_ids"].copy()
    ids[:, start], ids[:, start[1:] - 1] = bench_bert_jax.CLS, bench_bert_jax.SEP

    def repeat(row: np.ndarray) -> np.ndarray:
        return np.broadcast_to(row, (batch, len(row))).copy()

    return {
        "mask_epoch": rows["mask_epoch"],
        "input_ids": ids,
        "segment_ids": repeat(slot + 1),
        "position_ids": repeat(np.arange(seq_len, dtype=np.int32) - start[slot]),
        "example_id": np.arange(batch * slots, dtype=np.int32).reshape(batch, slots),
    }


def compile_masking(rows: dict[str, np.ndarray], unit: str) -> Callable[[], Any]:
    """`mask_tokens` compiled for these rows, as a function without arguments."""
    key, objective, words = jnp.uint32(1), ObjectiveConfig(mask_unit=unit), vocabulary()
    batch = {name: jnp.asarray(rows[name]) for name in MASKING_READS}
    program = jax.jit(lambda batch, key: mask_tokens(batch, key, objective, words)).lower(batch, key).compile()
    return lambda: program(batch, key)


def seconds_per_call(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call over several queued calls, until the device has finished."""
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians in seconds, and ratios to the step, ready for JSON."""
    about = bench_bert_jax.describe_device(1)
    step = bench_bert_jax.BertJaxStep(Case(options.preset, options.seq_len, options.batch), 1)
    layouts = {"unpacked": bench_bert_jax.synthetic_rows, "packed": packed_rows}
    programs = {
        f"{layout} {unit}": compile_masking(make(options.batch, options.seq_len), unit)
        for layout, make in layouts.items()
        for unit in UNITS
    }
    step.run(1)
    for call in programs.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {"step": [], **{name: [] for name in programs}}
    for _ in range(options.rounds):
        samples["step"].append(step.run(1))
        for name, call in programs.items():
            samples[name].append(seconds_per_call(call, options.calls))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {
        **about,
        "case": {"preset": options.preset, "seq_len": options.seq_len, "batch": options.batch},
        "rounds": options.rounds,
        "calls": options.calls,
        "seconds": medians,
        "ratios": {name: medians[name] / medians["step"] for name in programs},
        "samples": samples,
    }


def render(report: dict[str, Any]) -> str:
    """A line per program, then the largest ratio."""
    case, seconds = report["case"], report["seconds"]
    lines = [
        f"{report['device']}, {report['threads']} threads; {case['preset']}, {case['batch']} rows of "
        f"{case['seq_len']} tokens: {1e3 * seconds['step']:.1f} ms per step, median of {report['rounds']}"
    ]
    for name, ratio in report["ratios"].items():
        lines.append(f"{name:16} {1e3 * seconds[name]:8.3f} ms  {ratio:8.3%} of the step")
    worst = max(report["ratios"], key=report["ratios"].get)
    lines.append(f"largest: {worst}, {report['ratios'][worst]:.3%}; target: at most {TARGET:.0%}")
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="bert_base", help="preset of the step")
    parser.add_argument("--seq-len", type=positive, default=128, help="tokens per row")
    parser.add_argument("--batch", type=positive, default=8, help="rows")
    parser.add_argument("--rounds", type=positive, default=7, help="number of rounds for the medians")
    parser.add_argument("--calls", type=positive, default=10, help="of each masking program per round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    report = stamped(measure(options), "bench_masking", arguments)
    write(report, options.json)
    print(render(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
