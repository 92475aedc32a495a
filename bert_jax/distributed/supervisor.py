"""The small parent of a process that trains: it starts it when all are there, and says who is missing when one dies.

Collective libraries end a process in C++ when a peer dies, with a stack trace and no name. The parents talk to each
other apart from them. The first that dies is named by all, and the others are ended.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bert_jax.distributed.cluster_detection import Seat
from bert_jax.distributed.rendezvous import Event, Meeting, Report, open_meeting
from bert_jax.errors import INTERRUPTED, TRY_AGAIN, PeerError

WORKER = "BERT_JAX_WORKER"
"""Environment variable that tells a child its seat, jax's port, and its end of the wire to the parent."""
LISTEN_SECONDS = 1.0
"""When one process has died, others die of it; so long the hub listens who was first."""
GRACE_SECONDS = 5.0
"""For a child to end by itself when another process has died."""
VERDICT_SECONDS = 15.0
"""To wait for the hub to say who was first."""


class Fall(NamedTuple):
    """How a process ended that should not have."""

    weight: int
    """Of several, the heaviest came first: what dies of another's death is aborted or gets an exception."""
    process: int
    host: str
    how: str
    code: int
    """For the others to leave with."""


def supervise(command: Sequence[str], seat: Seat, report: Report, timeout: float) -> int:
    """Run a command as one process of several, and watch over it and its peers.

    Args:
      command: of the child; it calls `worker.join`.
      seat: of this process.
      report: what it is about to do (rendezvous.py).
      timeout: seconds to wait for others at the start.

    Returns:
      an exit code: the child's if it ended in order, 2 or `TRY_AGAIN` if another process was at fault. After Ctrl-C,
      `INTERRUPTED` instead of `TRY_AGAIN`.

    Raises:
      PeerError, UserError: the run cannot start (`open_meeting`).
    """
    children: list[subprocess.Popen] = []
    with _forwarding(children) as interrupts:
        meeting, port, reports = open_meeting(seat, report, timeout)
        hosts = {i: each["host"] for i, each in enumerate(reports)} or {0: seat.host}
        try:
            code = _Watch(meeting, seat, hosts | {seat.process: report["host"]}).run(command, port, children)
            return INTERRUPTED if interrupts and code == TRY_AGAIN else code
        finally:
            meeting.close()


class _Watch:
    """From the start of the child to its end."""

    def __init__(self, meeting: Meeting, seat: Seat, hosts: dict[int, str]):
        self.meeting, self.seat, self.hosts = meeting, seat, hosts
        self.host = hosts[seat.process]
        self.done: set[int] = set()  # processes that ended in order
        self.falls: list[Fall] = []
        self.since = 0.0  # when the first fall was heard of
        self.verdict: Fall | None = None

    def run(self, command: Sequence[str], port: int, children: list[subprocess.Popen]) -> int:
        ours, theirs = socket.socketpair()
        place = {"seat": self.seat, "port": port, "wire": theirs.fileno()}
        environment = os.environ | {WORKER: json.dumps(place)}
        # In a process group of its own: a terminal sends Ctrl-C to the group of this process, which forwards it.
        self.child = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], process_group=0)
        children.append(self.child)
        theirs.close()
        with ours:
            self._wait(ours)
            return self._conclude()

    def _wait(self, wire: socket.socket) -> None:
        """Until the child has ended and nothing more is to be heard, or somebody has fallen."""
        here, ended = self.seat.process, 0.0
        while True:
            self._hear()
            if not ended and (code := self.child.poll()) is not None:
                ended = time.monotonic()
                if _in_order(wire):
                    self.done.add(here)
                    self.meeting.say(done=True)
                else:
                    fall = Fall(_weigh(code), here, self.host, _how(code), _code_for_others(code))
                    self._fell(fall)
                    self.meeting.say(fell=fall)
            if self.verdict is None and self.falls and here == 0 and time.monotonic() > self.since + LISTEN_SECONDS:
                self.verdict = max(self.falls, key=lambda fall: fall.weight)
                self.meeting.say(verdict=self.verdict)
            late = bool(ended and self.falls) and time.monotonic() > ended + VERDICT_SECONDS
            if self.verdict or late or (here in self.done and (here or len(self.done) == self.seat.processes)):
                return

    def _hear(self) -> None:
        try:
            event = self.meeting.events.get(timeout=0.1)
        except queue.Empty:
            return
        self._take(event)

    def _take(self, event: Event) -> None:
        process, message = event
        if message is None:
            if process not in self.done and self.verdict is None:
                host = self.hosts[process]
                self._fell(Fall(3, process, host, "is gone: its connection broke, or it fell silent", TRY_AGAIN))
                if self.seat.process:  # no hub is left to say so
                    self.verdict = self.falls[-1]
        elif "done" in message:
            self.done.add(process)
        elif "fell" in message:
            self._fell(Fall(*message["fell"]))
        elif "verdict" in message:
            self.verdict = Fall(*message["verdict"])

    def _fell(self, fall: Fall) -> None:
        self.since = self.since or time.monotonic()
        self.falls.append(fall)

    def _conclude(self) -> int:
        """End the child if it has not, say why, and find the exit code."""
        here, verdict = self.seat.process, self.verdict
        if here in self.done or verdict is None:
            code = self.child.wait()
            return code if code >= 0 else TRY_AGAIN
        try:
            code = self.child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            code = self.child.wait()
        if code == 2:
            return code  # it has said why
        who = f"process {verdict.process} of {self.seat.processes} ({verdict.host})"
        advice = "the same command continues from the newest checkpoint"
        if verdict.code in (1, 2):
            advice = "its own message says why"
        print(f"error: {who} {verdict.how}; process {here} ({self.host}) stops: {advice}", file=sys.stderr, flush=True)
        return verdict.code


def _weigh(code: int) -> int:
    if code in (-signal.SIGABRT, 1, TRY_AGAIN):
        return 1
    return 2 if code > 0 else 3


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _code_for_others(code: int) -> int:
    return code if code in (1, 2) else TRY_AGAIN


def _in_order(wire: socket.socket) -> bool:
    """Whether the child, which has ended, has said that it would."""
    try:
        return bool(wire.recv(1, socket.MSG_DONTWAIT))
    except OSError:
        return False


@contextmanager
def _forwarding(children: list[subprocess.Popen]) -> Iterator[list[int]]:
    """SIGTERM and the first Ctrl-C are SIGTERM to the child, which saves and ends. A second Ctrl-C kills it.

    Yields:
      every Ctrl-C so far.

    Raises:
      PeerError, KeyboardInterrupt: one of them came before there was a child.
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
            os.write(2, b"\nCtrl-C: saving after this step; a second Ctrl-C stops at once without saving\n")
        if not children:
            raise PeerError(f"asked to stop by {signal.Signals(number).name} before the start")
        children[0].send_signal(signal.SIGTERM)

    # As in stop_request: an ignored Ctrl-C stays ignored.
    numbers = [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
