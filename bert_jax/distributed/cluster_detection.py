"""This process's index, the number of processes and the address of process 0, from flags or from the environment."""

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from bert_jax.errors import UserError, require
from bert_jax.field_validation import Count, Interval, check

Seconds = Annotated[int, Interval("[1, 1e6]")]
JOB_VARIABLES = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Environment variables in which schedulers name a job."""


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of one run. They are detected under Slurm, on TPU pods, under Open MPI 4, and in Kubernetes with
    the package `kubernetes`."""

    coordinator: str | None = None
    """HOST:PORT of process 0, as the other processes reach it. The port must be free; jax gets a second free port."""
    processes: Count | None = None
    """Number of processes. 1: this process runs alone, whatever the environment says."""
    process: int | None = None
    """Index of this process, from 0."""
    secret_file: str | None = None
    """File whose content all processes of the run have. Others cannot take part in it. Without the file, they only
    need to be in the same job of Slurm or Open MPI, or outside of both."""
    timeout: Seconds = 300
    """Seconds to wait for the other processes at the start."""
    patience: Seconds = 3600
    """Seconds to wait, during the run, for a live process that has not reached a synchronization point."""
    notices: Literal["none", "gcp", "aws"] = "none"
    """Ask the metadata server of this cloud whether it takes the machine away, and then save and stop as after
    SIGTERM."""

    def __post_init__(self) -> None:
        check(self, "cluster.")
        count, index = self.processes, self.process
        require(
            index is None or 0 <= index < (count or index + 1),
            f"cluster.process is {index}: it must be from 0 to {(count or 1) - 1}",
        )
        _, colon, port = (self.coordinator or "host:1").rpartition(":")
        require(
            bool(colon) and port.isdecimal() and 0 < int(port) < 2**16,
            f"cluster.coordinator is {self.coordinator}: write HOST:PORT",
        )


class ProcessInfo(NamedTuple):
    """What a process knows of itself and of the coordinator, process 0."""

    coordinator_host: str
    coordinator_port: int
    """Port of the rendezvous, not of jax's coordination service."""
    process_index: int
    process_count: int
    local_device_ids: list[int] | None
    """Local devices that belong to this process; None: all."""
    secret: str = ""
    """What only processes of the same job know (`ClusterConfig.secret_file`)."""


def detect(config: ClusterConfig) -> ProcessInfo | None:
    """Return the info of this process; None if it is the only one.

    Raises:
      UserError: the flags, or the flags and the environment together, are incomplete; no secret can be read.
    """
    info = _detect(config)
    return info and info._replace(secret=_secret(config.secret_file))


def _detect(config: ClusterConfig) -> ProcessInfo | None:
    if config.processes == 1:
        return None
    # Open MPI 5 gives a process its rank, but not the address of the others.
    count, index = (_env_int(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK"))
    if config.coordinator is not None:
        count = count if config.processes is None else config.processes
        index = index if config.process is None else config.process
        if count is None or index is None:
            raise UserError("--cluster.coordinator needs --cluster.processes and --cluster.process")
        host, _, port = config.coordinator.rpartition(":")
        return ProcessInfo(host.strip("[]"), int(port), index, count, None) if count > 1 else None
    if config.processes is not None or config.process is not None:
        raise UserError("--cluster.processes and --cluster.process need --cluster.coordinator HOST:PORT")
    if not _maybe_distributed():
        return None
    if (count or 1) > 1 and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        raise UserError(f"this is one of {count} processes of Open MPI 5: add --cluster.coordinator HOST:PORT")
    from bert_jax.distributed import jax_internals

    address, count, index, device_ids = jax_internals.detect_cluster(config.timeout)
    if address is None or count == 1:
        return None
    host, _, port = address.rpartition(":")
    return ProcessInfo(host.strip("[]"), int(port), index, count, _local_device_ids(device_ids))


def _secret(file: str | None) -> str:
    """Hash of the file's content and of the scheduler's job."""
    try:
        content = b"" if file is None else Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"--cluster.secret-file {file} cannot be read ({(error.strerror or '').lower()})") from error
    require(bool(content) or file is None, f"--cluster.secret-file {file} is empty: write a secret into it")
    job = "\0".join(os.environ.get(name, "") for name in JOB_VARIABLES)
    return hashlib.sha256(job.encode() + b"\0" + content).hexdigest()


def _local_device_ids(detected: list[int] | None) -> list[int] | None:
    """Local devices of this process; None: all.

    jax assigns one device per task, also to the only task of a node, and to a task that sees only its own device.
    """
    one_task_per_node = _env_int("SLURM_STEP_NUM_TASKS") == _env_int("SLURM_STEP_NUM_NODES") is not None
    sees_own_device_only = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    return None if one_task_per_node or sees_own_device_only else detected


def _maybe_distributed() -> bool:
    """Whether the environment hints at several processes; only then jax, which is slow to import, decides."""
    environment = os.environ
    counts = [_env_int(name) or 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")]
    host_lists = [environment.get(name, "") for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")]
    in_kubernetes = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    has_tpu_devices = any(Path(path).exists() for path in ("/dev/accel0", "/dev/vfio/0"))
    on_tpu = has_tpu_devices and "tpu" in environment.get("JAX_PLATFORMS", "tpu")
    return (
        max(counts) > 1
        or any("," in hosts for hosts in host_lists)
        or on_tpu
        or (in_kubernetes and importlib.util.find_spec("kubernetes") is not None)
    )


def _env_int(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
