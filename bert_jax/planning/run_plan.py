"""`bert-jax plan`: what a run needs and takes on devices that are not there, phase by phase.

Whether a phase fits, and what its program sends, is the compiler's word for TPUs; for GPUs both are estimated. Step
times are a roofline's (planning/roofline.py). docs/plan.md says which figure comes from where.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax.chips import GIB
from bert_jax.config import Config
from bert_jax.planning import aot_compile, hlo
from bert_jax.planning.collectives import Collectives
from bert_jax.planning.memory_model import estimate, fewest_that_fit
from bert_jax.planning.roofline import predict
from bert_jax.planning.topologies import Topology, devices_per_chip
from bert_jax.training.loop import check_phases
from bert_jax.training.micro_batch import requested_accumulation, valid_accumulations
from bert_jax.training.pretraining_task import train_step_flops
from bert_jax.training.sharding import unsharded_dimensions
from bert_jax.training.state import abstract_state

Values = dict[str, Any]
Compile = Callable[..., aot_compile.Program | aot_compile.Refusal]


def plan(
    config: Config,
    topology: Topology,
    micro_batch: int | None = None,
    price: float | None = None,
    compiled: Compile = aot_compile.compile_step,
) -> Values:
    """What to expect of a run, as plain values; bytes are those of one device, seconds those of one update.

    Args:
      config: of the run; its mesh is laid over the topology.
      topology: where.
      micro_batch: rows of a micro-batch on each device; None: the phases' accumulation, and without that the fewest
        micro-batches that fit by the estimate, as `pretrain` finds them by compiling.
      price: of a chip for an hour, in whatever currency.
      compiled: compiles the step of a phase (`ahead.compile_step`); not called for GPUs.

    Raises:
      UserError: the mesh does not fit the topology, or a phase's batches cannot be cut so.
    """
    mesh = topology.mesh(config.mesh)
    check_phases(aot_compile.blank_task(config), mesh, micro_batch)
    rows = []
    for i, phase in enumerate(config.phases):
        accumulation = requested_accumulation(phase, i, mesh, micro_batch) or fewest_that_fit(
            config, i, topology.sizes(mesh), topology.chip.memory
        )
        accumulation = accumulation or valid_accumulations(phase, topology.sizes(mesh).row_shards)[-1]
        rows.append(_phase(config, i, topology, mesh, accumulation, compiled))
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


def _phase(config: Config, index: int, topology: Topology, mesh: Any, accumulation: int, compiled: Compile) -> Values:
    settings, sizes, chip = config.phases[index], topology.sizes(mesh), topology.chip
    row: Values = {
        "phase": index,
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "accumulation": accumulation,
        "rows": settings.batch_size // (sizes.row_shards * accumulation),
        "flops": train_step_flops(config, index, settings.batch_size),
    }
    sent: Collectives | None = None
    if topology.devices is None:
        aot_compile.trace(config, index, mesh, accumulation).lower(lowering_platforms=("cuda",))
        memory = _estimated(estimate(config, index, sizes, accumulation), int(chip.memory))
        row |= {"compiled": False, "collectives": None, "memory": memory}
    else:
        program = compiled(config, index, mesh, accumulation)
        memory = _memory(config, index, topology, mesh, accumulation, program)
        row |= {"compiled": True, "collectives": None, "memory": memory}
        if isinstance(program, aot_compile.Program):
            sent = aot_compile.by_axis(program.collectives, sizes)
            row |= {"collectives": hlo.bytes_by_kind(program.collectives), "compile_seconds": program.seconds}
    needed, available = memory["total"], memory["available"]
    row |= {"fits": needed <= available, "short_by": max(0, needed - available)}
    if not row["fits"]:
        return row | dict.fromkeys(("sent", "step_seconds", "seconds", "bound", "mfu"))
    expected = predict(config, index, sizes, accumulation, chip, sent)
    return row | {
        "sent": expected.collectives._asdict(),
        "step_seconds": expected.step_seconds,
        "seconds": dict(expected.seconds),
        "bound": expected.bound,
        "mfu": expected.mfu,
    }


def _estimated(memory: dict[str, int], available: int) -> dict[str, int]:
    """The model's finer kinds under the names that a compiled program's have."""
    named = {kind: memory[kind] for kind in ("parameters", "moments", "activations")}
    named["temporaries"] = sum(memory[kind] for kind in ("gradients", "gathered", "casts", "temporaries"))
    return named | {"other": memory["batch"], "total": sum(memory.values()), "available": available}


def _memory(
    config: Config,
    index: int,
    topology: Topology,
    mesh: Any,
    accumulation: int,
    program: aot_compile.Program | aot_compile.Refusal,
) -> dict[str, int]:
    """Bytes by kind: parameters and moments by their shapes; the total is the compiler's, and so is what is left of
    its temporaries beside the activations that the model expects.
    """
    state = abstract_state(aot_compile.blank_task(config).at(index), mesh)
    kept = {"parameters": aot_compile.shard_bytes(state.params), "moments": aot_compile.shard_bytes(state.optimizer)}
    activations = estimate(config, index, topology.sizes(mesh), accumulation)["activations"]
    if isinstance(program, aot_compile.Refusal):
        total = program.needed + (0 if program.arguments_counted else sum(kept.values()))
        return kept | {"activations": activations, "total": total, "available": program.available}
    activations = min(activations, program.temporaries)
    temporaries = program.temporaries - activations
    other = program.total - program.temporaries - sum(kept.values())
    parts = kept | {"activations": activations, "temporaries": temporaries, "other": other}
    return parts | {"total": program.total, "available": int(topology.chip.memory)}


def _run(config: Config, topology: Topology, rows: list[Values], price: float | None) -> Values:
    """Hours of all updates, one behind the other, and what they cost."""
    if not all(row["fits"] for row in rows):
        return dict.fromkeys(("hours", "chip_hours", "cost"))
    hours = hours_of(config, [row["step_seconds"] for row in rows])
    chip_hours = hours * topology.chips
    return {"hours": hours, "chip_hours": chip_hours, "cost": None if price is None else chip_hours * price}


def hours_of(config: Config, step_seconds: Sequence[float]) -> float:
    """Hours of all updates of a run, by the seconds of a full update in each phase."""
    hours = 0.0
    for phase, seconds in zip(config.phases, step_seconds, strict=True):
        # While a batch ramps up, an update takes as much less time as it has fewer rows.
        needed = phase.rows_before(phase.steps) / phase.batch_size * seconds / 3600
        hours += needed if phase.hours is None else min(needed, phase.hours)
    return hours


def _notes(config: Config, topology: Topology, mesh: Any) -> Iterator[str]:
    """What a person should know beside the figures."""
    state = abstract_state(aot_compile.blank_task(config), mesh)
    for one in unsharded_dimensions(state.params):
        yield (
            f"{one.path} is copied, not split: mesh.{one.axis} {mesh.shape[one.axis]} does not divide its dimension "
            f"{one.dimension}, {one.size:,}; {_gib(3 * one.bytes)} with its moments on each device"
        )
    if devices_per_chip(topology.chip) > 1:
        yield f"a device is one of the {devices_per_chip(topology.chip)} cores of a chip, with half of its memory"
    if topology.devices is None:
        yield "nothing was compiled for GPUs: the step was lowered; memory and what is sent are estimates"


def lines(found: Values) -> Iterator[str]:
    """The plan for a person: a table of phases, what they send, the whole run, and notes."""
    axes = ", ".join(f"{name} {size}" for name, size in found["mesh"].items())
    slices = f" in {found['slices']} slices" if found["slices"] > 1 else ""
    yield f"{found['name']} on {found['topology']}: {found['devices']:,} devices{slices}, mesh {axes}"
    yield ""
    yield (
        "phase  seq_len    batch  rows x micro   fits  params  moments  activ.   temp.  other   total  of GiB  "
        "PFLOP/step  s/step    MFU  bound by"
    )
    yield from map(_line, found["phases"])
    yield ""
    for row in found["phases"]:
        yield from _traffic(row)
    run = found["run"]
    if run["hours"] is None:
        yield "the run does not fit: no time, no cost"
    else:
        cost = "" if run["cost"] is None else f", {run['cost']:,.2f} at the given price"
        yield (
            f"the whole run: {run['hours']:,.2f} hours on {found['chips']:,} chips, {run['chip_hours']:,.1f} "
            f"chip-hours{cost} (by the roofline; without evaluation, checkpoints, input and failures)"
        )
    for note in found["notes"]:
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


def _traffic(row: Values) -> Iterator[str]:
    if row["collectives"] is not None:
        kinds = ", ".join(f"{kind} {_gib(size)}" for kind, size in sorted(row["collectives"].items()))
        yield f"phase {row['phase']} exchanges per update, by its program: {kinds or 'nothing'}"
    if row["sent"] is not None:
        axes = ", ".join(f"{axis} {_gib(size)}" for axis, size in row["sent"].items() if size)
        source = "" if row["compiled"] else ", by estimate"
        yield f"phase {row['phase']} sends from each device{source}: {axes or 'nothing'}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"
