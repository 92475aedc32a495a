"""What a supervised training process does itself: it announces checkpoints and that it ends in order, and ends with its
supervisor."""

import os
import socket
import sys
import threading
import time
from typing import NoReturn

from bert_jax.errors import TRY_AGAIN

WORKER_ENV = "BERT_JAX_WORKER"
"""Environment variable of the child: its `ProcessInfo`, jax's port, the file descriptors of its supervisor link and of
standard error, and the path and the hash of the code that was compared."""
ENDS_IN_ORDER, SAVED = b"!", b"+"
"""What the child sends to its supervisor."""
LINGER_SECONDS = 2.0
"""Process 0 holds jax's key-value store; it ends this much later, so that the others can still read from it."""

_link: socket.socket | None = None
_process_index = 0
_exit_announced = False


def connect_to_supervisor(descriptor: int, process_index: int) -> None:
    """Take this process's end of the socket; from now on the process ends when the supervisor does."""
    global _link, _process_index
    _link, _process_index = socket.socket(fileno=descriptor), process_index
    _link.set_inheritable(False)
    threading.Thread(target=_end_with_supervisor, args=[_link], daemon=True).start()


def announce_exit() -> None:
    """Notify the supervisor that this process is about to end in order, whatever its exit code."""
    global _exit_announced
    if _link is not None:
        _link.send(ENDS_IN_ORDER)
        _exit_announced = True


def announce_checkpoint() -> None:
    """Notify the supervisor that a checkpoint is saved, so that a later failure may be followed by another start."""
    if _link is not None:
        _link.send(SAVED)


def must_announce_exit() -> bool:
    """Whether this process has a supervisor and has not announced its exit."""
    return _link is not None and not _exit_announced


def exit_now(code: int) -> NoReturn:
    """End at once. In an ordinary exit jax would wait for the peers, which wait for this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _process_index == 0:
        time.sleep(LINGER_SECONDS)
    os._exit(code)


def _end_with_supervisor(sock: socket.socket) -> None:
    sock.recv(1)  # the supervisor never sends: this returns when its end closes
    os._exit(TRY_AGAIN)
