"""What all benchmarks share: the command line, interleaved rounds, clocks, ratios by round, memory, tables and JSON.

A benchmark defines its flags and a function that measures: it calls its variants in turn with `interleave`, and
describes them with `summary`. `run` and `report_lines` do the rest. Only bert_jax's `errors` and `report` are
imported: a benchmark decides what must be installed.
"""

import argparse
import contextlib
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bert_jax.bench.report_file import ReportFile
from bert_jax.errors import UserError
from bert_jax.report import Section, Table, text

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "tokenizers", "torch", "transformers")
PACKAGES += ("onnxruntime", "openvino")
CLOCKS = {"seconds": time.perf_counter, "cpu": time.process_time, "main": time.thread_time}
"""Wall-clock time; CPU time of this process, which varies less on a busy machine; CPU time of this thread."""

Timing = dict[str, float]
"""Seconds by clock."""
Returned = TypeVar("Returned")


def run(
    about: str,
    add_flags: Callable[[Callable[..., Any]], None],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    render: Callable[[dict[str, Any]], Iterable[str]],
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
    continues: Callable[[argparse.Namespace], bool] = lambda options: False,
) -> int:
    """Parse the command line, measure, print, write `--json`.

    Args:
      about: docstring of the benchmark, its help.
      add_flags: called with `add_argument` of the parser.
      measure: returns the results, ready for JSON; `options.save(results)` writes results that are not complete.
      render: lines to print for the report, which has `options`, the results, `environment`, `date` and `command`.
      arguments: default: those of the process.
      prog: the command; default: the path of the benchmark's file.
      continues: whether `measure` continues the report in the file of `--json`.

    Returns:
      0, or 2 after one line for a `UserError`; wrong flags exit with 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prog = prog or str(Path(measure.__code__.co_filename).resolve().relative_to(ROOT))
    parser = _OneLineParser(prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser.add_argument)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    options = parser.parse_args(arguments)
    shown = {name: value for name, value in vars(options).items() if value and name != "json"}

    def describe(results: dict[str, Any]) -> dict[str, Any]:
        return {
            "options": shown,
            **results,
            "environment": environment(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": [*prog.split(), *arguments],
        }

    try:
        with contextlib.ExitStack() as stack:
            file = options.json and stack.enter_context(ReportFile(options.json, continues(options)))
            options.save = lambda results: file.write(describe(results)) if file else None
            report = describe(measure(options))
            print("\n".join(render(report)))
            if file:
                file.write(report)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)


def positive(word: str) -> int:
    """Parse a positive integer, for argparse."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"'{word}': it must be a whole number from 1")
    return int(word)


