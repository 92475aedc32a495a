"""Goodput: the share of a run's time that was spent on steps of its result, and the time by kind.

``goodput.jsonl`` has a line for every save and every line of metrics: seconds by kind since the start of the process,
or of the attempt after a rollback. The last line of each attempt counts. The first one also has code and
environment. Attempts are ordered by their lines, and durations are taken from a clock that does not jump, because a
host's date can be wrong. Only the time between two attempts is a difference of dates.
"""

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict

from bert_jax.distributed.agreement import is_first
from bert_jax.errors import OutageError, UserError
from bert_jax.provenance import Code, code, current_date, describe_code
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.environment import describe_environment
from bert_jax.training.run_directory.json_lines import JsonLines, read_lines, truncate_lines

FILE = "goodput.jsonl"
KINDS = ("init", "compile", "data_wait", "evaluation", "checkpoint")
"""Kinds of time that are measured directly. The rest is `step`."""
_Seconds = TypedDict("_Seconds", dict.fromkeys((*KINDS, "step"), float))


class _Required(TypedDict):
    start_time: float
    """date of the start; identifies the attempt"""
    unix: float
    """date of the line"""
    step: int
    seconds: _Seconds


class SlowProcess(TypedDict):
    """A process that the others waited for (training/monitoring/stragglers.py)."""

    process: int
    host: str
    share: float
    """of the time in which the process did not wait for its devices"""
    others: float
    """median of the other processes"""


class _Line(_Required, total=False):
    environment: dict[str, str]
    slow: list[SlowProcess]
    code: Code


class Activity(NamedTuple):
    """What a process does."""

    kind: str
    """One of `KINDS` or "step"."""
    start: float
    """`time.perf_counter()`."""
    suspended_before: float
    """`GoodputRecorder.suspended` at the start."""


class GoodputRecorder:
    """Time by kind of one attempt: a process, or its training after a rollback.

    It is a context manager. If a user's mistake ends the attempt, the last line says so, and the start does not count
    (`starts_without_checkpoint`); an outage of a store is no such mistake. Another thread may read the attributes.

    Attributes:
      seconds: by kind, of what has ended.
      step: number of steps that were dispatched.
      activity: what goes on. A step lasts from one block that is measured to the next.
      longest: seconds of the longest activity of each kind that has ended, without those of `suspended`.
      suspended: seconds in which the process as a whole did not run; the watchdog counts them.
    """

    seconds: dict[str, float]
    step: int
    activity: Activity
    longest: dict[str, float]
    suspended: float

    def __init__(self, workdir: StoredPath, start: float):
        """Start the clock; damaged lines are removed from the file.

        Args:
          workdir: of the run.
          start: `time.perf_counter()` at the start of the process or attempt; the time since then is `init`.
        """
        self._start, self._file, self._last = start, None, None
        elapsed = time.perf_counter() - start
        self.start_time = time.time() - elapsed
        if is_first():
            truncate_lines(workdir / FILE, _Line)
            self._file = JsonLines(workdir / FILE, durable=False)
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._lock, self._rest = threading.Lock(), "init"  # the kind of time in no block
        self.step = 0
        self.activity, self.longest, self.suspended = Activity("init", start, 0.0), {}, 0.0

    @contextlib.contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Add the time of the block to this kind."""
        start = self._change_activity(kind)
        try:
            yield
        finally:
            with self._lock:
                self.seconds[kind] += self._change_activity(self._rest) - start

    def _change_activity(self, kind: str) -> float:
        """One activity ends, and another begins; returns the time."""
        now, (before, start, suspended_before) = time.perf_counter(), self.activity
        seconds = now - start - (self.suspended - suspended_before)
        self.longest[before] = max(self.longest.get(before, 0.0), seconds)
        self.activity = Activity(kind, now, self.suspended)
        return now

    def begin(self, step: int) -> None:
        """The process is about to initialise or restore the state; the newest checkpoint is of step `step`."""
        self.write_totals(step, start=True)
        if self._file is not None:
            self._file.flush()

    def ready(self, step: int) -> None:
        """Initialisation has finished before step `step`: the time until now is `init`."""
        made_by = {}
        if self._file is not None:
            made_by = {"environment": {"date": current_date()} | describe_environment(), "code": code()}
        with self._lock:
            self.seconds["init"] += self._change_activity("step") - self._start - sum(self.seconds.values())
            self._rest = "step"
        self.write_totals(step, **made_by)

    def totals(self) -> dict[str, float]:
        """Seconds by kind until now, `step` and what goes on included; none ever becomes less."""
        with self._lock:
            seconds, (kind, start, _), now = self.seconds | {"step": 0.0}, self.activity, time.perf_counter()
            if kind != self._rest:
                seconds[kind] += now - start
            seconds[self._rest] += now - self._start - sum(seconds.values())
            return seconds

    def write_totals(self, step: int, **values: Any) -> None:
        """Add a line after `step` steps, with further JSON values; only the first process writes."""
        if self._file is None:
            return
        seconds = {kind: round(value, 3) for kind, value in self.totals().items()}
        line = {"start_time": self.start_time, "unix": time.time(), "step": step, "seconds": seconds}
        self._file.write(line | values)
        self._last = line

    def __enter__(self) -> "GoodputRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file after all lines are written."""
        if self._file is None:
            return
        if self._last and kind and issubclass(kind, UserError) and not issubclass(kind, OutageError):
            with contextlib.suppress(OSError):  # the mistake can be a full disk
                self._file.write(self._last | {"ended": "error"})
        self._file.close()


