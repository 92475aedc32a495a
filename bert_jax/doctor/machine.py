"""Which devices a run will have: those that its processes see, those that are planned, or those of a topology."""

from collections.abc import Sequence
from typing import Any

import jax

from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.doctor.check_context import Machine
from bert_jax.errors import require
from bert_jax.planning import topologies
from bert_jax.training.micro_batch import available_memory, device_memory


def seen(info: ProcessInfo | None) -> dict[str, Any]:
    """This process's own devices, as plain values: `count`, `kind`, `slices`, `memory`, bytes of each, and
    whether they report that themselves, `reports_memory`.
    """
    local = jax.local_devices()
    if info is not None and (ids := info.local_device_ids) is not None:
        local = [device for device in local if device.id in ids] or local[: len(ids)]
    memory = min(map(available_memory, local))
    if local[0].platform == "cpu":
        memory /= len(local)  # all of them share what the host has
    return {
        "count": len(local),
        "kind": local[0].device_kind,
        "slices": sorted({getattr(device, "slice_index", None) or 0 for device in local}),
        "memory": memory,
        "reports_memory": device_memory(local[0]) is not None,
    }


def devices_of_run() -> Machine:
    """The devices of all processes of this run, of which each has as many."""
    slices = {getattr(device, "slice_index", None) or 0 for device in jax.devices()}
    return find(None, None, None, [seen(None)] * jax.process_count())._replace(slices=len(slices))


def find(topology: str | None, hosts: int | None, devices: int | None, sights: Sequence[dict[str, Any]]) -> Machine:
    """The devices of a run.

    Args:
      topology: name (planning/topologies.py), or None.
      hosts: processes that are planned; None: those that are here, or a topology's slices.
      devices: that are planned for all processes; None: those of the topology, or as many for each as are seen.
      sights: of each process, what `seen` says; not read if devices or a topology are given.

    Raises:
      UserError: numbers that contradict each other, or no such topology.
    """
    for name, count in (("--hosts", hosts), ("--devices", devices)):
        require(count is None or count >= 1, f"{name} is {count}: it must be at least 1")
    if topology is not None:
        require(devices is None, "--devices and --topology both say how many devices there are: give one of them")
        there = topologies.find(topology)
        text = f"{there.count:,} devices of {topology}"
        found = Machine(
            there.count,
            hosts or there.slices,
            there.slices,
            float(there.chip.memory),
            text,
            there.chip.device_kinds[0],
            True,
        )
    elif devices is not None:
        found = Machine(devices, hosts or len(sights), 1, None, f"{devices:,} planned device(s)")
    else:
        slices = {number for sight in sights for number in sight["slices"]}
        memory = min(sight["memory"] for sight in sights)
        per_host, kinds = sights[0]["count"], sorted({sight["kind"] for sight in sights})
        count = sum(sight["count"] for sight in sights) if hosts is None else hosts * per_host
        planned = "" if hosts is None else f", {per_host} on each of {hosts} planned hosts"
        text = f"{count:,} device(s) of kind {' and '.join(kinds)}{planned}"
        within, reported = len(slices) if hosts is None else 1, sights[0]["reports_memory"]
        found = Machine(count, hosts or len(sights), within, memory, text, kinds[0], reported)
    require(
        found.devices % found.hosts == 0,
        f"{found.devices} devices do not lie evenly on {found.hosts} hosts: change --devices or --hosts",
    )
    return found
