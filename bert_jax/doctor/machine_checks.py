"""Checks of a config on the devices of a run: mesh, replicated parameters, memory and time."""

from collections.abc import Iterator

from jax.sharding import AbstractMesh

from bert_jax import config as config_lib
from bert_jax.chips import GIB, Sizes, chip_of
from bert_jax.config import Config
from bert_jax.doctor.check_context import CheckContext
from bert_jax.doctor.finding import Finding
from bert_jax.errors import UserError
from bert_jax.planning.aot_compile import compile_only_task
from bert_jax.planning.memory_model import estimate_memory, fewest_micro_batches_that_fit
from bert_jax.planning.roofline import predict
from bert_jax.planning.run_plan import hours_of
from bert_jax.planning.workload import count_parameters
from bert_jax.training.loop import check_run
from bert_jax.training.micro_batch import MEMORY_SHARE, requested_accumulation, valid_accumulations
from bert_jax.training.optimizers import describe
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import abstract_mesh, row_shards, unsharded_dimensions

MIB = 2**20
MAX_LISTED = 4
"""Parameters that are listed by name."""


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
        yield Finding("ok", "model", text, values)


def mesh(context: CheckContext) -> Iterator[Finding]:
    """Whether `pretrain` accepts the mesh for these devices and processes."""
    config, machine = context.config, context.machine
    laid = abstract_mesh(config.mesh, machine.devices, machine.slices)
    check_run(Programs(compile_only_task(config), laid), machine.hosts, context.micro_batch)
    shards = row_shards(laid)
    axes = ", ".join(f"{axis} {size}" for axis, size in laid.shape.items())
    text = (
        f"{machine.text}, in {machine.hosts} process(es): {axes}; batches of all phases and of evaluation "
        f"divide into {shards} row shard(s), {config.model.num_heads} heads over tensor"
    )
    yield Finding("ok", "mesh", text, {"devices": machine.devices, "hosts": machine.hosts, **laid.shape})


def split(context: CheckContext) -> Iterator[Finding]:
    """Parameters that an axis of the mesh does not divide, and the memory of their copies."""
    try:
        laid = abstract_mesh(context.config.mesh, context.machine.devices, context.machine.slices)
        params = Programs(compile_only_task(context.config), laid).abstract_state(len(context.config.phases) - 1).params
    except UserError as error:
        yield _not_checked("split", error)
        return
    replicated = unsharded_dimensions(params)
    if not replicated:
        over = [f"{axis} {laid.shape[axis]}" for axis in ("fsdp", "tensor") if laid.shape[axis] > 1]
        text = f"all parameters are split over {' and '.join(over)}" if over else "no axis splits parameters"
        yield Finding("ok", "split", text, {"replicated": [], "bytes": 0})
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
    values = {"replicated": parameters, "bytes": sum(extra.values())}
    yield Finding("warning", "split", f"{text}: {remedy}", values)


def memory(context: CheckContext) -> Iterator[Finding]:
    """Estimated bytes of a step of each phase (memory model of `bert-jax plan`) against the memory of a device."""
    config, machine = context.config, context.machine
    if machine.memory is None:
        text = "the memory of planned devices is not known: give --topology, or try bert-jax plan"
        yield Finding("ok", "memory", f"not checked: {text}", {"available": None})
        return
    try:
        laid = abstract_mesh(config.mesh, machine.devices, machine.slices)
        sizes = Sizes(**laid.shape, slices=machine.slices)
        for i in range(len(config.phases)):
            yield _memory(config, i, sizes, machine.memory, _micro_batches(context, i, laid))
    except UserError as error:
        yield _not_checked("memory", error)


def _micro_batches(context: CheckContext, index: int, laid: AbstractMesh) -> int | None:
    """Micro-batches of a phase; None if `pretrain` chooses them by the memory of the devices."""
    phase = context.config.phases[index]
    by_memory = context.machine.reports_memory or context.micro_batch == "auto"
    return requested_accumulation(phase, index, laid, context.micro_batch) or (
        None if by_memory else phase.fewest_micro_batches
    )


def time(context: CheckContext) -> Iterator[Finding]:
    """Hours of the run by the roofline of `bert-jax plan`, for known devices."""
    config, machine, chip = context.config, context.machine, chip_of(context.machine.kind)
    if chip is None or machine.memory is None:
        text = f"not estimated for devices of kind {machine.kind or 'unknown'}"
        yield Finding("ok", "time", text, {"hours": None})
        return
    try:
        laid = abstract_mesh(config.mesh, machine.devices, machine.slices)
        sizes, seconds = Sizes(**laid.shape, slices=machine.slices), []
        for i in range(len(config.phases)):
            count = _micro_batches(context, i, laid) or fewest_micro_batches_that_fit(config, i, sizes, machine.memory)
            if count is None:
                yield Finding("ok", "time", f"not estimated: phase {i} does not fit", {"hours": None})
                return
            seconds.append(predict(config, i, sizes, count, chip).step_seconds)
    except UserError as error:
        yield _not_checked("time", error)
        return
    hours, listed = hours_of(config, seconds), " and ".join(f"{one:.3g}" for one in seconds)
    text = f"about {hours:,.1f} hours, {listed} s per step: a roofline estimate, without evaluation and checkpoints"
    yield Finding("ok", "time", text, {"hours": hours, "step_seconds": seconds})


def _memory(config: Config, index: int, sizes: Sizes, available: float, micro_batches: int | None) -> Finding:
    """Memory of one phase with `micro_batches`, or with the fewest that fit if None."""
    limit, fitting = MEMORY_SHARE * available, fewest_micro_batches_that_fit(config, index, sizes, available)
    count = micro_batches or fitting or (valid_accumulations(config.phases[index], sizes.row_shards) or [1])[-1]
    needed = sum(estimate_memory(config, index, sizes, count).values())
    text = (
        f"phase {index}: about {needed / GIB:,.2f} of {available / GIB:,.2f} GiB on each device, with accumulation "
        f"{count}{'' if micro_batches else ' (found at the start)'}; an estimate, `bert-jax plan` compiles"
    )
    values = {"phase": index, "needed": needed, "available": available, "accumulation": count}
    if needed <= limit:
        return Finding("ok", "memory", text, values)
    recomputed = config_lib.replace(config, model={"remat": "full"})
    if fitting:
        remedy = f"set --phases.{index}.accumulation {fitting}, or --micro-batch auto"
    elif fewest_micro_batches_that_fit(recomputed, index, sizes, available):
        remedy = "set --model.remat full and --micro-batch auto"
    else:
        remedy = "split the model over more devices (mesh.fsdp, mesh.tensor), with --model.remat full"
    return Finding("warning", "memory", f"{text}; at most {MEMORY_SHARE:.0%} of it is used: {remedy}", values)


def _not_checked(name: str, error: UserError) -> Finding:
    return Finding("warning", name, f"not checked, because the mesh does not fit: {error}", {})


CHECKS = {"model": model, "mesh": mesh, "split": split, "memory": memory, "time": time}
"""Checks by the name of the finding that reports their error."""