def listed(kind: Callable[[str], Returned]) -> Callable[[str], list[Returned]]:
    """Parser of comma-separated values, for argparse."""

    def values(words: str) -> list[Returned]:
        try:
            return [kind(word.strip()) for word in words.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{words}': {error}") from None

    return values


def one_of(*names: str) -> Callable[[str], str]:
    """Parser of one of the names, for `listed`."""

    def check(word: str) -> str:
        if word not in names:
            raise ValueError(f"it must be one of {', '.join(names)}")
        return word

    return check


def environment() -> dict[str, Any]:
    """Commit, processor, cores, load, versions of the packages in use, and the device if jax is one of them."""
    describe = "git", "-C", str(ROOT), "describe", "--always", "--dirty"
    is_clone = (ROOT / ".git").exists()
    about: dict[str, Any] = {
        "commit": subprocess.run(describe, capture_output=True, text=True).stdout.strip() if is_clone else None,
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": len(usable_cores()),
        "load": os.getloadavg(),
        "versions": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
    }
    if jax := sys.modules.get("jax"):
        device = jax.devices()[0]
        about |= {"platform": device.platform, "device": device.device_kind}
    return about


def processor_name(description: str = "/proc/cpuinfo") -> str:
    """Model of this machine's processor, which its operating system describes; its architecture where it does not."""
    with contextlib.suppress(OSError):
        for line in Path(description).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine()


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def measure_seconds(steps: float = 1) -> Iterator[Timing]:
    """A timing that is filled at the end of the context, divided by `steps`."""
    start, timing = {name: clock() for name, clock in CLOCKS.items()}, {}
    yield timing
    timing |= {name: (clock() - start[name]) / steps for name, clock in CLOCKS.items()}


def timed(work: Callable[[], Returned], steps: float = 1) -> tuple[Returned, Timing]:
    """Result of a call, and its seconds divided by `steps`."""
    with measure_seconds(steps) as timing:
        result = work()
    return result, timing


def timer(work: Callable[[], Any], steps: float = 1) -> Callable[[], Timing]:
    """A side of `interleave`: a function that calls `work` and returns its seconds divided by `steps`."""
    return lambda: timed(work, steps)[1]


def interleave(sides: Mapping[str, Callable[[], Returned]], rounds: int) -> dict[str, list[Returned]]:
    """Call the sides in turn, A, B, A, B, ..., so that all see the same machine; their results, one per round."""
    results: dict[str, list[Returned]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            results[name].append(side())
    return results


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Spread of values / baseline by round, which cancels changes of the machine's speed."""
    return spread([one / other for one, other in zip(values, baseline, strict=True)])


def summary(
    samples: Mapping[str, Sequence[Timing]], baseline: str, clocks: Sequence[str] = ("seconds", "cpu"), **work: float
) -> dict[str, dict[str, Any]]:
    """A row for each side: its seconds by clock, and their ratios to the baseline's by round.

    Args:
      samples: timings by side and round.
      baseline: name of a side.
      clocks: of CLOCKS.
      **work: what a side does in a sample, by unit, e.g. MB=9.5; the row then has the amount per second.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, timings in samples.items():
        values = {clock: [timing[clock] for timing in timings] for clock in clocks}
        row = rows[name] = {clock: spread(seconds) for clock, seconds in values.items()}
        row |= {f"{unit}/s": amount / row["seconds"]["median"] for unit, amount in work.items()}
        if name != baseline:
            for clock, seconds in values.items():
                row[f"{clock} / {baseline}"] = ratio(seconds, [timing[clock] for timing in samples[baseline]])
    return rows


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The machine; then a line for a value, and a table for rows (a list, or a dict by name). Samples are not shown."""
    about = report["environment"]
    machine = about.get("device", "no device"), about["processor"], f"{about['threads']} threads"
    lines = [f"{', '.join(machine)}, load {about['load'][0]:.1f}"]
    for name, value in report.items():
        if name in ("environment", "date", "command", "samples"):
            continue
        if isinstance(value, dict) and name != "options":
            value = [{"name": row_name} | row for row_name, row in value.items()]
        has_rows = isinstance(value, list) and value
        lines += ["", _table(name, value)] if has_rows else [f"{name}: {show(value)}"]
    return lines


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns after the first that have one value are named in the title."""
    cells = {name: [show(row.get(name)) for row in rows] for row in rows for name in row if name != "samples"}
    same = {name: column[0] for name, column in [*cells.items()][1:] if len(rows) > 1 and len(set(column)) == 1}
    shown = {name: column for name, column in cells.items() if name not in same}
    title = ", ".join([title, *(f"{name} {value}" for name, value in same.items())])
    return text.render([Section(title, (Table(tuple(shown), tuple(zip(*shown.values(), strict=True))),))])


def show(value: Any) -> str:
    """A value as text; a spread as 1.09 (1.01 to 1.14)."""
    match value:
        case {"median": median, "min": low, "max": high}:
            return f"{show(median)} ({show(low)} to {show(high)})"
        case {**items}:
            return ", ".join(f"{name} {show(item)}" for name, item in items.items())
        case [*items]:
            return " ".join(map(show, items))
        case None:
            return ""
        case float():
            return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
    return str(value)


def progress(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


def memory_megabytes(pid: str = "self", field: str = "VmHWM") -> int:
    """Peak (VmHWM) or current (VmRSS) resident memory of a process; OSError or 0 if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith(field)), 0)
