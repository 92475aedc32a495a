"""`bert-jax plan`: memory, communication, time and cost of a run on absent devices, phase by phase.

Memory and communication come from the compiler; for GPUs without the extra `plan-gpu`, both are estimated. Step times
come from a roofline (planning/roofline.py). docs/plan.md lists the source of each figure.
"""

from collections.abc import Iterator, Sequence

from bert_jax.chips import GIB, Chip
from bert_jax.config import Config
from bert_jax.errors import install_command, require
from bert_jax.planning import aot_compile, hlo, kernels
from bert_jax.planning.memory_model import estimate_memory, fewest_micro_batches_that_fit
from bert_jax.planning.mesh_search import PlanValues, search_mesh
from bert_jax.planning.published_runs import OWN_RUNS, RUNS
from bert_jax.planning.roofline import ERROR, predict
from bert_jax.planning.schedule import phase_table
from bert_jax.planning.topologies import Topology
from bert_jax.report import Note, Section, Table
from bert_jax.report.cells import make_table
from bert_jax.training.implementation import check_devices, choose_implementation
from bert_jax.training.micro_batch import choose_accumulations, requested_accumulation
from bert_jax.training.optimizers import describe
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import check_processes, unsharded_dimensions


def plan(
    config: Config,
    topology: Topology,
    micro_batch: int | None = None,
    price: float | None = None,
    search: bool = False,
) -> PlanValues:
    """Plan of a run as plain values; bytes are per device, seconds per step.

    Args:
      config: of the run; its mesh is laid over the topology.
      topology: target devices.
      micro_batch: rows of a micro-batch on each device; None: the phases' accumulation, or without it the fewest
        micro-batches that fit by the estimate (`pretrain` finds them by compiling).
      price: per chip and hour, in any currency.
      search: whether to choose mesh, remat policy and micro-batches (`search_mesh`); the values then have the
        `search`.

    Raises:
      UserError: the mesh does not fit the topology, or the batches of a phase are not divisible.
    """
    extra, kind = {}, topology.chip.device_kinds[0]
    config = choose_implementation(config, kind)
    require(
        config.model.attention != "cudnn",
        "model.attention 'cudnn' is compiled by cuDNN, which needs a GPU: plan with model.attention auto, or xla",
    )
    if search:
        check_devices(config.model, 1, kind)
        config, rows, extra["search"] = search_mesh(config, topology, plan_phase)
    mesh = topology.mesh(config.mesh)
    programs = Programs(aot_compile.compile_only_task(config), mesh.abstract_mesh)
    choose_accumulations(programs, topology.hosts, micro_batch)
    check_processes(mesh, topology.hosts)
    check_devices(config.model, mesh.shape["tensor"], kind)
    if not search:
        sizes, rows = topology.sizes(mesh), []
        for i, phase in enumerate(config.phases):
            accumulation = (
                requested_accumulation(phase, i, mesh, micro_batch)
                or fewest_micro_batches_that_fit(config, i, sizes, topology.chip.memory)
                or phase.valid_accumulations(sizes.row_shards)[-1]
            )
            rows.append(plan_phase(config, i, topology, accumulation))
    return {
        "name": config.name,
        "topology": topology.name,
        "devices": topology.count,
        "chips": topology.chips,
        "slices": topology.slices,
        "mesh": dict(mesh.shape),
        "phases": rows,
        "run": _run(config, topology, rows, price),
        "roofline": _roofline(topology),
        "notes": list(_notes(config, topology, programs)),
        **extra,
    }


def plan_phase(
    config: Config, index: int, topology: Topology, accumulation: int, only_estimate: bool = False
) -> PlanValues:
    """A phase's row of the plan: compiles the step; for GPUs without their compiler, lowers it.

    Args:
      config: of the run.
      index: of the phase.
      topology: target devices.
      accumulation: micro-batches per step.
      only_estimate: whether memory and bytes sent are estimated without compilation.
    """
    settings, mesh, chip = config.phases[index], topology.mesh(config.mesh), topology.chip
    sizes = topology.sizes(mesh)
    program = None
    if only_estimate:
        pass
    elif topology.devices is None:
        aot_compile.trace_step(config, index, mesh, accumulation).lower(lowering_platforms=("cuda",))
    else:
        program = aot_compile.compiled_step_stats(config, index, mesh, accumulation)
    memory = _memory(estimate_memory(config, index, sizes, accumulation), program)
    collectives = getattr(program, "collectives", None)
    sent = None if collectives is None else hlo.bytes_sent_by_axis(collectives, sizes)
    prediction = predict(config, index, sizes, accumulation, chip, sent)
    row = {
        "phase": index,
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "accumulation": accumulation,
        "rows": settings.batch_size // (sizes.row_shards * accumulation),
        "flops": prediction.flops,
        "compiled": program is not None,
        "collectives": None if collectives is None else hlo.array_bytes_by_kind(collectives),
        "kernels": _kernels(program, chip),
        "memory": memory | {"available": int(chip.memory)},
        "fits": memory["total"] <= chip.memory,
        "short_by": max(0, memory["total"] - int(chip.memory)),
    }
    if not row["fits"]:
        return row | dict.fromkeys(("sent", "step_seconds", "seconds", "bound", "mfu"))
    return row | prediction._asdict() | {"step_seconds": prediction.step_seconds}


