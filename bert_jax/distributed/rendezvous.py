"""Rendezvous of the supervisors of all processes before a run.

The supervisor of process 0 is the server; the others connect to it. Each of them proves that it knows the secret of
the run, and sends a report of its config, code and versions. Process 0 decides: a run starts only if all reports agree,
and `bert-jax doctor` lists the differences. Connections of strangers are served beside those of the run, with time-outs
of their own.
"""

import contextlib
import hashlib
import hmac
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.connections import Connection, Peers
from bert_jax.distributed.messages import Message
from bert_jax.distributed.process_report import Report
from bert_jax.errors import PeerError, UserError, require
from bert_jax.field_validation import from_json

T = TypeVar("T")
HELLO_TIMEOUT_SECONDS = 10.0
"""For a new connection to send its report, or the question of process 0."""
DECISION_TIMEOUT_SECONDS = 3600.0
"""For process 0 to decide; `bert-jax doctor` checks the run in this time."""
SPARE_CONNECTIONS = 64
"""Connections of strangers at the same time, beyond the number of processes; then the oldest is closed."""
BACKLOG = 1024
"""Connections of strangers that the kernel holds until they are accepted; more would delay those of the run."""
OTHER_FILES = 256
"""Files that process 0 opens beside its connections."""


def open_rendezvous(
    info: ProcessInfo, report: Report, timeout: float, decide: Callable[[list[Report]], T], kind: type[T]
) -> tuple[Peers, T]:
    """Wait until all processes are connected and process 0 has decided.

    Args:
      info: of this process.
      report: of this process (process_report.py), and more plain values.
      timeout: seconds to wait for the other processes.
      decide: called in process 0 with the reports of all processes; returns JSON values.
      kind: of what `decide` returns (`field_validation.from_json`).

    Returns:
      the connections, and the result of `decide`, in all processes.

    Raises:
      PeerError: a process did not connect.
      UserError: `decide` raised it, which all processes then raise; process 0's port is in use, or its limit of open
        files too low; this process does not belong to the run of process 0.
    """
    if info.process_index:
        return _join(info, report, timeout, kind)
    with _Meeting(info) as meeting:
        try:
            result = decide(meeting.wait(report, timeout))
        except BaseException as error:
            is_known = isinstance(error, PeerError | UserError)
            reason = str(error) if is_known else "process 0 was stopped before the start"
            meeting.send(refuse=reason, mistake=isinstance(error, UserError))
            raise
        meeting.send(result=result)
        return Peers(meeting.release()), result