def summarize(workdir: StoredPath) -> dict[str, float]:
    """Seconds of the run by kind, over all attempts.

    Returns:
      `KINDS`; `step`, for steps that are part of the result; `lost`, for steps that were repeated later;
      `down`, between attempts; `wall`, from the first to the last moment; and `goodput`, step / wall.
    """
    attempts: dict[float, list[dict]] = {}  # in the order of their first lines
    for entry in read_lines(workdir / FILE, _Line):
        attempts.setdefault(entry["start_time"], []).append(entry)
    ordered = list(attempts.values())
    total = dict.fromkeys((*KINDS, "step", "lost", "down"), 0.0)
    for i, lines in enumerate(ordered):
        last = lines[-1]["seconds"]
        for kind in (*KINDS, "step"):
            total[kind] += last[kind]
        if later := ordered[i + 1 :]:
            repeated_from = min(line["step"] for attempt in later for line in attempt)
            kept = [line["seconds"]["step"] for line in lines if line["step"] <= repeated_from]
            lost = last["step"] - max(kept, default=0.0)
            total["step"], total["lost"] = total["step"] - lost, total["lost"] + lost
            total["down"] += max(0.0, later[0][0]["start_time"] - lines[-1]["unix"])
    wall = sum(total.values())
    return total | {"wall": wall, "goodput": total["step"] / wall if wall else 0.0}


def starts_without_checkpoint(workdir: StoredPath, step: int) -> int:
    """The number of the last starts in a row that began at a step and ended neither the run nor by a user's mistake."""
    starts: dict[float, int] = {}
    for entry in read_lines(workdir / FILE, _Line):
        if entry.get("start"):
            starts[entry["start_time"]] = entry["step"]
        if entry.get("ended"):
            starts.pop(entry["start_time"], None)
    return len(list(itertools.takewhile(lambda begun: begun == step, reversed(starts.values()))))


def describe_slow(workdir: StoredPath) -> list[str]:
    """A sentence for each process that was slow, those with the most lines first."""
    lines: dict[tuple[int, str], list[SlowProcess]] = {}
    for entry in read_lines(workdir / FILE, _Line):
        for one in entry.get("slow", []):
            lines.setdefault((one["process"], one["host"]), []).append(one)
    return [
        f"Process {process} ({host}) was slow in {len(of)} line(s) of metrics: it was busy or suspended for "
        f"{statistics.median(one['share'] for one in of):.0%} of the time, the others for "
        f"{statistics.median(one['others'] for one in of):.0%} (medians)."
        for (process, host), of in sorted(lines.items(), key=lambda item: -len(item[1]))
    ]


def environments(workdir: StoredPath) -> list[dict[str, str]]:
    """Code, date and environment (`environment.describe_environment`) of each attempt that trained, in order."""
    attempts = [line for line in read_lines(workdir / FILE, _Line) if "environment" in line]
    return [
        ({"code": describe_code(line["code"])} if "code" in line else {}) | line["environment"] for line in attempts
    ]


def trained_by(workdir: StoredPath) -> Code | None:
    """The code that trained a run; if several attempts did, other code than that of this process. None: unknown."""
    codes = [line["code"] for line in read_lines(workdir / FILE, _Line) if "code" in line]
    return min(codes, key=lambda one: one["sha256"] == code()["sha256"], default=None)


def format_summary(seconds: dict[str, float]) -> str:
    """The goodput and the other kinds of time as one line of text."""
    wall = seconds["wall"]
    shares = [f"{name.replace('_', ' ')} {seconds[name] / max(wall, 1e-9):.1%}" for name in (*KINDS, "lost", "down")]
    return f"goodput {seconds['goodput']:.1%} of {wall:,.0f} s: {', '.join(shares)}"