def _kernels(
    program: aot_compile.CompiledStepStats | aot_compile.OutOfMemoryReport | None, chip: Chip
) -> PlanValues | None:
    """Kernels of a program by kind, and the bytes that they read and write on a GPU, or the compiler's estimate of
    seconds on a TPU."""
    found = getattr(program, "kernels", None)
    if not found:
        return None
    if not chip.clock:
        return {
            kind: {"kernels": n, "bytes": size} for kind, (n, size, _) in kernels.sum_kernels_by_kind(found).items()
        }
    return {
        kind: {"kernels": n, "seconds": x / chip.clock}
        for kind, (n, _, x) in kernels.sum_kernels_by_kind(found).items()
    }


def _memory(
    estimate: dict[str, int], program: aot_compile.CompiledStepStats | aot_compile.OutOfMemoryReport | None
) -> dict[str, int]:
    """Bytes by kind. Parameters and moments are those of their shapes; the total is the compiler's, or estimated
    without it; the compiler's temporaries are divided into the activations of the memory model and the rest.
    """
    parts = {kind: estimate[kind] for kind in ("parameters", "moments", "activations")}
    stored = parts["parameters"] + parts["moments"]
    if program is None:
        temporaries = sum(estimate[kind] for kind in ("gradients", "gathered", "casts", "temporaries"))
        return parts | {"temporaries": temporaries, "other": estimate["batch"], "total": sum(estimate.values())}
    if isinstance(program, aot_compile.OutOfMemoryReport):
        return parts | {"total": program.needed_bytes + (0 if program.arguments_counted else stored)}
    activations = min(parts["activations"], program.temporary_bytes)
    return parts | {
        "activations": activations,
        "temporaries": program.temporary_bytes - activations,
        "other": program.total_bytes - program.temporary_bytes - stored,
        "total": program.total_bytes,
    }


def _run(config: Config, topology: Topology, rows: Sequence[PlanValues], price: float | None) -> PlanValues:
    """Hours and cost of all steps."""
    if not all(row["fits"] for row in rows):
        return dict.fromkeys(("hours", "chip_hours", "cost"))
    hours = hours_of(config, [row["step_seconds"] for row in rows])
    chip_hours = hours * topology.chips
    return {"hours": hours, "chip_hours": chip_hours, "cost": None if price is None else chip_hours * price}


def _roofline(topology: Topology) -> PlanValues:
    """The published runs that calibrated the roofline for this kind of chip."""
    runs = RUNS["TPU" if topology.chip.torus_dimensions else "GPU"]
    hardware = list(dict.fromkeys(run.hardware for run in runs))
    own = OWN_RUNS.get(topology.chip.name)
    return {"published_runs": len(runs), "hardware": hardware, "within": ERROR, "own_runs": own}


def hours_of(config: Config, step_seconds: Sequence[float]) -> float:
    """Hours of all steps of a run, from the seconds of a full-batch step in each phase."""
    hours = 0.0
    for phase, seconds in zip(config.phases, step_seconds, strict=True):
        # In a batch ramp, the step time is proportional to the number of rows.
        needed = phase.rows_before(phase.steps) / phase.batch_size * seconds / 3600
        hours += needed if phase.hours is None else min(needed, phase.hours)
    return hours


def _notes(config: Config, topology: Topology, programs: Programs) -> Iterator[str]:
    """Remarks on the figures."""
    yield f"attention: {config.model.attention}"
    copies = 1 + describe(config.optimizer.name).cost.moments
    for one in unsharded_dimensions(programs.abstract_state(len(config.phases) - 1).params):
        yield (
            f"{one.path} is copied, not split: mesh.{one.axis} {programs.mesh.shape[one.axis]} does not divide its "
            f"dimension {one.dimension}, {one.size:,}; {_size(copies * one.bytes)} with its moments on each device"
        )
    if topology.chip.devices_per_chip > 1:
        yield f"a device is one of the {topology.chip.devices_per_chip} cores of a chip and has half of its memory"
    if topology.devices is None:
        yield (
            "the step was lowered for GPUs, not compiled: memory and bytes sent are estimates; the compiler (0.8 GB): "
            f"{install_command('plan-gpu')}"
        )


