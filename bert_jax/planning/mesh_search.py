"""`bert-jax plan --search`: one mesh and remat policy for the whole run, and a micro-batch for each of its phases."""

import dataclasses
import functools
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from bert_jax.chips import GIB, Sizes
from bert_jax.config import Config, MeshConfig
from bert_jax.errors import UserError
from bert_jax.planning import aot_compile
from bert_jax.planning.memory_model import estimate_memory
from bert_jax.planning.mesh_rating import MAX_COMPILED, Candidate, PhaseSearch, RatedCandidate, search_phase
from bert_jax.planning.topologies import Topology

SHOWN = 8
"""Number of rated candidates in the output."""


class MeshSearchResult(NamedTuple):
    """The recommended setting and the search that led to it."""

    config: Config
    """The config with the best mesh, remat policy and micro-batches."""
    flags: list[str]
    """Flags of the commands for this config."""
    searches: dict[int, PhaseSearch]
    """Searches by phase, in the order in which they ran."""
    programs: dict[tuple[int, int], aot_compile.CompiledStepStats]
    """Compiled steps of the chosen candidates, by phase and micro-batches."""

    def compiled_step(
        self, config: Config, phase: int, mesh: Mesh | AbstractMesh, accumulation: int
    ) -> aot_compile.CompiledStepStats:
        """Replaces `aot_compile.compile_step`: returns the steps that the search compiled."""
        return self.programs[phase, accumulation]


def search_mesh(config: Config, topology: Topology) -> MeshSearchResult:
    """Find the fastest setting by the model that fits; compiles at most `MAX_COMPILED` programs.

    A run has one mesh and one remat policy: both are chosen for the phase with the most tokens; the other phases only
    choose their micro-batches.

    Raises:
      UserError: nothing fits.
    """
    programs: dict[tuple[int, int], aot_compile.CompiledStepStats] = {}
    searches: dict[int, PhaseSearch] = {}
    chosen: list[Candidate] = []
    remaining = MAX_COMPILED
    order = sorted(range(len(config.phases)), key=lambda i: _tokens(config, i), reverse=True)

    def allowed(candidate: Candidate) -> bool:
        return all((candidate.sizes, candidate.remat) == (one.sizes, one.remat) for one in chosen)

    for done, phase in enumerate(order):
        compile = functools.partial(_needed_bytes, config, phase, topology, programs)
        max_compiled = remaining - (len(order) - done - 1)  # at least one for each of the other phases
        devices = topology.count, topology.slices, topology.chip
        result = search_phase(config, phase, *devices, compile, allowed, max_compiled)
        searches[phase] = result
        remaining -= sum(one.outcome in ("chosen", "did not fit") for one in result.rated)
        if result.chosen is None:
            smallest = max((one for one in result.rated if one.reason), key=lambda one: -one.memory, default=None)
            raise UserError(
                f"phases.{phase}: no tried setting fits {topology.name}"
                + (f" ({_name(smallest)}: {smallest.reason})" if smallest else "")
                + ": use more chips, or smaller batches"
            )
        chosen.append(result.chosen.candidate)
    return _result(config, chosen[0], searches, programs)


def _tokens(config: Config, phase: int) -> float:
    """Tokens of a phase: ranks phases before any step time is known."""
    settings = config.phases[phase]
    return settings.rows_before(settings.steps) * settings.seq_len


def _needed_bytes(
    config: Config, phase: int, topology: Topology, programs: dict[tuple[int, int], Any], candidate: Candidate
) -> int:
    """Bytes per device that a candidate's program needs; for GPUs, estimated by the memory model."""
    config = candidate.config(config)
    if topology.devices is None:
        return sum(estimate_memory(config, phase, candidate.sizes, candidate.accumulation).values())
    mesh = topology.mesh(_mesh(candidate.sizes))
    program = aot_compile.compile_step(config, phase, mesh, candidate.accumulation)
    if isinstance(program, aot_compile.OutOfMemoryReport):
        raise UserError(f"the compiler needs at least {program.needed_bytes / GIB:.1f} GiB")
    programs[phase, candidate.accumulation] = program  # the last entry fits: the search stops there
    return program.total_bytes


def _mesh(sizes: Sizes) -> MeshConfig:
    return MeshConfig(sizes.data, sizes.fsdp, sizes.tensor)


def _result(config: Config, chosen: Candidate, searches: dict[int, PhaseSearch], programs: dict) -> MeshSearchResult:
    counts = {phase: result.chosen.candidate.accumulation for phase, result in searches.items() if result.chosen}
    phases = tuple(dataclasses.replace(one, accumulation=counts[i]) for i, one in enumerate(config.phases))
    config = dataclasses.replace(chosen.config(config), mesh=_mesh(chosen.sizes), phases=phases)
    flags = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(config.mesh).items()]
    flags += [f"--model.remat {chosen.remat}"]
    flags += [f"--phases.{i}.accumulation {counts[i]}" for i in sorted(counts)]
    return MeshSearchResult(config, flags, searches, programs)


def format_lines(search: MeshSearchResult) -> list[str]:
    """The search as text: compiled candidates and the next ones by predicted time."""
    out = ["", f"found: {' '.join(search.flags)}", ""]
    for phase, result in search.searches.items():
        tried = sum(one.outcome in ("chosen", "did not fit") for one in result.rated)
        out.append(f"phase {phase}: {len(result.rated):,} settings rated by the model, {tried} tried")
        ruled_out = [one for one in result.rated if one.outcome == "too large"]
        if ruled_out:
            out.append(f"  {len(ruled_out):,} faster settings are too large by estimate")
        shown = [one for one in result.rated if one.outcome != "too large"][:SHOWN]
        out += [f"  {one.step_seconds:>8.4g} s  {_name(one):<62}  {one.outcome}: {one.reason}" for one in shown]
    return out


def _name(one: RatedCandidate) -> str:
    sizes = one.candidate.sizes
    return (
        f"data {sizes.data}, fsdp {sizes.fsdp}, tensor {sizes.tensor}, accumulation {one.candidate.accumulation}, "
        f"remat {one.candidate.remat}"
    )


def to_dict(search: MeshSearchResult) -> dict[str, Any]:
    """The search as plain values; per phase the compiled candidates and the next ones by predicted time."""
    phases = {}
    for phase, result in search.searches.items():
        kept = [one for one in result.rated if one.outcome != "too large"][:SHOWN]
        phases[str(phase)] = {
            "rated": len(result.rated),
            "shown": [one._asdict() | {"candidate": _plain(one.candidate)} for one in kept],
        }
    return {"flags": search.flags, "phases": phases}


def _plain(candidate: Candidate) -> dict[str, Any]:
    return candidate._asdict() | {"sizes": candidate.sizes._asdict()}
