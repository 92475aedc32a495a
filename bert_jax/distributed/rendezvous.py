"""Rendezvous of the supervisors of all processes before a run, and their connections while it runs.

The supervisor of process 0 is the server; the others connect to it. Each sends a report of its config, code and
versions, and process 0 decides: a run starts only if all reports agree, and `bert-jax doctor` lists the differences. An
open connection shows that both of its ends are alive. Messages are JSON, one per line.
"""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.process_report import Report
from bert_jax.errors import PeerError, UserError

PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Socket options: the kernel probes idle connections every 15 s, and closes one to a host that is gone after 60 s."""
HELLO_TIMEOUT_SECONDS = 10.0
"""For the first message of a new connection."""
MAX_HELLO = 2**24
"""Characters of the first message."""


class PeerEvent(NamedTuple):
    """A message of a peer; None: the peer is gone."""

    process: int
    message: dict[str, Any] | None


class Rendezvous:
    """Connections to the peers: of process 0 to all others, of the others to process 0."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        """What all peers sent; the last event of each says that it is gone."""
        self._connections: list[socket.socket] = []

    def add(self, process: int, connection: socket.socket, lines: Iterable[str]) -> None:
        """Take ownership of the connection to a peer; a thread reads its messages from now on.

        Args:
          process: index of the peer.
          connection: to the peer.
          lines: the connection's file.
        """
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES.items():
            if hasattr(socket, name):  # macOS lacks some
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connections.append(connection)
        threading.Thread(target=self._read, args=[process, lines], daemon=True).start()

    def _read(self, process: int, lines: Iterable[str]) -> None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):  # a program of another kind
                    break
                self.events.put(PeerEvent(process, message))
        self.events.put(PeerEvent(process, None))

    def send(self, **message: Any) -> None:
        """Send a message to all peers. If one is gone, nothing is raised; `events` reports it."""
        for connection in self._connections:
            _send(connection, message)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
            connection.close()


def open_rendezvous(
    info: ProcessInfo, report: Report, timeout: float, decide: Callable[[list[Report]], Any]
) -> tuple[Rendezvous, Any]:
    """Wait until all processes are connected and process 0 has decided.

    Args:
      info: of this process.
      report: of this process; plain values.
      timeout: seconds to wait for the other processes.
      decide: called in process 0 with the reports of all processes; returns plain values.

    Returns:
      the rendezvous, and the result of `decide`, in all processes.

    Raises:
      PeerError: a process did not connect.
      UserError: `decide` raised it, which all processes then raise, or process 0's port is in use.
    """
    rendezvous = Rendezvous()
    try:
        if info.process_index:
            return rendezvous, _join(rendezvous, info, report, timeout)
        try:
            result = decide(_accept(rendezvous, info, report, timeout))
        except (PeerError, UserError) as error:
            rendezvous.send(refuse=str(error), mistake=isinstance(error, UserError))
            raise
        rendezvous.send(result=result)
        return rendezvous, result
    except BaseException:
        rendezvous.close()
        raise


def listen(port: int, backlog: int = 1) -> socket.socket:
    """A server on all addresses of this host; port 0 is any free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _accept(rendezvous: Rendezvous, info: ProcessInfo, report: Report, timeout: float) -> list[Report]:
    """Wait in process 0 until all processes are connected; returns their reports."""
    reports, count, deadline = {0: report}, info.process_count, time.monotonic() + timeout
    try:
        server = listen(info.coordinator_port, count)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {info.coordinator_port} ({error.strerror}): give another "
            "--cluster.coordinator"
        ) from error
    with server:
        while missing := [i for i in range(count) if i not in reports]:
            try:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                connection, _ = server.accept()
            except TimeoutError:
                late = f"process{'es' if missing[1:] else ''} {', '.join(map(str, missing[:8]))}"
                late += " ..." if missing[8:] else ""
                raise PeerError(
                    f"{late} of {count} did not connect to {info.coordinator_host} within {timeout:g} s"
                ) from None
            connection.settimeout(min(HELLO_TIMEOUT_SECONDS, max(deadline - time.monotonic(), 1.0)))
            lines = connection.makefile()
            try:
                process, processes, reported = json.loads(lines.readline(MAX_HELLO))
            except (OSError, ValueError, TypeError, RecursionError):  # late, or a client of another kind
                process = processes = reported = None
            if process in missing and processes == count:
                reports[process] = reported
                rendezvous.add(process, connection, lines)
            else:
                _send(connection, {"refuse": "not a process of this run, or connected already", "mistake": False})
                lines.close()
                connection.close()
    return [reports[i] for i in range(count)]


def _join(rendezvous: Rendezvous, info: ProcessInfo, report: Report, timeout: float) -> Any:
    """Connect to process 0, send a report, and wait for its decision."""
    deadline, count = time.monotonic() + timeout, info.process_count
    address = info.coordinator_host, info.coordinator_port
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.01))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"process 0 of {count} cannot be reached at {info.coordinator_host}:{info.coordinator_port} after "
                    f"{timeout:g} s ({error.strerror or error})"
                ) from error
            time.sleep(0.2)
    _send(connection, [info.process_index, count, report])
    rendezvous.add(0, connection, connection.makefile())
    reply = rendezvous.events.get().message
    if reply is None or not {"refuse", "result"} & reply.keys():
        raise PeerError(f"process 0 of {count} ({info.coordinator_host}) ended before the start, or is another program")
    if "refuse" in reply:
        raise (UserError if reply["mistake"] else PeerError)(reply["refuse"])
    return reply["result"]


def _send(connection: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):
        connection.sendall((json.dumps(message) + "\n").encode())
