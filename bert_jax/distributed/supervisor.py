"""The supervisor of a training process: starts it when all processes are connected, and names the one that fails first.
The functions from `connect_to_supervisor` on are for the training process, its child.

When a peer dies, collective libraries abort a process in C++ with a stack trace that does not name the peer. The
supervisors have connections of their own. All of them name the first process that failed, and end the others.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from bert_jax.distributed.cluster_detection import ClusterConfig, ProcessInfo, detect
from bert_jax.distributed.process_report import Report, make_report, report_differences
from bert_jax.distributed.rendezvous import Rendezvous, listen, open_rendezvous
from bert_jax.errors import INTERRUPTED, TRY_AGAIN, PeerError, UserError

WORKER_ENV = "BERT_JAX_WORKER"
"""Environment variable of the child: its `ProcessInfo`, jax's port, and the file descriptor of its supervisor link."""
COLLECT_SECONDS = 1.0
"""One failure causes others; process 0 collects failures for this long before it decides which was first."""
GRACE_SECONDS = 5.0
"""For a child to end by itself when another process has failed."""
DECISION_TIMEOUT_SECONDS = 15.0
"""To wait for process 0 to announce the first failure."""
SAVING = b"\nCtrl-C: saving after this step; a second Ctrl-C stops at once without saving\n"
LINGER_SECONDS = 2.0
"""Process 0 holds jax's key-value store; it ends this much later, so that the others can still read from it."""


class ProcessFailure(NamedTuple):
    """How a process failed."""

    process: int
    code: int | None
    """Exit code of the training process, negative for a signal; None: the connection to its supervisor closed."""

    @property
    def cause_rank(self) -> int:
        """The failure with the highest rank counts as the first: a failed peer makes a process abort or raise."""
        if self.code in (-signal.SIGABRT, 1, TRY_AGAIN):
            return 1
        return 2 if self.code is not None and self.code > 0 else 3

    @property
    def peer_exit_code(self) -> int:
        """Exit code of the other processes."""
        return self.code if self.code in (1, 2) else TRY_AGAIN

    @property
    def description(self) -> str:
        """What happened, with the process as the subject."""
        if self.code is None:
            return "is gone: its connection closed, or its host does not answer"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


def supervise_command(words: Sequence[str], cluster: ClusterConfig, options: Mapping[str, Any]) -> int | None:
    """Run a command of bert-jax under supervision, if this process is one of several.

    Args:
      words: of the command line, from the command's name on.
      cluster: flags of the cluster.
      options: all that decides the results (process_report.py); they must be equal in all processes.

    Returns:
      see `supervise`; None: this process runs the command itself, because it is the only one or a supervised child.

    Raises:
      PeerError, UserError: see `supervise` and `cluster_detection.detect`.
    """
    if WORKER_ENV in os.environ or (info := detect(cluster)) is None:
        return None
    return supervise([sys.executable, "-m", "bert_jax", *words], info, make_report(options), cluster.timeout)


def supervise(command: Sequence[str], info: ProcessInfo, report: Report, timeout: float) -> int:
    """Run a command as one of several processes, and monitor it and its peers.

    Args:
      command: of the child, which calls `worker.connect_worker`.
      info: of this process.
      report: of this process (process_report.py).
      timeout: seconds to wait for the other processes at the start.

    Returns:
      an exit code: the child's if it ended in order; otherwise 1, 2 or `TRY_AGAIN`. After Ctrl-C, `INTERRUPTED`
      instead of `TRY_AGAIN`.

    Raises:
      PeerError, UserError: the run cannot start (`open_rendezvous`), or the reports differ.
    """
    children: list[subprocess.Popen] = []
    with _forward_signals(children) as interrupts:
        rendezvous, settings = open_rendezvous(info, report, timeout, _agree)
        try:
            code = _Monitor(rendezvous, info, settings["hosts"]).run(command, settings["port"], children)
            return INTERRUPTED if interrupts and code == TRY_AGAIN else code
        finally:
            rendezvous.close()


def _agree(reports: list[Report]) -> dict[str, Any]:
    """Hosts of all processes, and a free port on process 0's host, for jax; UserError if the reports differ."""
    if found := report_differences(reports):
        raise UserError(found[0])
    with listen(0) as probe:
        return {"hosts": [report["host"] for report in reports], "port": probe.getsockname()[1]}