def listen(port: int, backlog: int = 1) -> socket.socket:
    """A server on all addresses of this host; port 0 is any free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _proof(info: ProcessInfo, question: str, process: int) -> str:
    """What only a process with the secret can answer to a question."""
    return hmac.new(info.secret.encode(), f"{question} {process}".encode(), hashlib.sha256).hexdigest()


class _Meeting:
    """Process 0's server: its connections, which it closes unless they are released."""

    def __init__(self, info: ProcessInfo):
        self.info = info
        self.seats: dict[int, tuple[Connection, Report]] = {}  # by process
        self.waiting: dict[Connection, tuple[str, float]] = {}  # question and deadline of new connections, oldest first
        self.wrong_secrets = 0
        self.selector = selectors.DefaultSelector()

    def __enter__(self) -> "_Meeting":
        return self

    def __exit__(self, *exception: object) -> None:
        self.selector.close()
        for connection in (*self.waiting, *(connection for connection, _ in self.seats.values())):
            connection.close()

    def release(self) -> dict[int, Connection]:
        """The connections to all processes, which now belong to the caller."""
        connections = {process: connection for process, (connection, _) in self.seats.items()}
        self.seats = {}
        return connections

    def send(self, **message: Any) -> None:
        """Send a message to all processes."""
        for connection, _ in self.seats.values():
            connection.send(**message)

    def wait(self, report: Report, timeout: float) -> list[Report]:
        """Wait until all processes are connected; returns their reports.

        Raises:
          PeerError: a process did not connect in time.
        """
        count, deadline = self.info.process_count, time.monotonic() + timeout
        with self._listening() as server:
            while len(self.seats) < count - 1:
                now = time.monotonic()
                for connection in [one for one, (_, until) in self.waiting.items() if now > until]:
                    self._drop(connection)
                if now > deadline:
                    raise PeerError(self._late(timeout))
                for key, _ in self.selector.select(min(deadline - now, 0.2)):
                    if key.fileobj is server:
                        self._accept(server)
                    elif key.fileobj.fileno() >= 0:  # not closed a moment ago
                        self._receive(key.fileobj)
        return [report, *(self.seats[i][1] for i in range(1, count))]

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        """The server, with a limit of open files that suffices.

        Raises:
          UserError: the hard limit does not suffice, or the port is in use.
        """
        needed = self.info.process_count + SPARE_CONNECTIONS + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            require(
                hard == resource.RLIM_INFINITY or hard >= needed,
                f"process 0 needs {needed} open files for {self.info.process_count} processes, and its limit is "
                f"{hard}: raise it (`ulimit -n {needed}`)",
            )
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        try:
            server = listen(self.info.coordinator_port, BACKLOG + self.info.process_count)
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen on port {self.info.coordinator_port} ({error.strerror}): give another "
                "--cluster.coordinator"
            ) from error
        with server:
            self.selector.register(server, selectors.EVENT_READ)
            yield server
            self.selector.unregister(server)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection = Connection(server.accept()[0])
        except OSError:  # closed again, or no more files
            if self.waiting:
                self._drop(next(iter(self.waiting)))
            return
        question = secrets.token_hex(16)
        self.waiting[connection] = question, time.monotonic() + HELLO_TIMEOUT_SECONDS
        self.selector.register(connection, selectors.EVENT_READ)
        connection.send(question=question)
        if len(self.waiting) > self.info.process_count + SPARE_CONNECTIONS:
            self._drop(next(iter(self.waiting)))

    def _receive(self, connection: Connection) -> None:
        messages = connection.receive()
        if messages is None:
            self._drop(connection)
        elif messages and connection in self.waiting and (refusal := self._seat(connection, messages[0])):
            connection.send(**refusal)
            self._drop(connection)

    def _seat(self, connection: Connection, hello: Message) -> Message | None:
        """Seat a process, or return a message that says why it has no seat."""
        question, _ = self.waiting[connection]
        process, count, proof, report = (hello.get(name) for name in ("process", "processes", "proof", "report"))
        if None in (process, proof) or not hmac.compare_digest(proof, _proof(self.info, question, process)):
            self.wrong_secrets += 1
            return _refusal(
                "process 0 has another secret: start all processes in one job of the scheduler, or give all of them "
                "the same --cluster.secret-file"
            )
        if count != self.info.process_count or not 0 < process < count or report is None:
            count = self.info.process_count
            return _refusal(f"process 0 runs with {count} processes: give all processes the same --cluster")
        if process in self.seats:  # or its host is gone, which the kernel notices within 60 s
            text = f"process {process} is connected already: give each process its own --cluster.process"
            return _refusal(text, mistake=False)
        del self.waiting[connection]
        self.seats[process] = connection, report
        return None

    def _drop(self, connection: Connection) -> None:
        """Close a connection; the process that had it can connect again."""
        self.selector.unregister(connection)
        self.waiting.pop(connection, None)
        self.seats = {process: seat for process, seat in self.seats.items() if seat[0] is not connection}
        connection.close()

    def _late(self, timeout: float) -> str:
        count = self.info.process_count
        missing = [i for i in range(1, count) if i not in self.seats]
        late = f"process{'es' if missing[1:] else ''} {', '.join(map(str, missing[:8]))}"
        late += " ..." if missing[8:] else ""
        refused = f"; {self.wrong_secrets} connection(s) with another secret were refused" if self.wrong_secrets else ""
        return f"{late} of {count} did not connect to {self.info.coordinator_host} within {timeout:g} s{refused}"


def _refusal(reason: str, mistake: bool = True) -> Message:
    return {"refuse": reason, "mistake": mistake, "again": not mistake}


def _join(info: ProcessInfo, report: Report, timeout: float, kind: type[T]) -> tuple[Peers, T]:
    """Connect to process 0, send a report, and wait for its decision; again, if the connection is lost before that."""
    deadline, address = time.monotonic() + timeout, (info.coordinator_host, info.coordinator_port)
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            connection = Connection(socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.01)))
        except (OSError, ValueError) as error:  # ValueError: no name of a host
            reason = getattr(error, "strerror", None) or str(error)
            time.sleep(0.2)
            continue
        reply = _exchange(connection, info, report, deadline) or {}
        if "result" in reply:
            with contextlib.suppress(UserError):  # else it is another program
                result = from_json(kind, reply["result"], "the decision")
                return Peers({0: connection}), result
        connection.close()
        if "refuse" in reply and not reply.get("again"):
            raise (UserError if reply.get("mistake") else PeerError)(reply["refuse"])
        reason = reply.get("refuse", "it ended before the start, or is another program")
        time.sleep(0.2)
    raise PeerError(
        f"process {info.process_index} of {info.process_count} could not join process 0 at {info.coordinator_host}:"
        f"{info.coordinator_port} within {timeout:g} s ({reason})"
    )


def _exchange(connection: Connection, info: ProcessInfo, report: Report, deadline: float) -> Message | None:
    """Answer the question of process 0; returns its decision, or None if the connection is lost."""
    first = connection.wait_for_message(min(deadline, time.monotonic() + HELLO_TIMEOUT_SECONDS))
    if first is None or "question" not in first:
        return None
    proof = _proof(info, first["question"], info.process_index)
    connection.send(process=info.process_index, processes=info.process_count, proof=proof, report=report)
    return connection.wait_for_message(time.monotonic() + DECISION_TIMEOUT_SECONDS)
