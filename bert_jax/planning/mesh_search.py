"""`bert-jax plan --search`: mesh, remat policy and micro-batches. All candidates are rated by arithmetic, few compiled.

A run has one mesh and one remat policy: both are chosen for the phase with the most tokens; the other phases only
choose their micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from bert_jax.chips import GIB, Chip, Sizes
from bert_jax.config import Config, MeshConfig
from bert_jax.errors import UserError
from bert_jax.planning import aot_compile
from bert_jax.planning.memory_model import estimate_memory
from bert_jax.planning.roofline import Bound, predict
from bert_jax.planning.topologies import Topology
from bert_jax.training.micro_batch import valid_accumulations

MAX_COMPILED = 6
"""Maximum number of programs that a search compiles."""
MARGIN = 0.2
"""A candidate is compiled only if its estimated memory exceeds the chip's by at most this share, the observed error of
the estimates (planning/memory_model.py)."""
RETRY_FACTOR = 0.9
"""After a candidate that did not fit, only candidates with at most this share of its estimate are compiled."""
SHOWN = 8
"""Number of rated candidates in the output."""

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
Outcome = Literal["chosen", "slower", "too large", "did not fit", "not compiled"]


class Candidate(NamedTuple):
    """One way to train a phase."""

    sizes: Sizes
    accumulation: int
    """Micro-batches per step."""
    remat: Remat

    def config(self, config: Config) -> Config:
        """The config with this candidate's remat policy."""
        return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=self.remat))


class RatedCandidate(NamedTuple):
    """A candidate with its estimates and the outcome of the search."""

    candidate: Candidate
    memory: int
    """Bytes per device, estimated."""
    step_seconds: float
    """Predicted seconds of a step."""
    bound: Bound
    """Main bottleneck of the step."""
    outcome: Outcome = "not compiled"
    reason: str = ""
    """Reason of the outcome, with figures."""
    compiled: int | None = None
    """Bytes per device that the compiled program needs."""

    def __str__(self) -> str:
        candidate, sizes = self.candidate, self.candidate.sizes
        mesh = f"data {sizes.data}, fsdp {sizes.fsdp}, tensor {sizes.tensor}"
        return f"{mesh}, accumulation {candidate.accumulation}, remat {candidate.remat}"


