"""`bert-jax plan`: memory, communication, time and cost of a run on absent devices, phase by phase.

For TPUs, memory and communication come from the compiler; for GPUs, both are estimated. Step times come from a roofline
(planning/roofline.py). docs/plan.md lists the source of each figure.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax.chips import GIB
from bert_jax.config import Config
from bert_jax.planning import aot_compile, hlo
from bert_jax.planning.memory_model import estimate_memory, fewest_micro_batches_that_fit
from bert_jax.planning.roofline import CollectiveBytes, predict
from bert_jax.planning.topologies import Topology
from bert_jax.training.micro_batch import check_run, requested_accumulation, valid_accumulations
from bert_jax.training.optimizers import describe
from bert_jax.training.pretraining_task import train_step_flops
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import unsharded_dimensions

Values = dict[str, Any]
CompiledStep = aot_compile.CompiledStepStats | aot_compile.OutOfMemoryReport
Compile = Callable[..., CompiledStep]


def plan(
    config: Config,
    topology: Topology,
    micro_batch: int | None = None,
    price: float | None = None,
    compile_step: Compile = aot_compile.compile_step,
) -> Values:
    """Plan of a run as plain values; bytes are per device, seconds per step.

    Args:
      config: of the run; its mesh is laid over the topology.
      topology: target devices.
      micro_batch: rows of a micro-batch on each device; None: the phases' accumulation, or without it the fewest
        micro-batches that fit by the estimate (`pretrain` finds them by compiling).
      price: per chip and hour, in any currency.
      compile_step: compiles the step of a phase (`aot_compile.compile_step`); not called for GPUs.

    Raises:
      UserError: the mesh does not fit the topology, or the batches of a phase are not divisible.
    """
    mesh = topology.mesh(config.mesh)
    check_run(Programs(aot_compile.compile_only_task(config), mesh.abstract_mesh), 1, micro_batch)
    rows = []
    for i, phase in enumerate(config.phases):
        accumulation = requested_accumulation(phase, i, mesh, micro_batch) or fewest_micro_batches_that_fit(
            config, i, topology.sizes(mesh), topology.chip.memory
        )
        accumulation = accumulation or valid_accumulations(phase, topology.sizes(mesh).row_shards)[-1]
        rows.append(_phase(config, i, topology, mesh, accumulation, compile_step))
    return {
        "name": config.name,
        "topology": topology.name,
        "devices": topology.count,
        "chips": topology.chips,
        "slices": topology.slices,
        "mesh": dict(mesh.shape),
        "phases": rows,
        "run": _run(config, topology, rows, price),
        "notes": list(_notes(config, topology, mesh)),
    }


def _phase(
    config: Config, index: int, topology: Topology, mesh: Any, accumulation: int, compile_step: Compile
) -> Values:
    settings, sizes, chip = config.phases[index], topology.sizes(mesh), topology.chip
    row: Values = {
        "phase": index,
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "accumulation": accumulation,
        "rows": settings.batch_size // (sizes.row_shards * accumulation),
        "flops": train_step_flops(config, index, settings.batch_size),
    }
    sent: CollectiveBytes | None = None
    program: CompiledStep | None = None
    if topology.devices is None:
        aot_compile.trace_step(config, index, mesh, accumulation).lower(lowering_platforms=("cuda",))
    else:
        program = compile_step(config, index, mesh, accumulation)
    memory = _memory(estimate_memory(config, index, sizes, accumulation), program, int(chip.memory))
    row |= {"compiled": program is not None, "collectives": None, "memory": memory}
    if isinstance(program, aot_compile.CompiledStepStats):
        sent = aot_compile.collective_bytes_per_device(program.collectives, sizes)
        row |= {"collectives": hlo.bytes_by_kind(program.collectives), "compile_seconds": program.compile_seconds}
    needed, available = memory["total"], memory["available"]
    row |= {"fits": needed <= available, "short_by": max(0, needed - available)}
    if not row["fits"]:
        return row | dict.fromkeys(("sent", "step_seconds", "seconds", "bound", "mfu"))
    prediction = predict(config, index, sizes, accumulation, chip, sent)
    return row | {
        "sent": prediction.collectives._asdict(),
        "step_seconds": prediction.step_seconds,
        "seconds": dict(prediction.seconds),
        "bound": prediction.bound,
        "mfu": prediction.mfu,
    }


def _memory(estimate: dict[str, int], program: CompiledStep | None, available: int) -> dict[str, int]:
    """Bytes by kind. Parameters and moments are those of their shapes; the total is the compiler's, or estimated for
    GPUs; the compiler's temporaries are divided into the activations of the memory model and the rest.
    """
    parts = {kind: estimate[kind] for kind in ("parameters", "moments", "activations")}
    stored = parts["parameters"] + parts["moments"]
    if program is None:
        parts["temporaries"] = sum(estimate[kind] for kind in ("gradients", "gathered", "casts", "temporaries"))
        parts |= {"other": estimate["batch"], "total": sum(estimate.values())}
    elif isinstance(program, aot_compile.OutOfMemoryReport):
        parts["total"] = program.needed_bytes + (0 if program.arguments_counted else stored)
        available = program.available_bytes
    else:
        parts["activations"] = min(parts["activations"], program.temporary_bytes)
        parts["temporaries"] = program.temporary_bytes - parts["activations"]
        parts["other"] = program.total_bytes - program.temporary_bytes - stored
        parts["total"] = program.total_bytes
    return parts | {"available": available}


def _run(config: Config, topology: Topology, rows: list[Values], price: float | None) -> Values:
    """Hours and cost of all steps."""
    if not all(row["fits"] for row in rows):
        return dict.fromkeys(("hours", "chip_hours", "cost"))
    hours = hours_of(config, [row["step_seconds"] for row in rows])
    chip_hours = hours * topology.chips
    return {"hours": hours, "chip_hours": chip_hours, "cost": None if price is None else chip_hours * price}


def hours_of(config: Config, step_seconds: Sequence[float]) -> float:
    """Hours of all steps of a run, from the seconds of a full-batch step in each phase."""
    hours = 0.0
    for phase, seconds in zip(config.phases, step_seconds, strict=True):
        # In a batch ramp, the step time is proportional to the number of rows.
        needed = phase.rows_before(phase.steps) / phase.batch_size * seconds / 3600
        hours += needed if phase.hours is None else min(needed, phase.hours)
    return hours


def _notes(config: Config, topology: Topology, mesh: Any) -> Iterator[str]:
    """Remarks on the figures."""
    state = Programs(aot_compile.compile_only_task(config), mesh).abstract_state(len(config.phases) - 1)
    copies = 1 + describe(config.optimizer.name).moments
    for one in unsharded_dimensions(state.params):
        yield (
            f"{one.path} is copied, not split: mesh.{one.axis} {mesh.shape[one.axis]} does not divide its dimension "
            f"{one.dimension}, {one.size:,}; {_gib(copies * one.bytes)} with its moments on each device"
        )
    if topology.devices_per_chip > 1:
        yield f"a device is one of the {topology.devices_per_chip} cores of a chip and has half of its memory"
    if topology.devices is None:
        yield "the step was lowered for GPUs, not compiled: memory and bytes sent are estimates"


def format_lines(plan: Values) -> Iterator[str]:
    """The plan as text: a table of the phases, their communication, the whole run, and notes."""
    axes = ", ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    slices = f" in {plan['slices']} slices" if plan["slices"] > 1 else ""
    yield f"{plan['name']} on {plan['topology']}: {plan['devices']:,} devices{slices}, mesh {axes}"
    yield ""
    yield (
        "phase  seq_len    batch  rows x micro   fits  params  moments  activ.   temp.  other   total  of GiB  "
        "PFLOP/step  s/step    MFU  bound by"
    )
    yield from map(_line, plan["phases"])
    yield ""
    for row in plan["phases"]:
        yield from _communication(row)
    run = plan["run"]
    if run["hours"] is None:
        yield "the run does not fit: time and cost are not estimated"
    else:
        cost = "" if run["cost"] is None else f", {run['cost']:,.2f} at the given price"
        yield (
            f"the whole run: {run['hours']:,.2f} hours on {plan['chips']:,} chips, {run['chip_hours']:,.1f} "
            f"chip-hours{cost} (by the roofline; without evaluation, checkpoints, input and failures)"
        )
    for note in plan["notes"]:
        yield f"note: {note}"


def _line(row: Values) -> str:
    memory = row["memory"]
    kinds = ("parameters", "moments", "activations", "temporaries", "other")
    shown = [f"{memory[kind] / GIB:.2f}" if kind in memory else "" for kind in kinds]
    known = (
        f"{row['phase']:>5}  {row['seq_len']:>7}  {row['batch_size']:>7,}  {row['rows']:>5} x {row['accumulation']:<5}"
        f"  {'yes' if row['fits'] else 'no':>4}  {shown[0]:>6}  {shown[1]:>7}  {shown[2]:>6}  {shown[3]:>6}  "
        f"{shown[4]:>5}  {memory['total'] / GIB:>6.2f}  {memory['available'] / GIB:>6.2f}  {row['flops'] / 1e15:>10.3f}"
    )
    if not row["fits"]:
        return f"{known}  does not fit, by {'at least ' if row['compiled'] else 'about '}{_gib(row['short_by'])}"
    return f"{known}  {row['step_seconds']:>6.4g}  {100 * row['mfu']:>4.1f}%  {row['bound']}"


def _communication(row: Values) -> Iterator[str]:
    if row["collectives"] is not None:
        kinds = ", ".join(f"{kind} {_gib(size)}" for kind, size in sorted(row["collectives"].items()))
        yield f"phase {row['phase']} exchanges per step, by its compiled program: {kinds or 'nothing'}"
    if row["sent"] is not None:
        axes = ", ".join(f"{axis} {_gib(size)}" for axis, size in row["sent"].items() if size)
        source = "" if row["compiled"] else ", by estimate"
        yield f"phase {row['phase']} sends from each device{source}: {axes or 'nothing'}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"
