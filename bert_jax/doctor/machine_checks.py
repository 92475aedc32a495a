"""The devices of a run, and checks of a config on them: mesh, replicated parameters, memory and time."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from bert_jax import config as config_lib
from bert_jax.chips import GIB, Sizes, chip_of
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.doctor.check_context import CheckContext, Finding, Machine, finding
from bert_jax.errors import UserError, require
from bert_jax.planning import topologies
from bert_jax.planning.aot_compile import compile_only_task
from bert_jax.planning.memory_model import estimate_memory, fewest_micro_batches_that_fit
from bert_jax.planning.roofline import predict
from bert_jax.planning.run_plan import hours_of
from bert_jax.planning.workload import count_parameters
from bert_jax.training.micro_batch import (
    MEMORY_SHARE,
    available_memory,
    check_run,
    device_memory,
    requested_accumulation,
    valid_accumulations,
)
from bert_jax.training.optimizers import describe
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import abstract_mesh, row_shards, unsharded_dimensions

MIB = 2**20
MAX_LISTED = 4
"""Parameters that are listed by name."""


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
    """Devices of a run: those that its processes see, planned ones, or those of a topology.

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
        text, chip = f"{target.count:,} devices of {topology}", target.chip
        machine = Machine(
            target.count, hosts or target.slices, target.slices, float(chip.memory), text, chip.device_kinds[0], True
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


def model(context: CheckContext) -> Iterator[Finding]:
    """Size of the model and its compute type."""
    model, kind = context.config.model, context.config.model.compute_dtype
    count = count_parameters(model, context.config.objective.pair != "none", Sizes()).total
    text = f"{context.config.name}: {count:,} parameters, {model.num_layers} layers of {model.hidden_size}, {kind}"
    values = {"parameters": count, "compute_dtype": kind}
    if kind == "bfloat16" and context.machine.kind == "cpu":
        remedy = "most CPUs compute slower in it: set --model.compute-dtype float32"
        yield Finding("warning", "model", f"{text}; {remedy}", values)
    else:
        yield finding("model", text, values)


def _laid(context: CheckContext) -> AbstractMesh:
    """The mesh of the config on the devices; UserError if it does not fit."""
    return abstract_mesh(context.config.mesh, context.machine.devices, context.machine.slices)


def mesh(context: CheckContext) -> Iterator[Finding]:
    """Whether `pretrain` accepts the mesh for these devices and processes."""
    config, machine, laid = context.config, context.machine, _laid(context)
    check_run(Programs(compile_only_task(config), laid), machine.hosts, context.micro_batch)
    shards = row_shards(laid)
    axes = ", ".join(f"{axis} {size}" for axis, size in laid.shape.items())
    text = (
        f"{machine.text}, in {machine.hosts} process(es): {axes}; batches of all phases and of evaluation "
        f"divide into {shards} row shard(s), {config.model.num_heads} heads over tensor"
    )
    yield finding("mesh", text, {"devices": machine.devices, "hosts": machine.hosts, **laid.shape})


MeshCheck = Callable[[CheckContext, AbstractMesh], Iterator[Finding]]


def _on_mesh(check: MeshCheck) -> Callable[[CheckContext], Iterator[Finding]]:
    """A check that gets the mesh. A mesh that does not fit is an error of `mesh`, and a warning of this check."""

    @functools.wraps(check)
    def checked(context: CheckContext) -> Iterator[Finding]:
        try:
            yield from check(context, _laid(context))
        except UserError as error:
            yield Finding("warning", check.__name__, f"not checked, because the mesh does not fit: {error}", {})

    return checked


@_on_mesh
def split(context: CheckContext, laid: AbstractMesh) -> Iterator[Finding]:
    """Parameters that an axis of the mesh does not divide, and the memory of their copies."""
    params = Programs(compile_only_task(context.config), laid).abstract_state(len(context.config.phases) - 1).params
    replicated = unsharded_dimensions(params)
    if not replicated:
        over = [f"{axis} {laid.shape[axis]}" for axis in ("fsdp", "tensor") if laid.shape[axis] > 1]
        text = f"all parameters are split over {' and '.join(over)}" if over else "no axis splits parameters"
        yield finding("split", text, {"replicated": [], "bytes": 0})
        return
    copies = 1 + describe(context.config.optimizer.name).moments
    extra = {one: int(copies * one.bytes * (1 - 1 / laid.shape[one.axis])) for one in replicated}
    listed = [
        f"{one.path} (dimension {one.dimension} has {one.size:,}, mesh.{one.axis} is {laid.shape[one.axis]}; "
        f"{extra[one] / MIB:,.1f} MiB more on each device)"
        for one in sorted(replicated, key=lambda one: -extra[one])[:MAX_LISTED]
    ]
    more = f" and {len(replicated) - MAX_LISTED} more" if len(replicated) > MAX_LISTED else ""
    text = f"{'; '.join(listed)}{more} are not split: {sum(extra.values()) / MIB:,.1f} MiB in total, with moments"
    remedy = "make these sizes multiples of the axis (model.vocab_size may be larger than the tokenizer), or accept it"
    parameters = [one._asdict() | {"extra_bytes": extra[one]} for one in replicated]
    yield finding("split", text, {"replicated": parameters, "bytes": sum(extra.values())}, remedy)


def _micro_batches(context: CheckContext, index: int, laid: AbstractMesh) -> int | None:
    """Micro-batches of a phase; None if `pretrain` chooses them by the memory of the devices."""
    phase = context.config.phases[index]
    by_memory = context.machine.reports_memory or context.micro_batch == "auto"
    return requested_accumulation(phase, index, laid, context.micro_batch) or (
        None if by_memory else phase.fewest_micro_batches
    )


@_on_mesh
def memory(context: CheckContext, laid: AbstractMesh) -> Iterator[Finding]:
    """Estimated bytes of a step of each phase (memory model of `bert-jax plan`) against the memory of a device."""
    config, available = context.config, context.machine.memory
    if available is None:
        text = "the memory of planned devices is not known: give --topology, or try bert-jax plan"
        yield finding("memory", f"not checked: {text}", {"available": None})
        return
    sizes = Sizes(**laid.shape, slices=context.machine.slices)
    recomputed = config_lib.replace(config, model={"remat": "full"})
    for i, phase in enumerate(config.phases):
        given, fitting = _micro_batches(context, i, laid), fewest_micro_batches_that_fit(config, i, sizes, available)
        count = given or fitting or (valid_accumulations(phase, sizes.row_shards) or [1])[-1]
        needed = sum(estimate_memory(config, i, sizes, count).values())
        text = (
            f"phase {i}: about {needed / GIB:,.2f} of {available / GIB:,.2f} GiB on each device, with accumulation "
            f"{count}{'' if given else ' (found at the start)'}; an estimate, `bert-jax plan` compiles"
        )
        values = {"phase": i, "needed": needed, "available": available, "accumulation": count}
        if needed <= MEMORY_SHARE * available:
            yield finding("memory", text, values)
            continue
        if fitting:
            remedy = f"set --phases.{i}.accumulation {fitting}, or --micro-batch auto"
        elif fewest_micro_batches_that_fit(recomputed, i, sizes, available):
            remedy = "set --model.remat full and --micro-batch auto"
        else:
            remedy = "split the model over more devices (mesh.fsdp, mesh.tensor), with --model.remat full"
        yield finding("memory", f"{text}; at most {MEMORY_SHARE:.0%} of it is used", values, remedy)


@_on_mesh
def time(context: CheckContext, laid: AbstractMesh) -> Iterator[Finding]:
    """Hours of the run by the roofline of `bert-jax plan`, for known devices."""
    config, machine, chip = context.config, context.machine, chip_of(context.machine.kind)
    if chip is None or machine.memory is None:
        text = f"not estimated for devices of kind {machine.kind or 'unknown'}"
        yield finding("time", text, {"hours": None})
        return
    sizes, seconds = Sizes(**laid.shape, slices=machine.slices), []
    for i in range(len(config.phases)):
        count = _micro_batches(context, i, laid) or fewest_micro_batches_that_fit(config, i, sizes, machine.memory)
        if count is None:
            yield finding("time", f"not estimated: phase {i} does not fit", {"hours": None})
            return
        seconds.append(predict(config, i, sizes, count, chip).step_seconds)
    hours, listed = hours_of(config, seconds), " and ".join(f"{one:.3g}" for one in seconds)
    text = f"about {hours:,.1f} hours, {listed} s per step: a roofline estimate, without evaluation and checkpoints"
    yield finding("time", text, {"hours": hours, "step_seconds": seconds})


CHECKS = {"model": model, "mesh": mesh, "split": split, "memory": memory, "time": time}
"""Checks by the name of the finding that reports their error."""
