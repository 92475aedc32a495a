"""A process that trains: its backends, its compilation cache, and how it joins its peers through jax."""

import json
import os
from pathlib import Path

import jax
from jax.extend import backend

from bert_jax.distributed import agreement, supervisor_link
from bert_jax.distributed.cluster_detection import ClusterConfig, Seat
from bert_jax.distributed.supervisor import WORKER
from bert_jax.errors import PeerError

LONGER = 60
"""Seconds. jax ends all processes if one is silent; the supervisors, who name it, shall be first."""


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


def skip_absent_tpu() -> None:
    """Keep jax from trying TPUs where it has found none: libtpu, which the extra `plan` installs, prints errors then.

    Call it before anything needs a device. Where a TPU is attached, jax has set its platforms when it was imported; a
    user sets them with JAX_PLATFORMS. Compiling for absent TPUs (planning/topologies.py) needs no backend.
    """
    if not jax.config.jax_platforms:
        backend.register_backend_factory("tpu", lambda: None)  # None: no such devices


def join(settings: ClusterConfig) -> None:
    """Take the seat that the supervisor gives; returns when all processes are connected.

    Raises:
      PeerError: jax cannot connect them.
    """
    place = json.loads(os.environ.pop(WORKER))  # popped: reader processes are no workers
    seat = Seat(*place["seat"])
    supervisor_link.hold(place["wire"], seat.process)
    agreement.wait_at_most(settings.patience)
    host = f"[{seat.host}]" if ":" in seat.host else seat.host
    try:
        jax.distributed.initialize(
            f"{host}:{place['port']}",
            seat.processes,
            seat.process,
            seat.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=settings.timeout,
            heartbeat_timeout_seconds=settings.timeout + LONGER,
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(f"process {seat.process} of {seat.processes} cannot join the others ({reason})") from error
