"""A connection between two supervisors: JSON values, one per line, with heartbeats."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

HEARTBEAT_SECONDS = 5.0
"""Interval between heartbeats, which both sides send."""

Message = dict[str, Any]


class Connection:
    """One end of a connection. `send` is thread-safe."""

    def __init__(self, sock: socket.socket, timeout: float):
        """Takes ownership of the socket.

        Args:
          sock: connected.
          timeout: seconds without a message or heartbeat after which the peer counts as gone.
        """
        self._sock, self._lock = sock, threading.Lock()
        self.set_timeout(timeout)
        self._lines = sock.makefile("r", encoding="utf-8")
        self._closed = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def set_timeout(self, timeout: float) -> None:
        """Change the timeout in seconds; it is at least two heartbeat intervals."""
        self._sock.settimeout(max(timeout, 2 * HEARTBEAT_SECONDS))

    def send(self, **message: Any) -> None:
        """Send a message. If the peer is gone, nothing is raised; `receive` reports it."""
        try:
            with self._lock:
                self._sock.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self._closed.set()

    def receive(self) -> Message | None:
        """Wait for the next message; None if the peer is gone or its timeout has passed."""
        with contextlib.suppress(OSError, ValueError):  # closed by either side, timed out, or a client without JSON
            for line in self._lines:
                message = json.loads(line)
                if message != {}:
                    return message
        self._closed.set()
        return None

    def start_receiving(self, on_message: Callable[[Message | None], None]) -> None:
        """Call a function in a thread with each message, and with None when the peer is gone."""

        def receive_all() -> None:
            while (message := self.receive()) is not None:
                on_message(message)
            on_message(None)

        threading.Thread(target=receive_all, daemon=True).start()

    def close(self) -> None:
        """Close both directions."""
        self._closed.set()
        with contextlib.suppress(OSError):  # the peer has closed it already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            self.send()
