"""Faults in runs of four processes, as rows of a table: python -m tests.multi_process.fault_matrix [FAULT ...]

Each fault happens in process 2 at step 45 of 90, once. A row has the fault, the seconds until a process names the one
at fault and what it says, the exit codes of each start, the events of `--on-event` (process, event, step, exit code),
and whether all lines of metrics.jsonl equal those of an undisturbed run, bit for bit. A row takes one to three minutes
on two cores.
"""

import http.server
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.multi_process.commands import Job, lines
from tests.multi_process.configs import build_corpora

PROCESSES, PROCESS, STEP = 4, 2, 45
STALL_SECONDS = 5
ON_EVENT = 'echo "$(date +%s.%N) $BERT_JAX_PROCESS $BERT_JAX_EVENT $BERT_JAX_STEP $BERT_JAX_EXIT_CODE" >> "$EVENTS"'
NOTE = "note: instance/preempted"
PATCHES = Path(__file__).parent / "faulty"


class Line(NamedTuple):
    """A line of standard error."""

    time: float
    process: int
    text: str


class Run:
    """A run with a fault; starts like those of a launcher, until it ends with 0 or has started three times."""

    def __init__(self, directory: Path, corpus: Path, fault: str):
        self.workdir, self.fault_file, self.events_file = (directory / name for name in ("run", "fault", "events"))
        self.corpus, self.fault, self.starts, self.said = corpus, fault, [], []
        os.environ["EVENTS"] = str(self.events_file)
        self.interpreter = directory / "python"
        variables = {"PYTHONPATH": f"{PATCHES}:$PYTHONPATH", "FAULT": fault, "FAULT_STEP": str(STEP)}
        variables |= {"FAULT_FILE": str(self.fault_file), "GCE_METADATA_HOST": "$NOTICE_HOST"}
        words = " ".join(f'{name}="{value}"' for name, value in variables.items())
        self.interpreter.write_text(f'#!/bin/sh\n{words} exec {sys.executable} "$@"\n')
        self.interpreter.chmod(0o755)

    def start(self, act: Callable[["Run", Job], None] | None) -> None:
        """Start all processes, act, and wait for their end."""
        flags = ["--recovery.stall-seconds", str(STALL_SECONDS), "--on-event", ON_EVENT]
        flags += ["--cluster.notices", "gcp"] if self.fault == "notice" else []
        job = Job(
            self.corpus,
            self.workdir,
            PROCESSES,
            extra=dict.fromkeys(range(PROCESSES), flags),
            interpreters={PROCESS: str(self.interpreter)},
        )
        readers = [
            threading.Thread(target=self._read, args=[process, supervisor.stderr])
            for process, supervisor in enumerate(job.supervisors)
        ]
        for reader in readers:
            reader.start()
        if act is not None and not self.fault_file.exists():
            act(self, job)
        self.starts.append([supervisor.wait(600) for supervisor in job.supervisors])
        for reader in readers:
            reader.join()

    def _read(self, process: int, stream) -> None:
        for text in stream:
            self.said.append(Line(time.time(), process, text.strip()))

    def happens(self) -> None:
        self.fault_file.write_text(str(time.time()))

    def row(self, undisturbed: list[dict]) -> str:
        """The run as a row of the table."""
        happened = float(self.fault_file.read_text()) if self.fault_file.exists() else time.time()
        name = re.compile(rf"process(\(es\))? {PROCESS}\b")
        named = [one for one in self.said if one.time > happened and (name.search(one.text) or NOTE in one.text)]
        after = f"{named[0].time - happened:.1f} s" if named else "-"
        first = named[0].text.replace("|", "/") if named else ""
        events = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        happenings = "; ".join(" ".join(event.split()[1:]) for event in events)
        identical = "yes" if lines(self.workdir) == undisturbed else "no"
        codes = ", then ".join(" ".join(map(str, start)) for start in self.starts)
        return f"| {self.fault} | {after} | {first} | {codes} | {happenings} | {identical} |"


def suspend_in_pulses(run: Run, job: Job) -> None:
    job.wait_for(STEP)
    run.happens()
    until = time.monotonic() + 15
    while time.monotonic() < until and (child := job.child(PROCESS)):
        os.kill(child, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(child, signal.SIGCONT)
        time.sleep(0.5)


def kill(run: Run, job: Job) -> None:
    job.wait_for(STEP)
    run.happens()
    job.kill_child(PROCESS)


def freeze(run: Run, job: Job) -> None:
    job.wait_for(STEP)
    run.happens()
    os.kill(job.child(PROCESS), signal.SIGSTOP)


def announce(run: Run, job: Job) -> None:
    job.wait_for(STEP)
    run.happens()
    NOTICE["preempted"] = "TRUE"


NOTICE = {"preempted": "FALSE", "maintenance-event": "NONE"}


@contextmanager
def notice_server() -> Iterator[None]:
    """A metadata server that says what NOTICE has; the one of the other processes never announces anything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            quiet = {"preempted": "FALSE", "maintenance-event": "NONE"}
            values = NOTICE if self.server.server_port == port else quiet
            self.send_response(200)
            self.end_headers()
            self.wfile.write(values[name].encode())

        def log_message(self, *_):
            pass

    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    port = servers[0].server_port
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["NOTICE_HOST"], os.environ["GCE_METADATA_HOST"] = (f"127.0.0.1:{one.server_port}" for one in servers)
    yield
    for server in servers:
        server.shutdown()


ACTIONS = {
    "hang in a step": None,
    "hang in a read": None,
    "exception in a step": None,
    "killed": kill,
    "frozen": freeze,
    "slow": suspend_in_pulses,
    "notice": announce,
}


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary, notice_server():
        directory = Path(temporary)
        corpus = build_corpora(directory)[0]
        reference = Job(corpus, directory / "undisturbed", PROCESSES)
        assert [code for code, _, _ in reference.end()] == [0] * PROCESSES
        undisturbed = lines(directory / "undisturbed")
        for fault in wanted or ACTIONS:
            place = directory / fault.replace(" ", "-")
            place.mkdir()
            run = Run(place, corpus, fault)
            while len(run.starts) < 3 and (not run.starts or any(run.starts[-1])):
                run.start(ACTIONS[fault])
                NOTICE["preempted"] = "FALSE"
            print(run.row(undisturbed), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
