"""The devices of a run, and checks of a config on them: mesh, replicated parameters, memory and time."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from bert_jax import config as config_lib
from bert_jax.chips import GIB, MEMORY_SHARE, Sizes, chip_of
from bert_jax.config import Config
from bert_jax.config.presets import load_config
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.doctor.check_context import CheckContext, Finding, Machine, finding
from bert_jax.errors import require
from bert_jax.planning import topologies
from bert_jax.planning.aot_compile import compile_only_task
from bert_jax.planning.memory_model import estimate_memory, fewest_micro_batches_that_fit
from bert_jax.planning.roofline import predict
from bert_jax.planning.run_plan import hours_of
from bert_jax.planning.workload import count_parameters
from bert_jax.storage.paths import StoredPath
from bert_jax.training.implementation import check_devices, choose_implementation
from bert_jax.training.micro_batch import (
    MicroBatchRequest,
    available_memory,
    choose_accumulations,
    device_memory,
    host_memory,
    requested_accumulation,
)
from bert_jax.training.optimizers import describe
from bert_jax.training.pretraining_task import model_spec
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory.checkpoint import checkpoint_directory, newest_with_metadata, read_metadata
from bert_jax.training.sharding import abstract_mesh, unsharded_dimensions

MIB = 2**20
PRESETS_BY_SIZE = ("bert_base", "bert_medium", "bert_small", "bert_mini", "bert_tiny")
"""The sizes of BERT up to bert_base, the largest first."""
MAX_LISTED = 4
"""Parameters that are listed by name."""


def local_device_report(info: ProcessInfo | None) -> dict[str, Any]:
    """Devices of this process as plain values: `count`, `kind`, `slices`, `memory` and `most_memory` (bytes of
    each device, see `Machine`) and `reports_memory` (whether the devices report their memory themselves).
    """
    local = jax.local_devices()
    if info is not None and (ids := info.local_device_ids) is not None:
        local = [device for device in local if device.id in ids] or local[: len(ids)]
    memory, most = min(map(available_memory, local)), None
    if local[0].platform == "cpu":
        memory, most = memory / len(local), host_memory() / len(local)  # all CPU devices share the memory of the host
    return {
        "count": len(local),
        "kind": local[0].device_kind,
        "slices": sorted({getattr(device, "slice_index", None) or 0 for device in local}),
        "memory": memory,
        "most_memory": most,
        "reports_memory": device_memory(local[0]) is not None,
    }


def current_machine() -> Machine:
    """Devices of all processes of the current run; all processes have the same number of devices."""
    slices = {getattr(device, "slice_index", None) or 0 for device in jax.devices()}
    reports = [local_device_report(None)] * jax.process_count()
    return resolve_devices(None, None, None, reports)._replace(slices=len(slices))


def resolve_devices(
    topology: str | None, hosts: int | None, devices: int | None, reports: Sequence[dict[str, Any] | None]
) -> Machine:
    """Devices of a run: those that its processes see, planned ones, or those of a topology.

    Args:
      topology: name (planning/topologies.py), or None.
      hosts: number of planned processes; None: the present ones, or those of the topology.
      devices: number of planned devices of all processes; None: those of the topology, or per process as many as are
        visible.
      reports: result of `local_device_report` in each process; not read if devices or a topology are given.

    Raises:
      UserError: contradicting numbers, or unknown topology.
    """
    if topology is not None:
        require(devices is None, "--devices and --topology both set the number of devices: give one of them")
        target = topologies.parse_topology(topology)
        text, chip = f"{target.count:,} devices of {topology}", target.chip
        memory, kind = float(chip.memory), chip.device_kinds[0]
        machine = Machine(target.count, hosts or target.hosts, target.slices, memory, text, kind, True)
    elif devices is not None:
        machine = Machine(devices, hosts or len(reports), 1, None, f"{devices:,} planned device(s)")
    else:
        first, kinds = reports[0], sorted({report["kind"] for report in reports})
        count, planned = sum(report["count"] for report in reports), ""
        slices = len({number for report in reports for number in report["slices"]})
        if hosts is not None:
            count, slices = hosts * first["count"], 1
            planned = f", {first['count']} on each of {hosts} planned hosts"
        memory = min(report["memory"] for report in reports)
        text = f"{count:,} {'device' if count == 1 else 'devices'} of kind {' and '.join(kinds)}{planned}"
        most = min((report["most_memory"] for report in reports if report["most_memory"] is not None), default=None)
        machine = Machine(count, hosts or len(reports), slices, memory, text, kinds[0], first["reports_memory"], most)
    require(
        machine.devices % machine.hosts == 0,
        f"{machine.devices} devices cannot be divided evenly among {machine.hosts} hosts: change --devices or --hosts",
    )
    return machine


def model(context: CheckContext) -> Iterator[Finding]:
    """Size of the model and its compute type."""
    model, kind = context.config.model, context.config.model.compute_dtype
    count = count_parameters(model_spec(context.config, -1), Sizes()).total
    text = f"{context.config.name}: {count:,} parameters, {model.num_layers} layers of {model.hidden_size}, {kind}, "
    text += f"attention {model.attention}"
    values = {"parameters": count, "compute_dtype": kind, "attention": model.attention}
    if kind == "bfloat16" and context.machine.kind == "cpu":
        remedy = "most CPUs compute slower in it: set --model.compute-dtype float32"
        yield Finding("warning", "model", f"{text}; {remedy}", values)
    elif kind == "bfloat16" and model.attention in ("reference", "xla") and _attention_for(context) == "pallas_gpu":
        remedy = "pallas_gpu took 11 to 32 % less time per step on an H200: set --model.attention auto"
        yield Finding("warning", "model", f"{text}; {remedy}", values)
    else:
        yield finding("model", text, values)


def _attention_for(context: CheckContext) -> str:
    """What `model.attention auto` chooses for the devices."""
    config = config_lib.replace(context.config, model={"attention": "auto"})
    return choose_implementation(config, context.machine.kind).model.attention


def on_mesh(context: CheckContext) -> Iterator[Finding]:
    """Whether `pretrain` accepts the mesh for these devices and processes; then split, memory and time on it."""
    config, machine = context.config, context.machine
    programs = Programs(compile_only_task(config), abstract_mesh(config.mesh, machine.devices, machine.slices))
    choose_accumulations(programs, machine.hosts, context.micro_batch)
    check_devices(config.model, programs.mesh.shape["tensor"], machine.kind)
    axes = programs.mesh.shape
    sizes = Sizes(**axes, slices=machine.slices)
    shown = ", ".join(f"{axis} {size}" for axis, size in axes.items())
    text = machine.text
    if machine.devices > 1:
        text += (
            f", in {machine.hosts} process(es): {shown}; batches of all phases and of evaluation divide into "
            f"{sizes.row_shards} row shard(s), {config.model.num_heads} heads over tensor"
        )
    yield finding("mesh", text, {"devices": machine.devices, "hosts": machine.hosts, **axes})
    yield _split(config, programs)
    if machine.memory is None:
        text = "the memory of planned devices is not known: give --topology, or try bert-jax plan"
        yield finding("memory", f"not checked: {text}", {"available": None})
        yield finding("time", "not estimated for planned devices of unknown kind", {"hours": None})
        return
    found = _memory_of_phases(context, programs.mesh)
    yield from found
    too_large = [i for i, one in enumerate(found) if one.values["needed"] > MEMORY_SHARE * machine.memory]
    if too_large:
        yield finding("time", f"not estimated: phase {too_large[0]} does not fit", {"hours": None})
    else:
        yield _time(config, machine, sizes, [one.values["accumulation"] for one in found])


def _split(config: Config, programs: Programs) -> Finding:
    """Parameters that an axis of the mesh does not divide, and the memory of their copies."""
    axes = programs.mesh.shape
    replicated = unsharded_dimensions(programs.abstract_state(len(config.phases) - 1).params)
    if not replicated:
        over = [f"{axis} {axes[axis]}" for axis in ("fsdp", "tensor") if axes[axis] > 1]
        text = f"all parameters are split over {' and '.join(over)}" if over else "no axis splits parameters"
        return finding("split", text, {"replicated": [], "bytes": 0})
    copies = 1 + describe(config.optimizer.name).cost.moments
    extra = {one: int(copies * one.bytes * (1 - 1 / axes[one.axis])) for one in replicated}
    listed = [
        f"{one.path} (dimension {one.dimension} has {one.size:,}, mesh.{one.axis} is {axes[one.axis]}; "
        f"{extra[one] / MIB:,.1f} MiB more on each device)"
        for one in sorted(replicated, key=lambda one: -extra[one])[:MAX_LISTED]
    ]
    more = f" and {len(replicated) - MAX_LISTED} more" if len(replicated) > MAX_LISTED else ""
    text = f"{'; '.join(listed)}{more} are not split: {sum(extra.values()) / MIB:,.1f} MiB in total, with moments"
    remedy = "make these sizes multiples of the axis (model.vocab_size may be larger than the tokenizer), or accept it"
    parameters = [one._asdict() | {"extra_bytes": extra[one]} for one in replicated]
    return finding("split", text, {"replicated": parameters, "bytes": sum(extra.values())}, remedy)


def check_memory(config: Config, micro_batch: MicroBatchRequest, workdir: StoredPath) -> None:
    """Raise UserError if a phase needs more memory than this host has; only on CPUs, by arithmetic.

    Phases of which the run in `workdir` has all steps are not checked.
    """
    machine = current_machine()
    if machine.most_memory is None:
        return
    context = CheckContext(choose_implementation(config, machine.kind), [], None, machine, micro_batch=micro_batch)
    mesh = abstract_mesh(config.mesh, machine.devices, machine.slices)
    too_large = [one for one in _memory_of_phases(context, mesh) if one.level == "error"]
    done = _steps_done(workdir) if too_large else 0
    phases_done = len(config.phases) if done >= config.total_steps else config.locate_step(done)[0]
    for one in too_large:
        require(one.values["phase"] < phases_done, one.text)


def _steps_done(workdir: StoredPath) -> int:
    """The step of the newest checkpoint of a work directory; 0 without one."""
    newest = newest_with_metadata(checkpoint_directory(workdir))
    return 0 if newest is None else read_metadata(newest)["cursor"]["step"]


def _memory_of_phases(context: CheckContext, mesh: AbstractMesh) -> list[Finding]:
    """The memory of each phase; equal phases have equal findings."""
    sizes = Sizes(**mesh.shape, slices=context.machine.slices)
    return [_memory(context, i, mesh, sizes) for i in range(len(context.config.phases))]


def _memory(context: CheckContext, i: int, mesh: AbstractMesh, sizes: Sizes) -> Finding:
    """Estimated bytes of a step of a phase (memory model of `bert-jax plan`) against the memory of a device."""
    machine, phase = context.machine, context.config.phases[i]
    config = _as_computed(context.config, machine)
    given = requested_accumulation(phase, i, mesh, context.micro_batch)
    if not given and not machine.reports_memory and context.micro_batch != "auto":
        given = phase.fewest_micro_batches
    fitting = fewest_micro_batches_that_fit(config, i, sizes, machine.memory)
    count = given or fitting or (phase.valid_accumulations(sizes.row_shards) or [1])[-1]
    needed = sum(estimate_memory(config, i, sizes, count).values())
    text = (
        f"phase {i}: about {needed / GIB:,.2f} of {machine.memory / GIB:,.2f} GiB on each device, with accumulation "
        f"{count}{'' if given else ' (found at the start)'}; an estimate, `bert-jax plan` compiles"
    )
    values = {"phase": i, "needed": needed, "available": machine.memory, "accumulation": count}
    if needed <= MEMORY_SHARE * machine.memory:
        return finding("memory", text, values)
    remedy = "split the model over more devices (mesh.fsdp, mesh.tensor), or set --model.remat full"
    if fitting:
        remedy = f"set --micro-batch auto, or --phases.{i}.accumulation {fitting}"
    most = machine.most_memory
    if most is None or needed <= most:
        return finding("memory", f"{text}; at most {MEMORY_SHARE:.0%} of it is used", values, remedy)
    if preset := _smaller_preset(config, machine, sizes):
        remedy = f"{remedy}, or train a smaller model, such as the preset {preset}"
    text = (
        f"phase {i} needs about {needed / GIB:,.1f} GiB with accumulation {count}, and this host has {most / GIB:,.1f} "
        "GiB for each device"
    )
    return finding("memory", text, values, remedy, "error")


def _as_computed(config: Config, machine: Machine) -> Config:
    """The config with the type that a program computes in: XLA computes bfloat16 in float32 on CPUs."""
    if not machine.kind.lower().startswith("cpu"):
        return config
    return config_lib.replace(config, model={"compute_dtype": "float32"})


def _smaller_preset(config: Config, machine: Machine, sizes: Sizes) -> str | None:
    """The largest preset of BERT that has fewer parameters and fits into the memory that the host has, with the flag
    that it needs for that; None: there is none.
    """
    wanted = count_parameters(model_spec(config, -1), Sizes()).total
    for name in PRESETS_BY_SIZE:
        preset = _as_computed(load_config(name), machine)
        preset = config_lib.replace(preset, model={"vocab_size": config.model.vocab_size})
        if count_parameters(model_spec(preset, -1), Sizes()).total >= wanted:
            continue
        counts = [fewest_micro_batches_that_fit(preset, i, sizes, machine.memory) for i in range(len(preset.phases))]
        if None not in counts:
            fits = counts == [phase.fewest_micro_batches for phase in preset.phases]
            return name if fits else f"{name} with --micro-batch auto"
    return None


def _time(config: Config, machine: Machine, sizes: Sizes, counts: Sequence[int]) -> Finding:
    """Hours of the run by the roofline of `bert-jax plan`, for known devices."""
    if (chip := chip_of(machine.kind)) is None:
        return finding("time", f"not estimated for devices of kind {machine.kind}", {"hours": None})
    seconds = [predict(config, i, sizes, count, chip).step_seconds for i, count in enumerate(counts)]
    hours, listed = hours_of(config, seconds), " and ".join(f"{one:.3g}" for one in seconds)
    text = f"about {hours:,.1f} hours, {listed} s per step: a roofline estimate, without evaluation and checkpoints"
    return finding("time", text, {"hours": hours, "step_seconds": seconds})


CHECKS = {"model": model, "mesh": on_mesh}
"""Checks by the name of the finding that reports their error."""
