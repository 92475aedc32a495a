"""Where the supervisors of all processes meet before a run, and stay in touch while it goes on.

Process 0's is the hub: the others connect to it. Each brings a report of what it is about to do, and only if all are
about to do the same does anyone start. While a connection stands, its two ends are alive. `bert-jax doctor` meets in
the same way, to say all that differs.
"""

import queue
import socket
import time
from typing import Any, NamedTuple

from bert_jax.distributed.cluster_detection import Seat
from bert_jax.distributed.connection import Connection, Message
from bert_jax.errors import PeerError, UserError

Report = dict[str, Any]
SILENCE_SECONDS = 60.0
"""A supervisor that gives no sign of life for so long is gone, and its host with it."""
HELLO_SECONDS = 10.0
"""For somebody who has connected to say who it is."""
SAME = ("config", "code", "versions", "environment")
"""What must not differ from process to process."""


class Event(NamedTuple):
    """Something that a peer said; None: it is gone."""

    process: int
    message: Message | None


class Meeting:
    """What hub and guests have in common: connections to others, and what comes in over them."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.connections: dict[int, Connection] = {}

    def say(self, **message: Any) -> None:
        """To the hub, or to all guests."""
        for connection in list(self.connections.values()):
            connection.send(**message)

    def close(self) -> None:
        """Leave."""
        for connection in self.connections.values():
            connection.close()

    def _follow(self, process: int, connection: Connection) -> None:
        self.connections[process] = connection
        connection.follow(lambda message: self.events.put(Event(process, message)))


def open_meeting(seat: Seat, report: Report, seconds: float) -> tuple[Meeting, int, list[Report]]:
    """Wait until all are there and agree.

    Args:
      seat: of this process.
      report: what it is about to do, with `host`, and `SAME`; plain values.
      seconds: to wait for the others.

    Returns:
      the meeting; a port that is free on process 0's host, for jax; and in process 0 the reports of all.

    Raises:
      PeerError: somebody did not come.
      UserError: the processes are about to do different things, or process 0's port is taken.
    """
    if seat.process:
        return *visit(seat, report, seconds), []
    meeting, reports = welcome(seat, report, seconds)
    if different := differences(reports):
        _dismiss(meeting, different[0], mistake=True)
        raise UserError(different[0])
    with _listen(0) as probe:
        port = probe.getsockname()[1]
    meeting.say(go=port)
    return meeting, port, reports


def welcome(seat: Seat, report: Report, seconds: float) -> tuple[Meeting, list[Report]]:
    """In process 0, wait until all are there; they wait until they are told ``go``, a number.

    Args:
      seat, report, seconds: as for `open_meeting`.

    Returns:
      the meeting, and the reports of all, with `ahead`: seconds that a process's clock is ahead of this one's.

    Raises:
      PeerError: somebody did not come.
      UserError: the port is taken.
    """
    meeting = Meeting()
    try:
        door = _listen(seat.port, seat.processes)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {seat.port} ({error.strerror}): give another --cluster.coordinator"
        ) from error
    end, reports = time.monotonic() + seconds, {0: report | {"ahead": 0.0}}
    with door:
        while len(reports) < seat.processes:
            missing = [i for i in range(seat.processes) if i not in reports]
            try:
                door.settimeout(max(end - time.monotonic(), 0.01))
                plug, _ = door.accept()
            except TimeoutError:
                text = f"{_named(missing)} of {seat.processes} did not come to {seat.host} within {seconds:g} s"
                _dismiss(meeting, text, mistake=False)
                raise PeerError(text) from None
            guest = Connection(plug, min(HELLO_SECONDS, max(end - time.monotonic(), 1.0)))
            theirs = guest.receive()
            if not _is_member(theirs, seat.processes, missing):
                guest.send(refuse="this is no process of the run, or one that is there already", mistake=False)
                guest.close()
                continue
            guest.bear(SILENCE_SECONDS)
            reports[theirs["process"]] = theirs["report"] | {"ahead": theirs["clock"] - time.time()}
            meeting._follow(theirs["process"], guest)
    return meeting, [reports[i] for i in range(seat.processes)]


def _listen(port: int, backlog: int = 1) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _is_member(said: Any, processes: int, missing: list[int]) -> bool:
    return (
        isinstance(said, dict)
        and {"process", "processes", "report", "clock"} <= said.keys()
        and said["processes"] == processes
        and said["process"] in missing
    )


def visit(seat: Seat, report: Report, seconds: float) -> tuple[Meeting, int]:
    """In the other processes, bring a report, and wait for the number that process 0 says when all are there.

    Args:
      seat, report, seconds: as for `open_meeting`.

    Raises:
      PeerError: process 0 is not there or does not answer, or somebody did not come.
      UserError: process 0 refuses.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            plug = socket.create_connection((seat.host, seat.port), timeout=max(end - time.monotonic(), 0.01))
            break
        except OSError as error:
            if time.monotonic() > end:
                raise PeerError(
                    f"process 0 of {seat.processes} cannot be reached at {seat.host}:{seat.port} after {seconds:g} s "
                    f"({error.strerror or error})"
                ) from error
            time.sleep(0.2)
    hub = Connection(plug, SILENCE_SECONDS)  # while it waits for the others, it says that it is alive
    hub.send(process=seat.process, processes=seat.processes, report=report, clock=time.time())
    answer = hub.receive()
    if answer is None:
        raise PeerError(f"process 0 of {seat.processes} ({seat.host}) is gone before the start")
    if "refuse" in answer:
        raise (UserError if answer["mistake"] else PeerError)(answer["refuse"])
    meeting = Meeting()
    meeting._follow(0, hub)
    return meeting, answer["go"]


def _dismiss(meeting: Meeting, text: str, *, mistake: bool) -> None:
    meeting.say(refuse=text, mistake=mistake)
    meeting.close()


def differences(reports: list[Report]) -> list[str]:
    """In what processes differ from process 0, one text for each process and each of `SAME`."""
    found = []
    for i, report in enumerate(reports):
        for name in SAME:
            ours, theirs = reports[0][name], report[name]
            changed = sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
            if changed:
                shown = "; ".join(f"{key} is {theirs.get(key)}, there {ours.get(key)}" for key in changed[:3])
                found.append(
                    f"process {i} ({report['host']}) has another {name} than process 0 ({reports[0]['host']}): "
                    f"{shown}. All processes of a run need the same command, code and versions"
                )
    return found


def _named(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (" ..." if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
