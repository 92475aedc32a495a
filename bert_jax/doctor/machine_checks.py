"""Whether a config can be laid over the devices of a run, what stays whole on them, and whether it fits."""

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
from bert_jax.training.loop import check_mesh
from bert_jax.training.micro_batch import FILLED, accumulations, given
from bert_jax.training.sharding import abstract_mesh, undivided
from bert_jax.training.state import abstract_state

MIB = 2**20
STATE = 3
"""Times a parameter's bytes: itself and two moments."""
SHOWN = 4
"""Parameters that are named one by one."""


def model(context: CheckContext) -> Iterator[Finding]:
    """How large the model is, and in which type it computes."""
    model, kind = context.config.model, context.config.model.compute_dtype
    count = count_parameters(model, context.config.objective.pair != "none", Sizes()).total
    text = f"{context.config.name}: {count:,} parameters, {model.num_layers} layers of {model.hidden_size}, {kind}"
    values = {"parameters": count, "compute_dtype": kind}
    if kind == "bfloat16" and context.machine.kind == "cpu":
        remedy = "most CPUs are slower in it: set --model.compute-dtype float32"
        yield Finding("warning", "model", f"{text}; {remedy}", values)
    else:
        yield Finding("ok", "model", text, values)


def mesh(context: CheckContext) -> Iterator[Finding]:
    """What `pretrain` refuses to train on these devices with so many processes."""
    config, machine = context.config, context.machine
    laid = abstract_mesh(config.mesh, machine.devices, machine.slices)
    check_mesh(compile_only_task(config), laid, machine.hosts, context.micro_batch)
    shards = laid.shape["data"] * laid.shape["fsdp"]
    axes = ", ".join(f"{axis} {size}" for axis, size in laid.shape.items())
    text = (
        f"{machine.text}, in {machine.hosts} process(es): {axes}; batches of all phases and of evaluation can be cut "
        f"into {shards} row shard(s), {config.model.num_heads} heads over tensor"
    )
    yield Finding("ok", "mesh", text, {"devices": machine.devices, "hosts": machine.hosts, **laid.shape})


def split(context: CheckContext) -> Iterator[Finding]:
    """Which parameters an axis of the mesh cannot divide, and what their copies cost."""
    try:
        laid = abstract_mesh(context.config.mesh, context.machine.devices, context.machine.slices)
        params = abstract_state(compile_only_task(context.config).at(len(context.config.phases) - 1), laid).params
    except UserError as error:
        yield _not_looked_at("split", error)
        return
    whole = undivided(params)
    if not whole:
        over = [f"{axis} {laid.shape[axis]}" for axis in ("fsdp", "tensor") if laid.shape[axis] > 1]
        text = f"every parameter that is to be split over {' and '.join(over)} is" if over else "nothing is to be split"
        yield Finding("ok", "split", text, {"whole": [], "bytes": 0})
        return
    lost = {one: int(STATE * one.bytes * (1 - 1 / laid.shape[one.axis])) for one in whole}
    shown = [
        f"{one.path} (dimension {one.dimension} has {one.size:,}, mesh.{one.axis} is {laid.shape[one.axis]}; "
        f"{lost[one] / MIB:,.1f} MiB more on each device)"
        for one in sorted(whole, key=lambda one: -lost[one])[:SHOWN]
    ]
    more = f" and {len(whole) - SHOWN} more" if len(whole) > SHOWN else ""
    text = f"{'; '.join(shown)}{more} stay whole, {sum(lost.values()) / MIB:,.1f} MiB with moments in all"
    remedy = "make these sizes multiples of the axis (model.vocab_size may be larger than the tokenizer), or accept it"
    values = {"whole": [{**one._asdict(), "lost": lost[one]} for one in whole], "bytes": sum(lost.values())}
    yield Finding("warning", "split", f"{text}: {remedy}", values)


def memory(context: CheckContext) -> Iterator[Finding]:
    """Bytes of each phase's update by the model of `bert-jax plan`, against those of a device."""
    config, machine = context.config, context.machine
    if machine.memory is None:
        text = "the memory of planned devices is not known: name them with --topology, or try bert-jax plan"
        yield Finding("ok", "memory", f"not looked at: {text}", {"available": None})
        return
    try:
        laid = abstract_mesh(config.mesh, machine.devices, machine.slices)
        sizes = Sizes(**laid.shape, slices=machine.slices)
        for i in range(len(config.phases)):
            yield _memory(config, i, sizes, machine.memory, _wanted(context, i, laid))
    except UserError as error:
        yield _not_looked_at("memory", error)


def _wanted(context: CheckContext, index: int, laid: AbstractMesh) -> int | None:
    """Micro-batches of a phase; None if `pretrain` finds them by the memory of the devices."""
    phase = context.config.phases[index]
    by_memory = context.machine.reports_memory or context.micro_batch == "auto"
    return given(phase, index, laid, context.micro_batch) or (None if by_memory else phase.fewest_micro_batches)


def time(context: CheckContext) -> Iterator[Finding]:
    """Hours of the run by the roofline of `bert-jax plan`, on devices that it knows."""
    config, machine, chip = context.config, context.machine, chip_of(context.machine.kind)
    if chip is None or machine.memory is None:
        text = f"not estimated for devices of kind {machine.kind or 'unknown'}"
        yield Finding("ok", "time", text, {"hours": None})
        return
    try:
        laid = abstract_mesh(config.mesh, machine.devices, machine.slices)
        sizes, seconds = Sizes(**laid.shape, slices=machine.slices), []
        for i in range(len(config.phases)):
            count = _wanted(context, i, laid) or fewest_micro_batches_that_fit(config, i, sizes, machine.memory)
            if count is None:
                yield Finding("ok", "time", f"not estimated: phase {i} does not fit", {"hours": None})
                return
            seconds.append(predict(config, i, sizes, count, chip).step_seconds)
    except UserError as error:
        yield _not_looked_at("time", error)
        return
    hours, each = hours_of(config, seconds), " and ".join(f"{one:.3g}" for one in seconds)
    text = f"about {hours:,.1f} hours, {each} s per update: an estimate by the roofline, without evaluation and saving"
    yield Finding("ok", "time", text, {"hours": hours, "step_seconds": seconds})


def _memory(config: Config, index: int, sizes: Sizes, available: float, wanted: int | None) -> Finding:
    """Of one phase; `wanted` micro-batches, or as many as it takes."""
    limit, fitting = FILLED * available, fewest_micro_batches_that_fit(config, index, sizes, available)
    count = wanted or fitting or (accumulations(config.phases[index], sizes.row_shards) or [1])[-1]
    needed = sum(estimate_memory(config, index, sizes, count).values())
    text = (
        f"phase {index}: about {needed / GIB:,.2f} of {available / GIB:,.2f} GiB on each device, with accumulation "
        f"{count}{'' if wanted else ' (found at the start)'}; an estimate, `bert-jax plan` compiles"
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
    return Finding("warning", "memory", f"{text}; {FILLED:.0%} of it may be filled: {remedy}", values)


def _not_looked_at(name: str, error: UserError) -> Finding:
    return Finding("warning", name, f"not looked at, because the mesh does not fit: {error}", {})


CHECKS = {"model": model, "mesh": mesh, "split": split, "memory": memory, "time": time}
"""By the name that an error of theirs gets."""
