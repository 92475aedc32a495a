"""The child of a supervisor: takes its seat, joins its peers through jax, and ends when its parent does."""

import json
import os
import socket
import threading
from pathlib import Path

import jax

from bert_jax.errors import TRY_AGAIN
from bert_jax.runtime import together
from bert_jax.runtime.cluster import Seat
from bert_jax.runtime.supervisor import WORKER

_wire: socket.socket | None = None


def keep_programs(directory: str | None) -> None:
    """Keep compiled programs for the next start.

    Args:
      directory: where; "none" keeps none; None: where the environment says, else in the user's cache directory.
    """
    if directory is None and jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME")
        directory = str((Path(base) if base else Path.home() / ".cache") / "bert_jax" / "compiled")
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", None if directory == "none" else directory)


def join(timeout: int) -> None:
    """Take the seat that the supervisor gives; returns when all processes are connected.

    Args:
      timeout: seconds to wait for the others, here and wherever all meet.
    """
    global _wire
    place = json.loads(os.environ.pop(WORKER))  # popped: reader processes are no workers
    seat = Seat(*place["seat"])
    _wire = socket.socket(fileno=place["wire"])
    _wire.set_inheritable(False)
    threading.Thread(target=_end_with_parent, args=[_wire], daemon=True).start()
    jax.distributed.initialize(
        f"{seat.host}:{place['port']}",
        seat.processes,
        seat.process,
        seat.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout,
    )
    together.wait_at_most(timeout)


def leave() -> None:
    """Tell the supervisor that this process ends in order, whatever its exit code."""
    if _wire is not None:
        _wire.send(b"!")


def _end_with_parent(wire: socket.socket) -> None:
    wire.recv(1)  # nothing ever comes but the end
    os._exit(TRY_AGAIN)