class PhaseSearch(NamedTuple):
    """Result of a search for one phase: the chosen candidate, and all rated ones, fastest first."""

    chosen: RatedCandidate | None
    rated: list[RatedCandidate]

    @property
    def tried(self) -> int:
        """Number of candidates that were compiled."""
        return sum(one.outcome in ("chosen", "did not fit") for one in self.rated)

    @property
    def shown(self) -> list[RatedCandidate]:
        """Compiled candidates and the next ones by predicted time."""
        return [one for one in self.rated if one.outcome != "too large"][:SHOWN]


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

    Raises:
      UserError: nothing fits.
    """
    programs: dict[tuple[int, int], aot_compile.CompiledStepStats] = {}
    searches: dict[int, PhaseSearch] = {}
    first: Candidate | None = None
    remaining = MAX_COMPILED
    tokens = [phase.rows_before(phase.steps) * phase.seq_len for phase in config.phases]
    order = sorted(range(len(tokens)), key=lambda i: tokens[i], reverse=True)

    def allowed(candidate: Candidate) -> bool:
        return first is None or (candidate.sizes, candidate.remat) == (first.sizes, first.remat)

    for done, phase in enumerate(order):
        compile = functools.partial(_needed_bytes, config, phase, topology, programs)
        max_compiled = remaining - (len(order) - done - 1)  # at least one for each of the other phases
        devices = topology.count, topology.slices, topology.chip
        result = searches[phase] = search_phase(config, phase, *devices, compile, allowed, max_compiled)
        remaining -= result.tried
        if result.chosen is None:
            smallest = min((one for one in result.rated if one.reason), key=lambda one: one.memory, default=None)
            tried = f" ({smallest}: {smallest.reason})" if smallest else ""
            raise UserError(
                f"phases.{phase}: no tried setting fits {topology.name}{tried}: use more chips, or smaller batches"
            )
        first = first or result.chosen.candidate
    assert first is not None
    counts = [searches[i].chosen.candidate.accumulation for i in range(len(order))]
    mesh = _mesh(first.sizes)
    phases = tuple(dataclasses.replace(one, accumulation=n) for one, n in zip(config.phases, counts, strict=True))
    flags = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(mesh).items()]
    flags += [f"--model.remat {first.remat}", *(f"--phases.{i}.accumulation {n}" for i, n in enumerate(counts))]
    found = dataclasses.replace(first.config(config), mesh=mesh, phases=phases)
    return MeshSearchResult(found, flags, searches, programs)


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


def search_phase(
    config: Config,
    phase: int,
    devices: int,
    slices: int,
    chip: Chip,
    compile: Callable[[Candidate], int],
    allowed: Callable[[Candidate], bool] = lambda candidate: True,
    max_compiled: int = MAX_COMPILED,
) -> PhaseSearch:
    """Find the fastest candidate by the roofline that compiles and fits.

    Candidates are compiled in the order of their predicted time, except those whose estimated memory is too large,
    until one fits or `max_compiled` programs were compiled.

    Args:
      config, phase: phase to search for.
      devices: number in all slices together.
      slices: number of slices that the data axis spans.
      chip: kind of the devices.
      compile: returns the bytes per device that a candidate's program needs; UserError if the compiler refuses it.
      allowed: filter of the candidates.
      max_compiled: maximum number of programs to compile.

    Raises:
      UserError: the batch cannot be split over the devices.
    """
    wanted = filter(allowed, candidates(config, phase, devices, slices))
    # Of equally fast candidates, the one with the least memory is first.
    rated = sorted((_rate(config, phase, chip, one) for one in wanted), key=lambda one: (one.step_seconds, one.memory))
    if not rated:
        raise UserError(
            f"phases.{phase}.batch_size {config.phases[phase].batch_size} cannot be split over {devices} device(s) in "
            f"{slices} slice(s): change the batch size or the number of devices"
        )
    bound, compiled, chosen, results = chip.memory * (1 + MARGIN), 0, None, []
    for one in rated:
        if chosen is not None:
            longer = one.step_seconds / chosen.step_seconds - 1
            one = one._replace(outcome="slower", reason=f"by {longer:.1%} than the chosen candidate")
        elif one.memory > bound:
            reason = f"estimated {one.memory / GIB:.1f} GiB, more than {bound / GIB:.1f} GiB"
            one = one._replace(outcome="too large", reason=reason)
        elif compiled == max_compiled:
            one = one._replace(reason=f"{max_compiled} others were compiled, and none fitted")
        else:
            compiled += 1
            one = _try(one, chip.memory, compile)
            if one.outcome == "chosen":
                chosen = one
            else:
                bound = min(bound, one.memory * RETRY_FACTOR)
        results.append(one)
    return PhaseSearch(chosen, results)


def candidates(config: Config, phase: int, devices: int, slices: int) -> Iterator[Candidate]:
    """All meshes whose sizes are powers of two and divide what they split, with all micro-batches and policies.

    Args:
      config: of the run; its batch sizes are not changed.
      phase: index.
      devices: number in all slices together.
      slices: number of slices that the data axis spans.
    """
    model = config.model_of(phase)
    for tensor in _powers_of_two(devices // slices):
        if model.num_heads % tensor or model.intermediate_size % tensor:
            continue
        for fsdp in _powers_of_two(devices // slices // tensor):
            data, left = divmod(devices, tensor * fsdp)
            if left or data % slices:
                continue
            for accumulation in valid_accumulations(config.phases[phase], data * fsdp):
                for remat in REMATS:
                    yield Candidate(Sizes(data, fsdp, tensor, slices), accumulation, remat)


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(max(1, most).bit_length())]


def _rate(config: Config, phase: int, chip: Chip, candidate: Candidate) -> RatedCandidate:
    setting = candidate.config(config), phase, candidate.sizes, candidate.accumulation
    prediction = predict(*setting, chip)
    return RatedCandidate(candidate, sum(estimate_memory(*setting).values()), prediction.step_seconds, prediction.bound)


def _try(one: RatedCandidate, limit: float, compile: Callable[[Candidate], int]) -> RatedCandidate:
    try:
        needed = compile(one.candidate)
    except UserError as error:
        return one._replace(outcome="did not fit", reason=str(error))
    reason = f"compiled: {needed / GIB:.1f} GiB of {limit / GIB:.1f}"
    return one._replace(outcome="chosen" if needed <= limit else "did not fit", reason=reason, compiled=needed)


def format_lines(search: MeshSearchResult) -> list[str]:
    """The search as text: compiled candidates and the next ones by predicted time."""
    out = ["", f"found: {' '.join(search.flags)}", ""]
    for phase, result in search.searches.items():
        out.append(f"phase {phase}: {len(result.rated):,} settings rated by the model, {result.tried} tried")
        ruled_out = sum(one.outcome == "too large" for one in result.rated)
        if ruled_out:
            out.append(f"  {ruled_out:,} faster settings are too large by estimate")
        out += [f"  {one.step_seconds:>8.4g} s  {one!s:<62}  {one.outcome}: {one.reason}" for one in result.shown]
    return out


def to_dict(search: MeshSearchResult) -> dict[str, Any]:
    """The search as plain values; per phase the compiled candidates and the next ones by predicted time."""

    def plain(one: RatedCandidate) -> dict[str, Any]:
        return one._asdict() | {"candidate": one.candidate._asdict() | {"sizes": one.candidate.sizes._asdict()}}

    phases = {
        str(phase): {"rated": len(result.rated), "shown": list(map(plain, result.shown))}
        for phase, result in search.searches.items()
    }
    return {"flags": search.flags, "phases": phases}
