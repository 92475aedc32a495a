"""Notices that a run hangs, writes the stacks of its processes, and ends them, for their launcher to start them again.

A step, a read of rows, an evaluation or a save is a stall if it takes longer than `recovery.stall_seconds` and than
`FACTOR` times the longest of its kind before it in this attempt; the first of a kind, which may compile, has no bound.
After twice that time the process ends with exit code 75. ``kill -USR1`` writes the same stacks at any time.

Time in which the process as a whole did not run (SIGSTOP, a suspended host) does not count; the other processes wait
for it and end. A thread does all this, since the main thread waits in a call of a library. The disk of the work
directory may be what hangs, so that nothing that touches it is waited for without a bound.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import jax

from bert_jax.command.stacks import Stacks
from bert_jax.errors import TRY_AGAIN
from bert_jax.storage import lock
from bert_jax.storage.files import make_directory_if_local, write_atomic
from bert_jax.storage.paths import StoredPath
from bert_jax.training.monitoring.event_hook import OnEvent
from bert_jax.training.run_directory.goodput import Activity, GoodputRecorder

DIRECTORY = "stacks"
"""Folder of the work directory: ``process0.txt`` has the newest stacks of process 0, ``process0.json`` its stall."""
FACTOR = 20.0
WRITE_SECONDS = 5.0
"""Bound of a write, and time for the other processes to write before one reads what all have written."""
TICK_SECONDS = 0.1
SUSPENDED_SECONDS = 0.2
"""A wait of TICK_SECONDS that ends this late shows that the process as a whole did not run."""
ACTIVITIES = {
    "step": "waiting for the step",
    "data_wait": "reading the rows",
    "evaluation": "evaluating",
    "checkpoint": "saving a checkpoint",
}
"""What can stall, by the kinds of `goodput`."""


class Stall(TypedDict):
    """The content of ``process0.json``."""

    process: int
    host: str
    step: int
    """Steps done before."""
    activity: str
    """A key of `ACTIVITIES`."""
    seconds: float
    """Since it began."""


def stall_limit(stall_seconds: float, longest: float | None) -> float:
    """Seconds after which an activity is a stall; infinite for the first of its kind.

    Args:
      stall_seconds: `recovery.stall_seconds`.
      longest: seconds of the longest one before it; None: there was none.
    """
    return float("inf") if longest is None else max(stall_seconds, FACTOR * longest)


def describe_late(stalls: Sequence[Stall], process_count: int) -> str:
    """Which processes the others wait for, as far as their stalls say: "" if all wait in the same step.

    A process that reads rows waits for no other, so it is late. Else a process that has written nothing is stopped,
    cut off, or not stalled by its own bounds. If all have written, those with the fewest steps are late, or, of these,
    those that do something else than wait for the step.
    """
    first = min(stall["step"] for stall in stalls)
    fewest = [stall for stall in stalls if stall["step"] == first]
    late = [stall for stall in fewest if stall["activity"] == "data_wait"]
    silent = sorted({*range(process_count)} - {stall["process"] for stall in stalls})
    if silent and not late:
        return f"process(es) {', '.join(map(str, silent))} wrote no stacks: stopped, or cut off from the disk"
    late = late or [stall for stall in fewest if stall["activity"] != "step"] or fewest
    if len(late) == process_count:
        return ""
    named = (f"process {one['process']} ({one['host']}) is {ACTIVITIES[one['activity']]}" for one in late)
    return f"late: {', '.join(named)}, step {first}"


class Watchdog:
    """A context manager; see the module."""

    def __init__(self, workdir: StoredPath, goodput: GoodputRecorder, stall_seconds: float | None, on_event: OnEvent):
        """Starts nothing.

        Args:
          workdir: of the run.
          goodput: knows what the main thread does, and since when.
          stall_seconds: `recovery.stall_seconds`; None: only SIGUSR1 is handled.
          on_event: called at a stall.
        """
        self._directory, self._goodput, self._stall_seconds = workdir / DIRECTORY, goodput, stall_seconds
        self._on_event = on_event
        self._process, self._count, self._host = jax.process_index(), jax.process_count(), socket.gethostname()
        self._interval = 1.0 if stall_seconds is None else min(1.0, stall_seconds / 8)
        self._closed, self._stacks = threading.Event(), Stacks()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._stacks.__enter__()
        _within(WRITE_SECONDS, lambda: self._file("json").unlink(missing_ok=True))  # of another start
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()
        self._stacks.__exit__()

    def _is_closed_after_tick(self) -> bool:
        """Wait for a moment; if it takes much longer, the process was suspended."""
        tick, before = min(TICK_SECONDS, self._interval), time.perf_counter()
        closed = self._closed.wait(tick)
        late = time.perf_counter() - before - tick
        if late > SUSPENDED_SECONDS:
            self._goodput.suspended += late
        return closed

    def _watch(self) -> None:
        known: Activity | None = None  # the stall that is known
        while not self._is_closed_after_tick():
            if self._stacks.were_asked_for():
                self._write("stacks that SIGUSR1 asks for")
            kind, start, suspended_before = activity = self._goodput.activity
            if kind not in ACTIVITIES or self._stall_seconds is None:
                continue
            seconds = time.perf_counter() - start - (self._goodput.suspended - suspended_before)
            longest = self._goodput.longest.get(kind)
            limit = stall_limit(self._stall_seconds, longest)
            text = f"{ACTIVITIES[kind]} for {seconds:.0f} s, and at most {longest or 0.0:.2g} s before"
            if seconds > limit and activity != known:
                known = activity
                self._on_event("stall", self._goodput.step, f"{self._name}: {text}")
                self._write(text, kind, seconds)
            if seconds > 2 * limit:
                self._end(text)

    def _write(self, text: str, kind: str = "", seconds: float = 0.0) -> None:
        """Write the stacks and, with a kind, the stall to the work directory."""
        step = self._goodput.step
        stall: Stall = {
            "process": self._process,
            "host": self._host,
            "step": step,
            "activity": kind,
            "seconds": round(seconds, 1),
        }
        found = self._stacks.collect(self._interval / 2)

        def write() -> None:
            make_directory_if_local(self._directory)
            write_atomic(self._file("txt"), f"{self._name}, step {step}: {text}\n\n{found}".encode())
            if kind:
                write_atomic(self._file("json"), json.dumps(stall).encode())

        problem = _within(WRITE_SECONDS, write)
        where = f"stacks cannot be written ({problem}):\n{found}" if problem else f"stacks are in {self._file('txt')}"
        _print(f"warning: {self._name}, step {step}: {text}; {where}")

    def _end(self, text: str) -> None:
        """Name the late processes, and end this one."""
        time.sleep(min(WRITE_SECONDS, self._interval * 2))
        late: list[str] = []
        if self._count > 1:
            _within(WRITE_SECONDS, lambda: late.append(describe_late(self._read(), self._count)))
        text = "; ".join([text, *filter(None, late), "the same command continues from the newest checkpoint"])
        _print(f"error: {self._name}, step {self._goodput.step}: {text}")
        _within(WRITE_SECONDS, lock.release_all)
        os._exit(TRY_AGAIN)

    def _read(self) -> list[Stall]:
        files = (self._directory / f"process{process}.json" for process in range(self._count))
        return [json.loads(file.read_bytes()) for file in files if file.exists()]

    def _file(self, ending: str) -> StoredPath:
        return self._directory / f"process{self._process}.{ending}"

    @property
    def _name(self) -> str:
        return f"process {self._process} of {self._count} ({self._host})"


def _within(seconds: float, call: Callable[[], object]) -> str:
    """Make a call in a thread, which may take longer; returns what is wrong, "" if it has ended in time."""
    problems = [f"it takes longer than {seconds:g} s"]

    def run() -> None:
        try:
            call()
            problems.clear()
        except Exception as error:  # of any library: a run does not end by it
            problems[:] = [" ".join(f"{type(error).__name__}: {error}".split())]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return "".join(problems)


def _print(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())  # not to sys.stderr, whose lock the main thread may hold
