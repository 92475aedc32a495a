"""Which of how many processes this is, and where they meet: as flags say, or as the environment does."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from bert_jax.config.field_validation import Count, Interval, check
from bert_jax.errors import UserError, require

Seconds = Annotated[int, Interval("[1, 1e6]")]


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of one run. Under Slurm, on TPU pods, under Open MPI 4, and in Kubernetes with the package
    `kubernetes` they are found."""

    coordinator: str | None = None
    """HOST:PORT of process 0, as the others reach it. The port must be free there; one more is chosen for jax."""
    processes: Count | None = None
    """How many there are. 1: this one alone, whatever the environment says."""
    process: int | None = None
    """Which of them this is, from 0."""
    timeout: Seconds = 300
    """Seconds to wait for a process at the start."""
    patience: Seconds = 3600
    """Seconds to wait, later, for a process that is alive and does not come to where all meet."""

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


class Seat(NamedTuple):
    """A process's place among its peers."""

    host: str
    """Of process 0."""
    port: int
    """Where the peers meet there."""
    process: int
    processes: int
    devices: list[int] | None
    """Local devices that belong to this process; None: all."""


def find(settings: ClusterConfig) -> Seat | None:
    """This process's seat; None if it is alone.

    Raises:
      UserError: half of what has to be known is given.
    """
    if settings.processes == 1:
        return None
    # Open MPI 5 says who one is, but not where the others are.
    count, index = (_number(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK"))
    if settings.coordinator is not None:
        count = count if settings.processes is None else settings.processes
        index = index if settings.process is None else settings.process
        if count is None or index is None:
            raise UserError("--cluster.coordinator needs --cluster.processes and --cluster.process beside it")
        host, _, port = settings.coordinator.rpartition(":")
        return Seat(host.strip("[]"), int(port), index, count, None) if count > 1 else None
    if settings.processes is not None or settings.process is not None:
        raise UserError("--cluster.processes and --cluster.process need --cluster.coordinator HOST:PORT beside them")
    if not _several():
        return None
    if (count or 1) > 1 and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        raise UserError(f"this is one of {count} processes of Open MPI 5: add --cluster.coordinator HOST:PORT")
    from jax._src import clusters  # has no public face; the range of jax in setup.cfg was tried

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, processes, process, devices = detect(None, None, None, None, None, settings.timeout)
    if address is None or processes == 1:
        return None
    host, _, port = address.rpartition(":")
    return Seat(host.strip("[]"), int(port), process, processes, _own(devices))


def _own(devices: list[int] | None) -> list[int] | None:
    """Local devices of this process; None: all. jax takes one per task, even if it is alone, or sees its own only."""
    alone = _number("SLURM_STEP_NUM_TASKS") == _number("SLURM_STEP_NUM_NODES") is not None
    bound = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    return None if alone or bound else devices


def _several() -> bool:
    """Whether the environment hints at more than one process; jax, which takes a while to import, looks closer."""
    environment = os.environ
    tasks = [_number(name) or 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")]
    hosts = [environment.get(name, "") for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")]
    in_kubernetes = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    chips = any(Path(path).exists() for path in ("/dev/accel0", "/dev/vfio/0"))
    on_tpu = chips and "tpu" in environment.get("JAX_PLATFORMS", "tpu")
    return (
        max(tasks) > 1
        or any("," in names for names in hosts)
        or on_tpu
        or (in_kubernetes and importlib.util.find_spec("kubernetes") is not None)
    )


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
