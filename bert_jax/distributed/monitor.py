"""Runs the training process of one supervisor and collects the failures of all: which was first, and what follows."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.connections import Peers
from bert_jax.distributed.error_output import ErrorOutput
from bert_jax.distributed.rendezvous import listen
from bert_jax.distributed.supervised import ENDS_IN_ORDER, SAVED, WORKER_ENV
from bert_jax.errors import TRY_AGAIN, PeerError

RESTARTS = 1
"""Number of times that the children are started again without a checkpoint in between."""
VOTE_SECONDS = 60.0
"""For all supervisors to end their children and agree on a restart."""
COLLECT_SECONDS = 1.0
"""One failure causes others; process 0 collects failures for this long before it decides which was first."""
GRACE_SECONDS = 5.0
"""For a child to end by itself when another process has failed."""
ANNOUNCEMENT_TIMEOUT_SECONDS = 15.0
"""To wait for process 0 to announce the first failure."""


class ProcessFailure(NamedTuple):
    """How a process failed."""

    process: int
    code: int | None
    """Exit code of the training process, negative for a signal; None: the connection to its supervisor closed."""

    @property
    def cause_rank(self) -> int:
        """The failure with the highest rank counts as the first: a failed peer makes a process abort or raise."""
        if self.code in (-signal.SIGABRT, TRY_AGAIN):
            return 0
        return 3 if self.code is None or self.code < 0 else self.code if self.code in (1, 2) else 1

    @property
    def peer_exit_code(self) -> int:
        """Exit code of the other processes."""
        return self.code if self.code in (1, 2) else TRY_AGAIN

    @property
    def may_be_repeated(self) -> bool:
        """Whether a restart on the same hosts can help."""
        return self.code is not None and (self.code < 0 or self.code == TRY_AGAIN)

    @property
    def description(self) -> str:
        """What happened, with the process as the subject."""
        if self.code is None:
            return "is gone: its connection closed, or its host does not answer"
        if self.code < 0:
            known = {number.value: number.name for number in signal.Signals}  # not most real-time signals
            return f"was killed by {known.get(-self.code, f'signal {-self.code}')}"
        return f"ended with exit code {self.code}"


def port_for_jax(info: ProcessInfo) -> int:
    """The port that follows that of the rendezvous, or another one if it is in use."""
    for port in (info.coordinator_port + 1, 0):
        with suppress(OSError, OverflowError), listen(port) as probe:
            return probe.getsockname()[1]
    raise PeerError("process 0 has no free port")


class Monitor:
    """Runs children, one after the other, and collects the failures of all processes."""

    def __init__(self, peers: Peers, info: ProcessInfo, hosts: Sequence[str], signals: Sequence[int]):
        self.peers, self.info, self.hosts, self.signals = peers, info, hosts, signals
        self.restarts_left, self.error_output = RESTARTS, ErrorOutput()
        self._forget()

    @property
    def is_first_on_host(self) -> bool:
        """Whether no process with a lower index is on this host."""
        return self.hosts.index(self.hosts[self.info.process_index]) == self.info.process_index

    def _forget(self) -> None:
        self.done: set[int] = set()  # processes that ended in order
        self.failures: list[ProcessFailure] = []
        self.first_report_time = 0.0  # when this process learned of a failure
        self.first_failure: ProcessFailure | None = None
        self.votes: dict[int, bool] = {}  # by process that has ended its child: whether it can start another
        self.restart: dict[str, Any] | None = None  # what process 0 decided
        self.from_child = b""  # what the child has sent through its link

    def run(
        self, command: Sequence[str], worker_settings: Mapping[str, Any], signal_targets: list[subprocess.Popen]
    ) -> int:
        """Run a child until it ends, or another process fails first; returns its exit code.

        `signal_targets` has only the child then, for the handlers of signals.
        """
        own_end, child_end = socket.socketpair()
        descriptors = {"descriptor": child_end.fileno(), "stderr": os.dup(2)}
        environment = os.environ | {WORKER_ENV: json.dumps({**worker_settings, **descriptors})}
        pipe = self.error_output.open_pipe()
        # In a process group of its own: a terminal sends Ctrl-C to the group of this process, which forwards it.
        self.child = subprocess.Popen(
            command, env=environment, stderr=pipe, pass_fds=[*descriptors.values()], process_group=0
        )
        signal_targets[:] = [self.child]
        child_end.close()
        os.close(descriptors["stderr"])
        os.close(pipe)
        with own_end:
            self._wait(own_end)
            code = self._end_child()
            self._read(own_end)
        if SAVED in self.from_child:
            self.restarts_left = RESTARTS
        self.error_output.drain()
        return code

    def _wait(self, link: socket.socket) -> None:
        """Return when all processes ended in order, or the first failure is known."""
        own, ended = self.info.process_index, 0.0
        while True:
            self._handle_next_event()
            code = self.child.poll()
            self._read(link)
            if not ended and code is not None:
                ended = time.monotonic()
                if ENDS_IN_ORDER in self.from_child:
                    self.done.add(own)
                    self.peers.send(done=True)
                else:
                    self._add_failure(ProcessFailure(own, code))
                    self.peers.send(failure=code)
            collected = time.monotonic() > self.first_report_time + COLLECT_SECONDS
            if self.first_failure is None and self.failures and own == 0 and collected:
                self.first_failure = max(self.failures, key=lambda failure: failure.cause_rank)
                self.peers.send(first_failure=self.first_failure)
            late = bool(ended and self.failures) and time.monotonic() > ended + ANNOUNCEMENT_TIMEOUT_SECONDS
            if self.first_failure or late or (own in self.done and (own or len(self.done) == self.info.process_count)):
                return

    def _read(self, link: socket.socket) -> None:
        with suppress(OSError):  # nothing to read
            self.from_child += link.recv(4096, socket.MSG_DONTWAIT)

    def _handle_next_event(self) -> None:
        try:
            process, message = self.peers.events.get(timeout=0.1)
        except queue.Empty:
            return
        if message is None:
            if process not in self.done and self.first_failure is None:
                self._add_failure(ProcessFailure(process, None))
                if self.info.process_index:  # process 0 is gone and cannot announce it
                    self.first_failure = self.failures[-1]
            self.votes[process], self.restart = False, self.restart or {"port": None}
        elif "done" in message:
            self.done.add(process)
        elif "failure" in message:
            self._add_failure(ProcessFailure(process, message["failure"]))
        elif "first_failure" in message and message["first_failure"][0] < self.info.process_count:
            self.first_failure = ProcessFailure(*message["first_failure"])
        elif "vote" in message:
            self.votes[process] = message["vote"]
        elif "restart" in message:
            self.restart = message["restart"]

    def _add_failure(self, failure: ProcessFailure) -> None:
        self.first_report_time = self.first_report_time or time.monotonic()
        self.failures.append(failure)

    def _end_child(self) -> int:
        """Its exit code; it is killed if it is still running although another process has failed."""
        is_last = self.info.process_index in self.done or self.first_failure is None
        try:
            return self.child.wait(None if is_last else GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()

    def agree_on_restart(self, code: int) -> int | None:
        """Whether all processes start a child again: the port for jax, or None.

        A checkpoint that was saved since the last start allows another one.

        Args:
          code: exit code of the child that has ended.
        """
        own, failure = self.info.process_index, self.first_failure
        if failure is None or not failure.may_be_repeated:
            return None
        # Code 1 is no reason against it: another process's end can raise any exception here.
        vote = self.restarts_left > 0 and own not in self.done and code != 2 and not self.signals
        self.restarts_left -= 1
        if own:
            self.peers.send(vote=vote)
            self._handle_events_until(lambda: self.restart is not None, VOTE_SECONDS + GRACE_SECONDS)
        else:
            count, self.votes[own] = self.info.process_count, vote
            self._handle_events_until(lambda: len(self.votes) == count or not all(self.votes.values()), VOTE_SECONDS)
            agreed = len(self.votes) == count and all(self.votes.values()) and not self.signals
            self.restart = {"port": port_for_jax(self.info) if agreed else None}
            self.peers.send(restart=self.restart)
        port = self.restart and self.restart["port"]
        if port is not None:
            if failure.process == own:  # they may name the cause
                self.error_output.release()
            again = f"process {own} ({self.hosts[own]}) starts again, from the newest checkpoint"
            print(f"warning: {self._describe(failure)}; {again}", file=sys.stderr, flush=True)
            self._forget()
        return port

    def _handle_events_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._handle_next_event()

    def verdict(self, code: int) -> int:
        """Print why the run has ended, and return the exit code.

        Args:
          code: exit code of the last child.
        """
        own = self.info.process_index
        failure = self.first_failure or next(iter(self.failures), None)
        if code != 0 or own not in self.done:
            self.error_output.release()
        if own in self.done or failure is None:
            return code if code >= 0 else TRY_AGAIN
        if code == 2:
            return code  # it has printed its own message
        advice = "the same command continues from the newest checkpoint"
        if failure.peer_exit_code in (1, 2):
            advice = "see its error message"
        print(
            f"error: {self._describe(failure)}; process {own} ({self.hosts[own]}) stops: {advice}",
            file=sys.stderr,
            flush=True,
        )
        return failure.peer_exit_code

    def _describe(self, failure: ProcessFailure) -> str:
        host = self.hosts[failure.process]
        return f"process {failure.process} of {self.info.process_count} ({host}) {failure.description}"
