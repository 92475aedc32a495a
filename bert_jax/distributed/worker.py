"""Connect a training process to its supervisor and to the other processes of its run."""

import json
import os

import jax

from bert_jax.distributed import agreement, supervisor
from bert_jax.distributed.cluster_detection import ClusterConfig, ProcessInfo
from bert_jax.errors import PeerError

HEARTBEAT_MARGIN_SECONDS = 60
"""jax ends all processes when one stops sending heartbeats; the supervisors, which name it, must be first."""


def connect_worker(config: ClusterConfig) -> None:
    """Connect to the supervisor, if there is one, and call `jax.distributed.initialize`; wait for all processes.

    Raises:
      PeerError: jax cannot connect them.
    """
    if supervisor.WORKER_ENV not in os.environ:
        return
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