def to_sections(plan: PlanValues) -> list[Section]:
    """The plan as a report: the phases side by side, the whole run, notes, and the search."""
    axes = ", ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    slices = f" in {plan['slices']} slices" if plan["slices"] > 1 else ""
    run, roofline, table = plan["run"], plan["roofline"], phase_table(map(_phase_values, plan["phases"]))
    if run["hours"] is None:
        summary = "the run does not fit: time and cost are not estimated"
    else:
        cost = "" if run["cost"] is None else f", {run['cost']:,.2f} at the given price"
        summary = (
            f"the whole run: {run['hours']:,.2f} hours on {plan['chips']:,} chips, {run['chip_hours']:,.1f} "
            f"chip-hours{cost} (without evaluation, checkpoints, input and failures; by a roofline fitted to "
            f"{roofline['published_runs']} published runs of other programs on {', '.join(roofline['hardware'])}, all "
            f"within {roofline['within']:.0%}; bert_jax {roofline['own_runs'] or 'was not measured on this chip'})"
        )
    title = f"{plan['name']} on {plan['topology']}: {plan['devices']:,} devices{slices}, mesh {axes}"
    notes = (summary, *(f"note: {note}" for note in plan["notes"]))
    search = [_search_section(plan["search"])] if "search" in plan else []
    return [Section(title, (table, *map(Note, notes)), level=1), *search]


def _phase_values(row: PlanValues) -> dict[str, str]:
    """A row of the plan as text."""
    memory, by = row["memory"], "" if row["compiled"] else ", by estimate"
    short = f"does not fit, by {'at least' if row['compiled'] else 'about'} {_size(row['short_by'])}"
    return {
        "batch": f"{row['batch_size']:,} x {row['seq_len']} tokens",
        "rows x micro-batches": f"{row['rows']} x {row['accumulation']}",
        **{kind: _size(size) for kind, size in memory.items()},
        "fits": f"yes{by}" if row["fits"] else short,
        **{f"exchanged per step: {kind}": _size(size) for kind, size in (row["collectives"] or {}).items()},
        **{f"sent over {axis}{by}": _size(size) for axis, size in (row["sent"] or {}).items() if size},
        **{
            f"kernels: {kind}": f"{total['kernels']:,}, "
            + (_size(total["bytes"]) if "bytes" in total else f"{total['seconds']:.4g} s by the compiler's estimate")
            for kind, total in (row["kernels"] or {}).items()
        },
        "PFLOP per step": f"{row['flops'] / 1e15:.3f}",
        **{f"seconds: {kind}": f"{seconds:.4g}" for kind, seconds in (row["seconds"] or {}).items() if seconds},
        **({} if not row["fits"] else {"seconds per step": f"{row['step_seconds']:.4g}", "MFU": f"{row['mfu']:.1%}"}),
        "bound by": row["bound"] or "",
    }


def _search_section(search: PlanValues) -> Section:
    """The candidates that were compiled, and the next ones by predicted time."""
    blocks: list[Note | Table] = [Note(f"found: {' '.join(search['flags'])}")]
    blocks.append(
        Note(
            f"chosen: the simplest of the settings that are at most {ERROR:.0%} slower than the fastest, which is the "
            "error of the predictions: memory to spare, fewest axes besides data, no tensor axis, least recomputation, "
            "fewest micro-batches"
        )
    )
    blocks += [Note(f"left out: {one}") for one in search["left_out"]]
    columns = {axis: f"{{sizes[{axis}]}}" for axis in ("data", "fsdp", "tensor")}
    columns |= {"accumulation": "{accumulation}", "remat": "{remat}", "s/step": "{step_seconds:.4g}"}
    columns |= {"estimated": lambda one: _size(one["memory"])}
    columns |= {"compiled": lambda one: "" if one["needed"] is None else _size(one["needed"]), "": "{outcome}"}
    for phase, found in search["phases"].items():
        blocks.append(Note(f"phase {phase}: {found['rated']:,} settings rated by the model"))
        blocks.append(make_table(found["shown"], columns))
    return Section("search", tuple(blocks))


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"
