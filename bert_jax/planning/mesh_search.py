"""`bert-jax plan --search`: one mesh and remat policy for the whole run, and a micro-batch for each of its phases."""

import dataclasses
import functools
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from bert_jax.chips import GIB, Sizes
from bert_jax.config import Config, MeshConfig
from bert_jax.errors import UserError
from bert_jax.planning import aot_compile
from bert_jax.planning.memory_model import estimate
from bert_jax.planning.mesh_rating import MOST_COMPILED, Candidate, Found, Looked, search
from bert_jax.planning.topologies import Topology

SHOWN = 8
"""Of the candidates that were looked at, for a person."""


class Proposal(NamedTuple):
    """What a search recommends."""

    config: Config
    """With the mesh, remat policy and micro-batches that it found."""
    flags: list[str]
    """Of the commands, that make them."""
    searches: dict[int, Found]
    """What was looked at, by phase, in the order of the search."""
    programs: dict[tuple[int, int], aot_compile.Program]
    """Of what was chosen, by phase and micro-batches."""

    def compiled(self, config: Config, phase: int, mesh: Mesh | AbstractMesh, accumulation: int) -> aot_compile.Program:
        """As `ahead.compile_step`, of what the search has compiled."""
        return self.programs[phase, accumulation]


def propose(config: Config, topology: Topology) -> Proposal:
    """The setting that fits and is fastest by the model; at most `MOST_COMPILED` programs are compiled for it.

    A run has one mesh and one policy: they are chosen for the phase that takes longest, and the others' micro-batches
    for what was chosen.

    Raises:
      UserError: nothing fits.
    """
    programs: dict[tuple[int, int], aot_compile.Program] = {}
    searches: dict[int, Found] = {}
    chosen: list[Candidate] = []
    left = MOST_COMPILED
    order = sorted(range(len(config.phases)), key=lambda i: _work(config, i), reverse=True)

    def allowed(candidate: Candidate) -> bool:
        return all((candidate.sizes, candidate.remat) == (one.sizes, one.remat) for one in chosen)

    for done, phase in enumerate(order):
        compiled = functools.partial(_needed, config, phase, topology, programs)
        most = left - (len(order) - done - 1)  # one at least for each of the others
        found = search(config, phase, topology.count, topology.slices, topology.chip, compiled, allowed, most)
        searches[phase] = found
        left -= sum(one.outcome in ("chosen", "did not fit") for one in found.looked)
        if found.chosen is None:
            tried = max((one for one in found.looked if one.reason), key=lambda one: -one.memory, default=None)
            raise UserError(
                f"phases.{phase}: nothing that was tried fits {topology.name}"
                + (f" ({_name(tried)}: {tried.reason})" if tried else "")
                + ": take more chips, or smaller batches"
            )
        chosen.append(found.chosen.candidate)
    return _proposal(config, chosen[0], searches, programs)


def _work(config: Config, phase: int) -> float:
    """Tokens of a phase, by which phases are told apart before any step time is known."""
    settings = config.phases[phase]
    return settings.rows_before(settings.steps) * settings.seq_len


def _needed(
    config: Config, phase: int, topology: Topology, programs: dict[tuple[int, int], Any], candidate: Candidate
) -> int:
    """Bytes per device that a candidate's program needs; for GPUs, by the model."""
    config = candidate.config(config)
    if topology.devices is None:
        return sum(estimate(config, phase, candidate.sizes, candidate.accumulation).values())
    mesh = topology.mesh(_mesh(candidate.sizes))
    program = aot_compile.compile_step(config, phase, mesh, candidate.accumulation)
    if isinstance(program, aot_compile.Refusal):
        raise UserError(f"its compiler needs at least {program.needed / GIB:.1f} GiB")
    programs[phase, candidate.accumulation] = program  # the last one fits: the search ends with it
    return program.total


def _mesh(sizes: Sizes) -> MeshConfig:
    return MeshConfig(sizes.data, sizes.fsdp, sizes.tensor)


def _proposal(config: Config, chosen: Candidate, searches: dict[int, Found], programs: dict) -> Proposal:
    counts = {phase: found.chosen.candidate.accumulation for phase, found in searches.items() if found.chosen}
    phases = tuple(dataclasses.replace(one, accumulation=counts[i]) for i, one in enumerate(config.phases))
    config = dataclasses.replace(chosen.config(config), mesh=_mesh(chosen.sizes), phases=phases)
    flags = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(config.mesh).items()]
    flags += [f"--model.remat {chosen.remat}"]
    flags += [f"--phases.{i}.accumulation {counts[i]}" for i in sorted(counts)]
    return Proposal(config, flags, searches, programs)


def lines(proposal: Proposal) -> list[str]:
    """What was looked at, for a person: what was compiled, and what comes behind it."""
    out = ["", f"found: {' '.join(proposal.flags)}", ""]
    for phase, found in proposal.searches.items():
        tried = sum(one.outcome in ("chosen", "did not fit") for one in found.looked)
        out.append(f"phase {phase}: {len(found.looked):,} settings rated by the model, {tried} tried")
        ruled_out = [one for one in found.looked if one.outcome == "too large"]
        if ruled_out:
            out.append(f"  {len(ruled_out):,} would be faster and are too large by estimate")
        shown = [one for one in found.looked if one.outcome != "too large"][:SHOWN]
        out += [f"  {one.step_seconds:>8.4g} s  {_name(one):<62}  {one.outcome}: {one.reason}" for one in shown]
    return out


def _name(one: Looked) -> str:
    sizes = one.candidate.sizes
    return (
        f"data {sizes.data}, fsdp {sizes.fsdp}, tensor {sizes.tensor}, accumulation {one.candidate.accumulation}, "
        f"remat {one.candidate.remat}"
    )


def values(proposal: Proposal) -> dict[str, Any]:
    """The same as plain values; of each phase, what was compiled and the fastest that were slower."""
    phases = {}
    for phase, found in proposal.searches.items():
        kept = [one for one in found.looked if one.outcome != "too large"][:SHOWN]
        phases[str(phase)] = {
            "looked": len(found.looked),
            "shown": [one._asdict() | {"candidate": _plain(one.candidate)} for one in kept],
        }
    return {"flags": proposal.flags, "phases": phases}


def _plain(candidate: Candidate) -> dict[str, Any]:
    return candidate._asdict() | {"sizes": candidate.sizes._asdict()}
