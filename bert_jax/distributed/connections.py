"""Connections between the supervisors of all processes, while a run goes on.

An open connection shows that both of its ends are alive.
"""

import contextlib
import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from bert_jax.distributed.messages import Message, parse_message

PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Socket options: the kernel probes idle connections every 15 s, and closes one to a host that is gone after 60 s."""
MAX_MESSAGE = 2**20
"""Bytes of a message."""
MAX_MESSAGES = 16
"""Messages that come together; the processes of a run send fewer until it ends."""
SEND_TIMEOUT_SECONDS = 10.0


class Connection:
    """A socket that carries messages."""

    def __init__(self, sock: socket.socket):
        """Takes ownership of a connected socket."""
        sock.settimeout(SEND_TIMEOUT_SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES.items():
            if hasattr(socket, name):  # macOS lacks some
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sock, self._received = sock, b""
        self.unread: list[Message] = []
        """Messages that came together with the one that `wait_for_message` returned."""

    def fileno(self) -> int:
        """Of the socket, for selectors."""
        return self.sock.fileno()

    def receive(self) -> list[Message] | None:
        """The messages that are complete, once the socket is readable.

        None: it is closed, or the other end is another program.
        """
        try:
            data = self.sock.recv(2**16)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or len(lines) > MAX_MESSAGES or len(self._received) > MAX_MESSAGE:
            return None
        messages = [parse_message(line) for line in lines]
        return None if None in messages else messages

    def wait_for_message(self, deadline: float) -> Message | None:
        """The next message; None: closed, another program, or none came before `time.monotonic()` is `deadline`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while (seconds := deadline - time.monotonic()) > 0:
                if selector.select(seconds) and (messages := self.receive()) != []:
                    if messages is None:
                        return None
                    first, *self.unread = messages
                    return first
        return None

    def send(self, **message: Any) -> None:
        """Send a message. If the other end is gone, nothing is raised."""
        with contextlib.suppress(OSError):
            self.sock.sendall((json.dumps(message) + "\n").encode())

    def shut_down(self) -> None:
        """Let both ends read the end of the connection."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.shut_down()
        self.sock.close()


class PeerEvent(NamedTuple):
    """A message of a peer; None: the peer is gone."""

    process: int
    message: Message | None


class Peers:
    """Connections to the peers: of process 0 to all others, of the others to process 0. One thread reads them all."""

    def __init__(self, connections: Mapping[int, Connection]):
        """Takes ownership of the connections, by the index of the process at the other end."""
        self.events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        """What all peers sent; the last event of each says that it is gone."""
        self._connections = connections
        for process, connection in connections.items():
            for message in connection.unread:
                self.events.put(PeerEvent(process, message))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    messages = key.fileobj.receive()
                    for message in [None] if messages is None else messages:
                        self.events.put(PeerEvent(key.data, message))
                    if messages is None:
                        selector.unregister(key.fileobj)

    def send(self, **message: Any) -> None:
        """Send a message to all peers. If one is gone, nothing is raised; `events` reports it."""
        for connection in self._connections.values():
            connection.send(**message)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.shut_down()
        self._thread.join()
        for connection in self._connections.values():
            connection.close()
