"""The wire between a process that trains and its supervisor: who loses the other end ends, too."""

import os
import socket
import sys
import threading
import time
from typing import NoReturn

from bert_jax.errors import TRY_AGAIN

_wire: socket.socket | None = None
_process = 0
_left = False
LINGER_SECONDS = 2.0
"""What processes tell each other lies with the first one; so long the others can still hear it."""


def hold(descriptor: int, process: int) -> None:
    """Hold this process's end from now on; it ends when the supervisor does."""
    global _wire, _process
    _wire, _process = socket.socket(fileno=descriptor), process
    _wire.set_inheritable(False)
    threading.Thread(target=_end_with_supervisor, args=[_wire], daemon=True).start()


def leave() -> None:
    """Tell the supervisor that this process ends in order, whatever its exit code."""
    global _left
    if _wire is not None:
        _wire.send(b"!")
        _left = True


def at_work() -> bool:
    """Whether peers count on this process."""
    return _wire is not None and not _left


def end(code: int) -> NoReturn:
    """End at once. At an ordinary exit jax would wait for the peers, who wait for this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _process == 0:
        time.sleep(LINGER_SECONDS)
    os._exit(code)


def _end_with_supervisor(wire: socket.socket) -> None:
    wire.recv(1)  # nothing ever comes but the end
    os._exit(TRY_AGAIN)
