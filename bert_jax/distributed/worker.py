"""Connect a training process to its supervisor and to the other processes of its run."""

import json
import os

import jax

from bert_jax.distributed import agreement, jax_internals, supervised
from bert_jax.distributed.cluster_detection import ClusterConfig, ProcessInfo
from bert_jax.distributed.preemption import watch_for_notice
from bert_jax.distributed.process_report import code_report
from bert_jax.errors import PeerError, require
from bert_jax.storage.paths import is_remote

HEARTBEAT_MARGIN_SECONDS = 60
"""jax ends all processes when one stops sending heartbeats; the supervisors, which name it, must be first."""


def connect_worker(config: ClusterConfig) -> None:
    """Connect to the supervisor, if there is one, and call `jax.distributed.initialize`; wait for all processes.

    From now on, notices of a cloud are asked for (preemption.py).

    Raises:
      UserError: this is not the code that the supervisors have compared.
      PeerError: jax cannot connect them.
    """
    if supervised.WORKER_ENV not in os.environ:
        watch_for_notice(config.notices)
        return
    settings = json.loads(os.environ.pop(supervised.WORKER_ENV))  # popped: reader processes inherit the environment
    info = ProcessInfo(*settings["info"])
    supervised.connect_to_supervisor(settings["descriptor"], info.process_index)
    require(
        code_report() == settings["code"],
        "the code of bert_jax has changed since this command was started: start all processes again",
    )
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
    watch_for_notice(config.notices)  # from here on, jax handles SIGTERM
    if settings["is_first_on_host"] and not is_remote(jax.config.jax_compilation_cache_dir or ""):
        jax_internals.keep_compiled_programs()
