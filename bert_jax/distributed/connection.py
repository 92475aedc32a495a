"""JSON values, one per line, over a connection between two supervisors, with a sign of life every few seconds."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

BEAT_SECONDS = 5.0
"""A side that says nothing else says that it is alive, so often."""

Message = dict[str, Any]


class Connection:
    """One end. `send` may be called from any thread."""

    def __init__(self, plug: socket.socket, silence: float):
        """Takes the socket over.

        Args:
          plug: connected.
          silence: seconds without a sign of life after which the other side counts as gone.
        """
        self._plug, self._lock = plug, threading.Lock()
        self.bear(silence)
        self._lines = plug.makefile("r", encoding="utf-8")
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def bear(self, silence: float) -> None:
        """From now on, so many seconds without a sign of life."""
        self._plug.settimeout(max(silence, 2 * BEAT_SECONDS))

    def send(self, **message: Any) -> None:
        """Say something; to a side that is gone, nothing happens: `receive` tells."""
        try:
            with self._lock:
                self._plug.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self._closed.set()

    def receive(self) -> Message | None:
        """The next message; None if the other side is gone, or silent for too long."""
        with contextlib.suppress(OSError, ValueError):  # broken, silent, or closed here; a stranger who speaks no JSON
            for line in self._lines:
                message = json.loads(line)
                if message != {}:
                    return message
        self._closed.set()
        return None

    def follow(self, tell: Callable[[Message | None], None]) -> None:
        """Hand each message to a function, from a thread, and None when the other side is gone."""

        def read() -> None:
            while (message := self.receive()) is not None:
                tell(message)
            tell(None)

        threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        """Both directions."""
        self._closed.set()
        with contextlib.suppress(OSError):  # the other side was faster
            self._plug.shutdown(socket.SHUT_RDWR)
        self._plug.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self.send()
