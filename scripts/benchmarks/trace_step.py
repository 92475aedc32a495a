"""Where the time of a train step goes on a CPU or a GPU: a trace by jax.profiler, by kind of work, and its picture.

    python scripts/benchmarks/trace_step.py --plot step_time.png

On a CPU, an event of the trace belongs to an instruction of the compiled program, whose operation and shapes decide its
kind. The sum over events is more than the step where instructions run at the same time; the shares are of this sum.
On a GPU, an event is a kernel, and its name decides; the step is in bfloat16, with the attention that `auto` chooses.
"""

import argparse
import dataclasses
import functools
import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, one_of, positive
from bert_jax.bench.train_step import PRESETS, VOCABULARY, Case, TrainStep, config_of
from bert_jax.distributed import jax_setup
from bert_jax.errors import UserError

STEPS = 2
ROWS = {"bert_tiny": 64, "bert_mini": 32}
KINDS = {
    "products of layers": "#31688e",
    "products of the decoder": "#35b779",
    "reductions": "#fde725",
    "element-wise": "#b5b5b5",
    "copies and layouts": "#d1495b",
    "lookups": "#6b4c9a",
    "products": "#31688e",
    "attention": "#35b779",
}
"""Colours by kind, in the order of the bars. The last two are of GPUs, whose products have no shapes in the trace."""
KERNELS = (
    ("products", r"nvjet|cutlass|cublas|gemm"),
    ("attention", r"^(forward|query_gradient|key_gradient)_kernel|fmha|flash"),
    ("lookups", r"gather|scatter"),
    ("copies and layouts", r"memcpy|copy|transpose|slice|concatenate|pad_"),
    ("reductions", r"reduce"),
    ("element-wise", r""),
)
"""Kinds of kernels of a GPU by patterns in their names; the first that matches counts."""
MOVES = ("copy", "transpose", "bitcast", "slice", "pad", "concatenate", "broadcast", "reshape", "squeeze", "add_any")


def kind_of(instruction: str, lines: Mapping[str, str]) -> str:
    """The kind of an instruction, from its name and its line of the program, which has its operation and operands."""
    line = lines[instruction]
    operation = re.search(r'op_name="[^"]*?([\w.\-]*)"', line)
    last = operation[1] if operation else ""
    # XLA names a fusion after the operations in it; op_name is that of its result.
    if "dot_general" in last or instruction.startswith("dot"):
        operands = re.findall(r"%([\w.\-]+)", line.split("metadata=")[0])
        shapes = [lines[name].split("{")[0] for name in (instruction, *operands) if name in lines]
        has_vocabulary = any(re.search(rf"\b{VOCABULARY.size}\b", shape) for shape in shapes)
        return "products of the decoder" if has_vocabulary else "products of layers"
    if last.startswith("reduce") or instruction.startswith("reduce"):
        return "reductions"
    if "gather" in instruction or "scatter" in instruction:
        return "lookups"
    if last in MOVES or instruction.startswith(MOVES):
        return "copies and layouts"
    return "element-wise"


def kind_of_kernel(name: str) -> str:
    """The kind of a GPU's kernel."""
    return next(kind for kind, pattern in KERNELS if re.search(pattern, name))


def is_kernel(event: dict[str, Any], names: Mapping[tuple[int, int | None], str]) -> bool:
    """Whether an event ran on a stream of a GPU; names are those of processes and their threads."""
    process, thread = names.get((event["pid"], None), ""), names.get((event["pid"], event.get("tid")), "")
    return event.get("ph") == "X" and process.startswith("/device:GPU") and thread.startswith("Stream")


def names_of(events: Sequence[dict[str, Any]]) -> dict[tuple[int, int | None], str]:
    """Names of the processes of a trace by (process, None), of their threads by (process, thread)."""
    return {
        (event["pid"], event["tid"] if event["name"] == "thread_name" else None): event["args"]["name"]
        for event in events
        if event.get("name") in ("process_name", "thread_name")
    }


def trace(case: Case) -> dict[str, float]:
    """Milliseconds per step by kind of work."""
    step = TrainStep(config_of(case))
    step.time_steps(STEPS)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            step.time_steps(STEPS)
        (file,) = Path(directory).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    total = Counter[str]()
    if jax.default_backend() == "cpu":
        lines = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", step.compiled.as_text(), re.M))
        for event in events:
            if event.get("ph") == "X" and event["name"] in lines:
                total[kind_of(event["name"], lines)] += event["dur"] / 1000 / STEPS
    else:
        names = names_of(events)
        for event in filter(lambda event: is_kernel(event, names), events):
            total[kind_of_kernel(event["name"])] += event["dur"] / 1000 / STEPS
    return {kind: total[kind] for kind in KINDS if total[kind]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Trace a step of each preset.

    Raises:
      UserError: the device is neither a CPU nor a GPU.
    """
    jax_setup.keep_freed_memory()
    platform = jax.default_backend()
    if platform not in ("cpu", "gpu"):
        raise UserError("this reads traces of CPUs and GPUs only: set JAX_PLATFORMS=cpu")
    rows = []
    for preset in options.presets:
        harness.progress(f"tracing {preset}")
        case = Case(preset, options.seq_len, options.batch or ROWS.get(preset, 8), pair="none")
        if platform == "gpu":
            case = dataclasses.replace(case, dtype="bfloat16", attention="auto")
        rows.append({"preset": preset, "batch": case.batch} | trace(case))
    if options.plot:
        title = f"{platform.upper()} time of a train step by kind of work, rows of {options.seq_len}, AdamW"
        draw(rows, title, options.plot)
    return {"milliseconds": rows}


def draw(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """A bar of shares per preset, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    for y, row in enumerate(rows):
        left, total = 0.0, sum(row.get(kind, 0.0) for kind in kinds)
        for kind in kinds:
            share, colour = 100 * row.get(kind, 0.0) / total, KINDS[kind]
            axes.barh(y, share, left=left, color=colour, label=kind if y == 0 else None)
            if share >= 4:
                axes.text(
                    left + share / 2,
                    y,
                    f"{share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if colour == KINDS["products"] else "black",
                )
            left += share
    axes.set_yticks(range(len(rows)), [f"{row['preset']}, {row['batch']} rows" for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="% of the time of all instructions", xlim=(0, 100), title=title)
    figure.legend(loc="outside lower center", ncols=len(kinds), fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    names = ["bert_tiny", "bert_mini", "bert_base"]
    add("--presets", type=listed(one_of(*PRESETS)), default=names, help=f"default: {', '.join(names)}")
    add("--seq-len", type=positive, default=128, help="tokens per row")
    add("--batch", type=positive, help="rows per step; default: 8, 64 (bert_tiny) or 32 (bert_mini)")
    add("--plot", type=Path, help="write a PNG here (needs matplotlib)")


main = functools.partial(harness.run, __doc__, flags, measure, harness.report_lines)


if __name__ == "__main__":
    raise SystemExit(main())
