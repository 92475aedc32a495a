"""Faults in runs of four processes, as rows of a table: python -m tests.multi_process.fault_matrix [FAULT ...]

Each fault happens in process 2 at step 45 of 90, once. A row has the fault, the seconds until a process names the one
at fault and what it says, the exit codes of each start, the events of `--on-event` (process, event, step, exit code),
and whether all lines of metrics.jsonl equal those of an undisturbed run, bit for bit. A row takes one to three minutes
on two cores.
"""

import http.server
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from tests.multi_process.commands import Job, faulty_python, lines
from tests.multi_process.configs import build_corpora
from tests.multi_process.faulty import FAULTS

PROCESSES, PROCESS, STEP = 4, 2, 45
FLAGS = ["--recovery.stall-seconds", "5", "--recovery.replica-check-every", "7", "--cluster.notices", "gcp"]
ON_EVENT = 'echo "$BERT_JAX_PROCESS $BERT_JAX_EVENT $BERT_JAX_STEP $BERT_JAX_EXIT_CODE" >> "$EVENTS"'
NAMED = re.compile(rf"process(\(es\))? {PROCESS}\b|note: instance/preempted")
QUIET = {"preempted": "FALSE", "maintenance-event": "NONE"}


class Line(NamedTuple):
    """A line of standard error."""

    time: float
    text: str


class FaultyRun:
    """A run that is started as a launcher does: until it ends with 0, three times at most."""

    def __init__(self, directory: Path, corpus: Path, fault: str, notices: dict[str, str]):
        self.workdir, self.fault_file, self.events = (directory / name for name in ("run", "fault", "events"))
        self.corpus, self.fault, self.notices = corpus, fault, notices
        self.interpreter, self.said, self.codes = str(directory / "python"), list[Line](), list[list[int]]()
        os.environ["EVENTS"], os.environ["FAULT_FILE"] = str(self.events), str(self.fault_file)
        if fault in FAULTS:
            faulty_python(directory, fault, STEP, STEP)
        else:
            Path(self.interpreter).write_text(
                f'#!/bin/sh\nexport GCE_METADATA_HOST=$NOTICE_HOST\nexec {sys.executable} "$@"\n'
            )
            Path(self.interpreter).chmod(0o755)

    def run(self) -> None:
        while len(self.codes) < 3 and (not self.codes or any(self.codes[-1])):
            flags = {process: [*FLAGS, "--on-event", ON_EVENT] for process in range(PROCESSES)}
            job = Job(self.corpus, self.workdir, PROCESSES, extra=flags, interpreters={PROCESS: self.interpreter})
            readers = [threading.Thread(target=self._read, args=[one.stderr]) for one in job.supervisors]
            for reader in readers:
                reader.start()
            if not self.codes and self.fault not in FAULTS:
                job.wait_for(STEP)
                self.fault_file.write_text(str(time.time()))
                self._disturb(job)
            self.codes.append([one.wait(600) for one in job.supervisors])
            self.notices.update(QUIET)
            for reader in readers:
                reader.join()

    def _read(self, stream: IO[str]) -> None:
        for text in stream:
            self.said.append(Line(time.time(), text.strip()))

    def _disturb(self, job: Job) -> None:
        match self.fault:
            case "killed":
                job.kill_child(PROCESS)
            case "frozen":
                os.kill(job.child(PROCESS), signal.SIGSTOP)
            case "notice":
                self.notices["preempted"] = "TRUE"
            case "slow":  # half of the time, for 15 s
                for sent in itertools.islice(itertools.cycle([signal.SIGSTOP, signal.SIGCONT]), 30):
                    if child := job.child(PROCESS):
                        os.kill(child, sent)
                    time.sleep(0.5)

    def row(self, undisturbed: list[dict]) -> str:
        happened = float(self.fault_file.read_text())
        after = [one for one in self.said if one.time > happened and NAMED.search(one.text)]
        first = after[0] if after else Line(happened, "nobody")
        codes = ", then ".join(" ".join(map(str, start)) for start in self.codes)
        events = "; ".join(self.events.read_text().splitlines())
        identical = "yes" if lines(self.workdir) == undisturbed else "no"
        text = first.text.replace("|", "/")
        return f"| {self.fault} | {first.time - happened:.1f} | {text} | {codes} | {events} | {identical} |"


@contextmanager
def notice_servers() -> Iterator[dict[str, str]]:
    """Metadata servers; process 2 has the one whose answers are yielded, and no other process gets a notice."""
    answers = dict(QUIET)

    def serve(values: dict[str, str]) -> http.server.ThreadingHTTPServer:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(values[self.path.rpartition("/")[2]].encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    servers = serve(answers), serve(QUIET)
    os.environ["NOTICE_HOST"], os.environ["GCE_METADATA_HOST"] = (f"127.0.0.1:{one.server_port}" for one in servers)
    yield answers
    for server in servers:
        server.shutdown()


def main(faults: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary, notice_servers() as answers:
        directory = Path(temporary)
        corpus = build_corpora(directory)[0]
        for code, _, stderr in Job(corpus, directory / "undisturbed", PROCESSES).end():
            assert code == 0, stderr[-3000:]
        undisturbed = lines(directory / "undisturbed")
        for fault in faults or [*FAULTS, "killed", "frozen", "slow", "notice"]:
            place = directory / fault
            place.mkdir()
            run = FaultyRun(place, corpus, fault, answers)
            run.run()
            print(run.row(undisturbed), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
