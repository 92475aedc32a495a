"""What all benchmarks share: the command line, interleaved rounds, clocks, ratios by round, memory, and the JSON file.

A benchmark defines its flags, a function that measures and returns the results, and one that prints them; `run` does
the rest. Needs nothing but bert_jax.errors: a benchmark decides what must be installed.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]

from bert_jax.errors import UserError  # noqa: E402

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "tokenizers", "torch", "transformers", "datasketch")
CLOCKS = {"seconds": time.perf_counter, "cpu": time.process_time, "main": time.thread_time}
"""Wall-clock time; CPU time of this process, which varies less on a busy machine; CPU time of this thread."""

Timing = dict[str, float]
"""Seconds by clock."""
Result = TypeVar("Result")


def run(
    about: str,
    add_flags: Callable[[Callable[..., Any]], None],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    render: Callable[[dict[str, Any]], Iterable[str]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the command line, measure, write `--json`, print.

    Args:
      about: docstring of the benchmark, its help.
      add_flags: called with `add_argument` of the parser.
      measure: returns the results, ready for JSON. Words after `--` are in `options.rest`.
      render: lines to print for the report, which has the results, `date`, `command` and `environment`.
      arguments: default: those of the process.

    Returns:
      0, or 2 after one line for a `UserError`; wrong flags exit with 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(about, add_flags, arguments)
    try:
        if options.json and not options.json.resolve().parent.is_dir():
            raise UserError(f"--json {options.json}: there is no directory {options.json.resolve().parent}")
        report = measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report["command"] = [str(Path(measure.__code__.co_filename).relative_to(ROOT)), *arguments]
    report["environment"] = environment() | report.get("environment", {})
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(render(report)))
    return 0


def parse(about: str, add_flags: Callable[[Callable[..., Any]], None], arguments: Sequence[str]) -> argparse.Namespace:
    """The options; wrong flags exit with 2 after one line."""
    parser = _OneLineParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser.add_argument)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.rest = arguments[end + 1 :]
    return options


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)


def positive(text: str) -> int:
    """Parse a positive integer, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': it must be a whole number from 1")
    return int(text)


def listed(kind: Callable[[str], Result]) -> Callable[[str], list[Result]]:
    """Parser of comma-separated values, for argparse."""

    def values(text: str) -> list[Result]:
        try:
            return [kind(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{text}': {error}") from None

    return values


def one_of(*names: str) -> Callable[[str], str]:
    """Parser of one of the names, for `listed`."""

    def check(text: str) -> str:
        if text not in names:
            raise ValueError(f"it must be one of {', '.join(names)}")
        return text

    return check


def environment() -> dict[str, Any]:
    """Commit, cores, load, versions of the packages in use, and the device if jax is one of them."""
    describe = "git", "-C", str(ROOT), "describe", "--always", "--dirty"
    is_clone = (ROOT / ".git").exists()
    about: dict[str, Any] = {
        "commit": subprocess.run(describe, capture_output=True, text=True).stdout.strip() if is_clone else None,
        "cores": os.cpu_count(),
        "threads": len(usable_cores()),
        "load": os.getloadavg(),
        "versions": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
    }
    if jax := sys.modules.get("jax"):
        device = jax.devices()[0]
        about |= {"platform": device.platform, "device": device.device_kind}
    return about


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def pin(threads: int) -> None:
    """Use that many cores only; jax and torch start one thread for each when they are first used.

    Raises:
      UserError: there are fewer.
    """
    cores = usable_cores()
    if threads > len(cores):
        raise UserError(f"--threads {threads}: this process may use {len(cores)} cores")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[:threads])


@contextlib.contextmanager
def clocked(steps: int = 1) -> Iterator[Timing]:
    """A timing that is filled at the end of the context, divided by `steps`."""
    start, timing = {name: clock() for name, clock in CLOCKS.items()}, {}
    yield timing
    timing |= {name: (clock() - start[name]) / steps for name, clock in CLOCKS.items()}


def timed(work: Callable[[], Result], steps: int = 1) -> tuple[Result, Timing]:
    """Result of a call, and its seconds divided by `steps`."""
    with clocked(steps) as timing:
        result = work()
    return result, timing


def interleave(sides: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Call the sides in turn, A, B, A, B, ..., so that all see the same machine; their results, one per round."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            results[name].append(side())
    return results


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Spread of values / baseline by round, which cancels changes of the machine's speed."""
    return spread([one / other for one, other in zip(values, baseline, strict=False)])


def show(spread: Mapping[str, float], form: str = ".2f") -> str:
    """A spread as text: 1.09 (1.01 to 1.14)."""
    return f"{spread['median']:{form}} ({spread['min']:{form}} to {spread['max']:{form}})"


def progress(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


def header(report: Mapping[str, Any]) -> str:
    """Device and cores of a report, on one line."""
    about = report["environment"]
    return f"{about.get('device', 'no device')}, {about['threads']} threads, load {about['load'][0]:.1f}"


def memory_megabytes(pid: int | str = "self", field: str = "VmHWM") -> int:
    """Peak (VmHWM) or current (VmRSS) resident memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith(field)), 0)


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of a module in a fresh process, so that its peak memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def run_command(command: Sequence[str], poll_seconds: float = 0.25) -> tuple[float, list[int]]:
    """Seconds of a command, and the peak memory in MB of each process that it started.

    Raises:
      UserError: it failed.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in _descendants(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), memory_megabytes(pid))
        time.sleep(poll_seconds)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise UserError(f"{' '.join(command)} failed: {process.stderr.read()[-2000:]}")
    return seconds, sorted(peaks.values(), reverse=True)


def _descendants(pid: int) -> list[int]:
    pids = [pid]
    for each in pids:
        try:
            children = [(task / "children").read_text() for task in Path(f"/proc/{each}/task").iterdir()]
        except OSError:
            continue
        pids += [int(child) for of_task in children for child in of_task.split()]
    return pids
