"""Set up jax in a training process: backends, compilation cache, and the connection to the other processes."""

import json
import os
from pathlib import Path

import jax
from jax.extend import backend

from bert_jax.distributed import agreement, supervisor
from bert_jax.distributed.cluster_detection import ClusterConfig, ProcessInfo
from bert_jax.errors import PeerError

HEARTBEAT_MARGIN_SECONDS = 60
"""jax ends all processes when one stops sending heartbeats; the supervisors, which name it, must be first."""


def set_compilation_cache(directory: str | None) -> None:
    """Set where jax keeps compiled programs for the next start.

    Args:
      directory: "none" turns the cache off; None: the directory in the environment, else one in the user's cache
        directory.
    """
    if directory is None and jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME")
        directory = str((Path(base) if base else Path.home() / ".cache") / "bert_jax" / "compiled")
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", None if directory == "none" else directory)


def disable_absent_tpu_backend() -> None:
    """Disable jax's TPU backend if there is no TPU: libtpu, which the extra `plan` installs, would print errors.

    Call it before anything needs a device. If a TPU is attached, jax sets its platforms at import; users set them with
    JAX_PLATFORMS. Compiling for absent TPUs (planning/topologies.py) needs no backend.
    """
    if not jax.config.jax_platforms:
        backend.register_backend_factory("tpu", lambda: None)  # None: no devices


def connect_worker(config: ClusterConfig) -> None:
    """Connect to the supervisor and call `jax.distributed.initialize`; returns when all processes are connected.

    Raises:
      PeerError: jax cannot connect them.
    """
    settings = json.loads(os.environ.pop(supervisor.WORKER_ENV))  # popped: reader processes inherit the environment
    info = ProcessInfo(*settings["info"])
    supervisor.connect_to_supervisor(settings["descriptor"], info.process_index)
    agreement.set_timeout(config.patience)
    host = f"[{info.coordinator_host}]" if ":" in info.coordinator_host else info.coordinator_host
    try:
        jax.distributed.initialize(
            f"{host}:{settings['port']}",
            info.process_count,
            info.process_index,
            info.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=config.timeout,
            heartbeat_timeout_seconds=config.timeout + HEARTBEAT_MARGIN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"process {info.process_index} of {info.process_count} cannot connect to the others ({reason})"
        ) from error
