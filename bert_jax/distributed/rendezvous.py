"""Rendezvous of the supervisors of all processes before a run, and their connections while it runs.

The supervisor of process 0 is the server; the others connect to it. Each sends a report of its config, code and
versions, and a run starts only if all reports agree. An open connection shows that both of its ends are alive.
`bert-jax doctor` uses the same rendezvous to list all differences.
"""

import contextlib
import json
import selectors
import socket
import time
from typing import Any, NamedTuple

from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.process_report import Report, report_differences
from bert_jax.errors import PeerError, UserError

Message = dict[str, Any]
PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Socket options: the kernel probes idle connections every 15 s, and closes one to a host that is gone after 60 s."""
HELLO_TIMEOUT_SECONDS = 10.0
"""For the first message of a new connection."""


class PeerEvent(NamedTuple):
    """A message of a peer; None: the peer is gone."""

    process: int
    message: Message | None


class Connection:
    """One end of a connection between two supervisors: JSON objects, one per line."""

    def __init__(self, sock: socket.socket):
        """Takes ownership of the connected socket."""
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES.items():
            if hasattr(socket, name):  # macOS lacks some
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sock, self._received = sock, b""

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. If the peer is gone, nothing is raised; `receive` reports it."""
        with contextlib.suppress(OSError):
            self._sock.sendall((json.dumps(message) + "\n").encode())

    def has_message(self) -> bool:
        """Whether `receive` returns a message without waiting."""
        return b"\n" in self._received

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for the next message; None if the peer is gone, or no JSON object arrives within `timeout` seconds."""
        self._sock.settimeout(timeout)
        try:
            while not self.has_message():
                data = self._sock.recv(2**16)
                if not data:
                    return None
                self._received += data
            line, _, self._received = self._received.partition(b"\n")
            message = json.loads(line)
            return message if isinstance(message, dict) else None
        except (OSError, ValueError):  # timed out, reset, or a client of another kind
            return None
        finally:
            self._sock.settimeout(None)

    def close(self) -> None:
        """Close both directions."""
        self._sock.close()


class Rendezvous:
    """Connections to the peers: of process 0 to all others, of the others to process 0."""

    def __init__(self) -> None:
        self.connections: dict[int, Connection] = {}

    def send(self, **message: Any) -> None:
        """Send a message to all connected peers."""
        for connection in self.connections.values():
            connection.send(**message)

    def poll(self, seconds: float) -> list[PeerEvent]:
        """Wait at most this long for messages; returns at most one of each peer. A lost peer is reported once."""
        ready = [process for process, connection in self.connections.items() if connection.has_message()]
        if not ready:
            with selectors.DefaultSelector() as selector:
                for process, connection in self.connections.items():
                    selector.register(connection, selectors.EVENT_READ, process)
                ready = [key.data for key, _ in selector.select(seconds)]
        events = [PeerEvent(process, self.connections[process].receive()) for process in ready]
        for process, message in events:
            if message is None:
                self.connections.pop(process).close()
        return events

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections.values():
            connection.close()


def open_rendezvous(info: ProcessInfo, report: Report, timeout: float) -> tuple[Rendezvous, int, list[Report]]:
    """Wait until all processes are connected and their reports agree.

    Args:
      info: of this process.
      report: of this process, with `host` and the `COMPARED_SECTIONS`; plain values.
      timeout: seconds to wait for the other processes.

    Returns:
      the rendezvous; a free port on process 0's host, for jax; and, in process 0 only, the reports of all processes.

    Raises:
      PeerError: a process did not connect.
      UserError: the reports differ, or process 0's port is in use.
    """
    if info.process_index:
        return *join(info, report, timeout), []
    rendezvous, reports = accept_workers(info, report, timeout)
    if found := report_differences(reports):
        _refuse_all(rendezvous, found[0], mistake=True)
        raise UserError(found[0])
    with _listen(0) as probe:
        port = probe.getsockname()[1]
    rendezvous.send(result=port)
    return rendezvous, port, reports


def accept_workers(info: ProcessInfo, report: Report, timeout: float) -> tuple[Rendezvous, list[Report]]:
    """Wait in process 0 until all processes are connected. They then wait for a message with a ``result``, a number.

    Args:
      info, report, timeout: as for `open_rendezvous`.

    Returns:
      the rendezvous, and the reports of all processes, with `ahead`: seconds by which a process's clock is ahead of
      this one's.

    Raises:
      PeerError: a process did not connect.
      UserError: the port is in use.
    """
    rendezvous, count = Rendezvous(), info.process_count
    try:
        server = _listen(info.coordinator_port, count)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {info.coordinator_port} ({error.strerror}): give another "
            "--cluster.coordinator"
        ) from error
    deadline, reports = time.monotonic() + timeout, {0: report | {"ahead": 0.0}}
    with server:
        while len(reports) < count:
            missing = [i for i in range(count) if i not in reports]
            try:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                sock, _ = server.accept()
            except TimeoutError:
                text = (
                    f"{_format_processes(missing)} of {count} did not connect to {info.coordinator_host} within "
                    f"{timeout:g} s"
                )
                _refuse_all(rendezvous, text, mistake=False)
                raise PeerError(text) from None
            worker = Connection(sock)
            hello = worker.receive(min(HELLO_TIMEOUT_SECONDS, max(deadline - time.monotonic(), 1.0)))
            if not _is_valid_hello(hello, count, missing):
                worker.send(refuse="not a process of this run, or connected already", mistake=False)
                worker.close()
                continue
            reports[hello["process"]] = hello["report"] | {"ahead": hello["clock"] - time.time()}
            rendezvous.connections[hello["process"]] = worker
    return rendezvous, [reports[i] for i in range(count)]


def _listen(port: int, backlog: int = 1) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _is_valid_hello(message: Message | None, count: int, missing: list[int]) -> bool:
    return (
        message is not None
        and {"process", "processes", "report", "clock"} <= message.keys()
        and message["processes"] == count
        and message["process"] in missing
    )


def join(info: ProcessInfo, report: Report, timeout: float) -> tuple[Rendezvous, int]:
    """Connect to process 0, send a report, and wait for a result.

    Args:
      info, report, timeout: as for `open_rendezvous`.

    Returns:
      the rendezvous, and the number that process 0 sent when all processes were connected.

    Raises:
      PeerError: process 0 cannot be reached or is gone, or a process did not connect.
      UserError: process 0 refuses.
    """
    deadline, count = time.monotonic() + timeout, info.process_count
    host, port = info.coordinator_host, info.coordinator_port
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.01))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"process 0 of {count} cannot be reached at {host}:{port} after {timeout:g} s "
                    f"({error.strerror or error})"
                ) from error
            time.sleep(0.2)
    coordinator = Connection(sock)
    coordinator.send(process=info.process_index, processes=count, report=report, clock=time.time())
    reply = coordinator.receive()
    if reply is None:
        raise PeerError(f"process 0 of {count} ({host}) ended before the start")
    if "refuse" in reply:
        raise (UserError if reply["mistake"] else PeerError)(reply["refuse"])
    rendezvous = Rendezvous()
    rendezvous.connections[0] = coordinator
    return rendezvous, reply["result"]


def _refuse_all(rendezvous: Rendezvous, text: str, *, mistake: bool) -> None:
    rendezvous.send(refuse=text, mistake=mistake)
    rendezvous.close()


def _format_processes(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (" ..." if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
