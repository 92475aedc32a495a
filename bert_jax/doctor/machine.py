"""Devices of a run: those that its processes see, planned ones, or those of a topology."""

from collections.abc import Sequence
from typing import Any

import jax

from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.doctor.check_context import Machine
from bert_jax.errors import require
from bert_jax.planning import topologies
from bert_jax.training.micro_batch import available_memory, device_memory


def describe_local_devices(info: ProcessInfo | None) -> dict[str, Any]:
    """Devices of this process as plain values: `count`, `kind`, `slices`, `memory` (bytes of each device) and
    `reports_memory` (whether the devices report their memory themselves).
    """
    local = jax.local_devices()
    if info is not None and (ids := info.local_device_ids) is not None:
        local = [device for device in local if device.id in ids] or local[: len(ids)]
    memory = min(map(available_memory, local))
    if local[0].platform == "cpu":
        memory /= len(local)  # all CPU devices share the memory of the host
    return {
        "count": len(local),
        "kind": local[0].device_kind,
        "slices": sorted({getattr(device, "slice_index", None) or 0 for device in local}),
        "memory": memory,
        "reports_memory": device_memory(local[0]) is not None,
    }


def devices_of_run() -> Machine:
    """Devices of all processes of the current run; all processes have the same number of devices."""
    slices = {getattr(device, "slice_index", None) or 0 for device in jax.devices()}
    reports = [describe_local_devices(None)] * jax.process_count()
    return resolve_devices(None, None, None, reports)._replace(slices=len(slices))


def resolve_devices(
    topology: str | None, hosts: int | None, devices: int | None, reports: Sequence[dict[str, Any] | None]
) -> Machine:
    """Devices of a run.

    Args:
      topology: name (planning/topologies.py), or None.
      hosts: number of planned processes; None: the present ones, or the slices of the topology.
      devices: number of planned devices of all processes; None: those of the topology, or per process as many as are
        visible.
      reports: result of `describe_local_devices` in each process; not read if devices or a topology are given.

    Raises:
      UserError: contradicting numbers, or unknown topology.
    """
    for name, count in (("--hosts", hosts), ("--devices", devices)):
        require(count is None or count >= 1, f"{name} is {count}: it must be at least 1")
    if topology is not None:
        require(devices is None, "--devices and --topology both set the number of devices: give one of them")
        target = topologies.parse_topology(topology)
        text = f"{target.count:,} devices of {topology}"
        machine = Machine(
            target.count,
            hosts or target.slices,
            target.slices,
            float(target.chip.memory),
            text,
            target.chip.device_kinds[0],
            True,
        )
    elif devices is not None:
        machine = Machine(devices, hosts or len(reports), 1, None, f"{devices:,} planned device(s)")
    else:
        slices = {number for report in reports for number in report["slices"]}
        memory = min(report["memory"] for report in reports)
        per_host, kinds = reports[0]["count"], sorted({report["kind"] for report in reports})
        count = sum(report["count"] for report in reports) if hosts is None else hosts * per_host
        planned = "" if hosts is None else f", {per_host} on each of {hosts} planned hosts"
        text = f"{count:,} device(s) of kind {' and '.join(kinds)}{planned}"
        num_slices, reports_memory = len(slices) if hosts is None else 1, reports[0]["reports_memory"]
        machine = Machine(count, hosts or len(reports), num_slices, memory, text, kinds[0], reports_memory)
    require(
        machine.devices % machine.hosts == 0,
        f"{machine.devices} devices cannot be divided evenly among {machine.hosts} hosts: change --devices or --hosts",
    )
    return machine