class _Monitor:
    """Runs the child, and collects the failures of all processes."""

    def __init__(self, rendezvous: Rendezvous, info: ProcessInfo, hosts: Sequence[str]):
        self.rendezvous, self.info, self.hosts = rendezvous, info, hosts
        self.done: set[int] = set()  # processes that ended in order
        self.failures: list[ProcessFailure] = []
        self.first_report_time = 0.0  # when this process learned of a failure
        self.first_failure: ProcessFailure | None = None

    def run(self, command: Sequence[str], port: int, children: list[subprocess.Popen]) -> int:
        own_end, child_end = socket.socketpair()
        settings = {"info": self.info, "port": port, "descriptor": child_end.fileno()}
        environment = os.environ | {WORKER_ENV: json.dumps(settings)}
        # In a process group of its own: a terminal sends Ctrl-C to the group of this process, which forwards it.
        self.child = subprocess.Popen(command, env=environment, pass_fds=[child_end.fileno()], process_group=0)
        children.append(self.child)
        child_end.close()
        with own_end:
            self._wait(own_end)
            return self._finish()

    def _wait(self, link: socket.socket) -> None:
        """Return when all processes ended in order, or the first failure is known."""
        own, ended = self.info.process_index, 0.0
        while True:
            with suppress(queue.Empty):
                self._handle_event(*self.rendezvous.events.get(timeout=0.1))
            if not ended and (code := self.child.poll()) is not None:
                ended = time.monotonic()
                if _exit_was_announced(link):
                    self.done.add(own)
                    self.rendezvous.send(done=True)
                else:
                    self._add_failure(ProcessFailure(own, code))
                    self.rendezvous.send(failure=code)
            collected = time.monotonic() > self.first_report_time + COLLECT_SECONDS
            if self.first_failure is None and self.failures and own == 0 and collected:
                self.first_failure = max(self.failures, key=lambda failure: failure.cause_rank)
                self.rendezvous.send(first_failure=self.first_failure)
            late = bool(ended and self.failures) and time.monotonic() > ended + DECISION_TIMEOUT_SECONDS
            if self.first_failure or late or (own in self.done and (own or len(self.done) == self.info.process_count)):
                return

    def _handle_event(self, process: int, message: dict[str, Any] | None) -> None:
        if message is None:
            if process not in self.done and self.first_failure is None:
                self._add_failure(ProcessFailure(process, None))
                if self.info.process_index:  # process 0 is gone and cannot announce it
                    self.first_failure = self.failures[-1]
        elif "done" in message:
            self.done.add(process)
        elif "failure" in message:
            self._add_failure(ProcessFailure(process, message["failure"]))
        elif "first_failure" in message:
            self.first_failure = ProcessFailure(*message["first_failure"])

    def _add_failure(self, failure: ProcessFailure) -> None:
        self.first_report_time = self.first_report_time or time.monotonic()
        self.failures.append(failure)

    def _finish(self) -> int:
        """End the child if it is still running, print the reason, and return the exit code."""
        own, failure = self.info.process_index, self.first_failure
        if own in self.done or failure is None:
            code = self.child.wait()
            return code if code >= 0 else TRY_AGAIN
        try:
            code = self.child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            code = self.child.wait()
        if code == 2:
            return code  # it has printed its own message
        host = self.hosts[failure.process]
        failed = f"process {failure.process} of {self.info.process_count} ({host}) {failure.description}"
        advice = "the same command continues from the newest checkpoint"
        if failure.peer_exit_code in (1, 2):
            advice = "see its error message"
        print(f"error: {failed}; process {own} ({self.hosts[own]}) stops: {advice}", file=sys.stderr, flush=True)
        return failure.peer_exit_code


def _exit_was_announced(link: socket.socket) -> bool:
    """Whether the child, which has ended, called `announce_exit`."""
    try:
        return bool(link.recv(1, socket.MSG_DONTWAIT))
    except OSError:
        return False


@contextmanager
def _forward_signals(children: list[subprocess.Popen]) -> Iterator[list[int]]:
    """Forward SIGTERM and the first Ctrl-C as SIGTERM to the child, which saves and ends. A second Ctrl-C kills it.

    Yields:
      a list to which every Ctrl-C is added.

    Raises:
      PeerError, KeyboardInterrupt: a signal came before the child was started.
    """
    interrupts: list[int] = []

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGINT:
            if not children:
                raise KeyboardInterrupt
            interrupts.append(number)
            if len(interrupts) > 1:
                children[0].kill()
                return
            os.write(2, SAVING)
        if not children:
            raise PeerError(f"stopped by {signal.Signals(number).name} before the start")
        children[0].send_signal(signal.SIGTERM)

    with handling_signals(stop):
        yield interrupts


@contextmanager
def handling_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call a handler on SIGTERM and Ctrl-C. An ignored Ctrl-C stays ignored, as for a command that a script starts with
    `&`.
    """
    numbers = [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


_link: socket.socket | None = None
_process_index = 0
_exit_announced = False


def connect_to_supervisor(descriptor: int, process_index: int) -> None:
    """Take this process's end of the socket; from now on the process ends when the supervisor does."""
    global _link, _process_index
    _link, _process_index = socket.socket(fileno=descriptor), process_index
    _link.set_inheritable(False)
    threading.Thread(target=_end_with_supervisor, args=[_link], daemon=True).start()


def announce_exit() -> None:
    """Notify the supervisor that this process is about to end in order, whatever its exit code."""
    global _exit_announced
    if _link is not None:
        _link.send(b"!")
        _exit_announced = True


def must_announce_exit() -> bool:
    """Whether this process has a supervisor and has not announced its exit."""
    return _link is not None and not _exit_announced


def exit_now(code: int) -> NoReturn:
    """End at once. In an ordinary exit jax would wait for the peers, which wait for this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _process_index == 0:
        time.sleep(LINGER_SECONDS)
    os._exit(code)


def _end_with_supervisor(sock: socket.socket) -> None:
    sock.recv(1)  # the supervisor never sends: this returns when its end closes
    os._exit(TRY_AGAIN)
