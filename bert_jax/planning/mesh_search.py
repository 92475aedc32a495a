"""`bert-jax plan --search`: mesh, remat policy and micro-batches. All candidates are rated by arithmetic, few compiled.

The predictions have an error, so the fastest candidate by prediction need not be the fastest. Of those within this
error of it, the simplest is chosen (`MeshCandidate.complexity`).

A run has one mesh and one remat policy: both are chosen for the phase with the most tokens; the other phases only
choose their micro-batches.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from bert_jax.chips import GIB, Sizes
from bert_jax.config import Config, MeshConfig
from bert_jax.config.sections import KERNEL_ROW_LENGTHS
from bert_jax.errors import UserError, require
from bert_jax.planning.memory_model import estimate_memory
from bert_jax.planning.roofline import ERROR, predict
from bert_jax.planning.topologies import Topology

MAX_TRIED = 6
"""Number of programs after which a search ends if another one does not fit."""
CPU_SECONDS = 150.0
"""A program is compiled only if it ends within these CPU seconds of the search, should it take as long as the longest
one before it. The first is always compiled."""
MARGIN = 0.2
"""A candidate is compiled only if its estimated memory exceeds the chip's by at most this share, the observed error of
the estimates (planning/memory_model.py)."""
RETRY_FACTOR = 0.9
"""After a candidate that did not fit, only candidates with at most this share of its estimate are compiled."""
OTHERS_SHOWN = 7
"""Number of candidates in the output besides those that were compiled: the fastest."""

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
PlanValues = dict[str, Any]
"""A part of a plan that JSON can hold."""
PlanPhase = Callable[[Config, int, Topology, int, bool], PlanValues]
"""Compiles or estimates the step of a phase with a number of micro-batches: its row of the plan
(`run_plan.plan_phase`)."""


class MeshCandidate(NamedTuple):
    """One way to train a phase, with its estimates. Smaller is faster, then needs less memory."""

    step_seconds: float
    memory: int
    """Bytes per device."""
    sizes: Sizes
    accumulation: int
    """Micro-batches per step."""
    remat: Remat

    def complexity(self, available: float) -> tuple[Any, ...]:
        """Smaller is simpler: what fits even by the error of its estimate, then fewer split axes besides data, fsdp
        before tensor, less recomputation, fewer micro-batches; last, the faster.

        Args:
          available: bytes of each device.
        """
        axes = self.sizes.tensor > 1, self.sizes.fsdp > 1
        recomputation = REMATS.index(self.remat)
        return self.memory * (1 + MARGIN) > available, sum(axes), axes, recomputation, self.accumulation, self

    def to_dict(self, row: PlanValues | None, chosen: "MeshCandidate") -> PlanValues:
        """Plain values, with the outcome of the compilation if there was one."""
        if row is None:
            is_tied = self.step_seconds * (1 + ERROR) >= chosen.step_seconds
            outcome = "slower" if self > chosen else "faster within the error" if is_tied else "other mesh"
        else:
            outcome = "chosen" if self == chosen else "fits" if row["fits"] else "does not fit"
        needed = row["memory"]["total"] if row and row["compiled"] else None
        return self._asdict() | {"sizes": self.sizes._asdict(), "needed": needed, "outcome": outcome}


def config_on(config: Config, sizes: Sizes, remat: Remat) -> Config:
    """The config with this mesh and remat policy."""
    model = dataclasses.replace(config.model, remat=remat)
    return dataclasses.replace(config, mesh=MeshConfig(sizes.data, sizes.fsdp, sizes.tensor), model=model)


def search_mesh(
    config: Config, topology: Topology, plan_phase: PlanPhase, clock: Callable[[], float] = time.process_time
) -> tuple[Config, list[PlanValues], PlanValues]:
    """Find the simplest setting that fits, of those that are as fast as the fastest within the error of predictions.

    The chosen programs are compiled, that of the phase with the largest estimate first. After one that does not fit,
    the search chooses again among smaller ones, unless `MAX_TRIED` were tried. Programs are compiled for about
    `CPU_SECONDS`; the others are estimated.

    Args:
      config: of the run.
      topology: target devices.
      plan_phase: compiles or estimates a phase.
      clock: CPU seconds of this process.

    Returns:
      the config with the chosen mesh, remat policy and micro-batches; the plan's row of each phase; and the search as
      plain values: the `flags` of the commands for this config, the candidates of `phases`, and what was `left_out`.

    Raises:
      UserError: nothing fits, or a batch cannot be split over the devices.
    """
    rated = [sorted(candidates(config, i, topology)) for i in range(len(config.phases))]
    for i, phase in enumerate(config.phases):
        require(
            bool(rated[i]),
            f"phases.{i}.batch_size {phase.batch_size} cannot be split over {topology.count} device(s) in "
            f"{topology.slices} slice(s): change the batch size or the number of devices",
        )
    # Without a compiler, the estimate itself decides whether a candidate fits.
    limits = [topology.chip.memory * (1 if topology.devices is None else 1 + MARGIN)] * len(rated)
    tried: list[dict[MeshCandidate, PlanValues]] = [{} for _ in rated]
    started, longest = clock(), 0.0
    chosen = choose(config, topology, rated, limits)
    while waiting := [i for i, one in enumerate(chosen) if one not in tried[i]]:
        i = max(waiting, key=lambda i: chosen[i].memory)
        one, before = chosen[i], clock()
        only_estimate = before - started + longest > CPU_SECONDS
        row = plan_phase(config_on(config, one.sizes, one.remat), i, topology, one.accumulation, only_estimate)
        tried[i][one] = row
        longest = max(longest, clock() - before)
        if not row["fits"]:
            limits[i] = 0 if sum(map(len, tried)) >= MAX_TRIED else min(limits[i], one.memory * RETRY_FACTOR)
            chosen = choose(config, topology, rated, limits)
    rows = [programs[one] for one, programs in zip(chosen, tried, strict=True)]
    return _with_settings(config, chosen), rows, _to_dict(config, topology, rated, limits, tried, chosen)


def choose(
    config: Config, topology: Topology, rated: Sequence[list[MeshCandidate]], limits: Sequence[float]
) -> list[MeshCandidate]:
    """The candidate of each phase: one mesh and remat policy, chosen for the phase with the most tokens.

    Args:
      config: of the run.
      topology: target devices.
      rated: all candidates of each phase.
      limits: largest estimated memory of a candidate, by phase.

    Raises:
      UserError: nothing fits.
    """
    fitting = [[one for one in ones if one.memory <= limit] for ones, limit in zip(rated, limits, strict=True)]
    shared = set.intersection(*({(one.sizes, one.remat) for one in ones} for ones in fitting))
    if not shared:
        i = next((i for i, ones in enumerate(fitting) if not ones), 0)
        smallest = min(one.memory for one in rated[i]) / GIB
        raise UserError(
            f"phases.{i}: no tried setting fits {topology.name} (the smallest needs {smallest:.1f} of "
            f"{topology.chip.memory / GIB:.1f} GiB by estimate): use more chips, or smaller batches"
        )

    def simplest(i: int) -> MeshCandidate:
        ones = [one for one in fitting[i] if (one.sizes, one.remat) in shared]
        slowest = min(ones).step_seconds * (1 + ERROR)
        as_fast = (one for one in ones if one.step_seconds <= slowest)
        return min(as_fast, key=lambda one: one.complexity(topology.chip.memory))

    tokens = [phase.rows_before(phase.steps) * phase.seq_len for phase in config.phases]
    first = simplest(tokens.index(max(tokens)))
    shared = {(first.sizes, first.remat)}
    return [simplest(i) for i in range(len(rated))]


def _with_settings(config: Config, chosen: Sequence[MeshCandidate]) -> Config:
    """The config with the mesh, remat policy and micro-batches of the chosen candidates."""
    counts = (one.accumulation for one in chosen)
    phases = tuple(dataclasses.replace(one, accumulation=n) for one, n in zip(config.phases, counts, strict=True))
    return dataclasses.replace(config_on(config, chosen[0].sizes, chosen[0].remat), phases=phases)


def _to_dict(
    config: Config,
    topology: Topology,
    rated: Sequence[list[MeshCandidate]],
    limits: Sequence[float],
    tried: Sequence[dict[MeshCandidate, PlanValues]],
    chosen: Sequence[MeshCandidate],
) -> PlanValues:
    """The search as plain values."""
    found = _with_settings(config, chosen)
    flags = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(found.mesh).items()]
    flags += [f"--model.attention {config.model.attention}", f"--model.remat {chosen[0].remat}"]
    flags += [f"--phases.{i}.accumulation {one.accumulation}" for i, one in enumerate(chosen)]
    phases, left_out = {}, []
    for i, (ones, programs, best) in enumerate(zip(rated, tried, chosen, strict=True)):
        others = [one for one in ones if one not in programs and one.memory <= limits[i]]
        shown = [*sorted(programs, reverse=True, key=lambda one: one.memory), *others[:OTHERS_SHOWN]]
        phases[str(i)] = {"rated": len(ones), "shown": [one.to_dict(programs.get(one), best) for one in shown]}
        if topology.devices is not None and not programs[best]["compiled"]:
            left_out.append(
                f"phases.{i} was not compiled, because the search may use {CPU_SECONDS:.0f} CPU seconds: its figures "
                "are estimates; `bert-jax plan` with these flags instead of --search compiles it"
            )
    return {"flags": flags, "phases": phases, "left_out": left_out}


def candidates(config: Config, phase: int, topology: Topology) -> Iterator[MeshCandidate]:
    """All meshes whose sizes are powers of two and divide what they split, with all micro-batches and policies.

    Args:
      config: of the run; its batch sizes are not changed.
      phase: index.
      topology: target devices.
    """
    model, count, slices = config.model_of(phase), topology.count, topology.slices
    powers = [2**i for i in range((count // slices).bit_length())]
    for tensor, fsdp in itertools.product(powers, powers):
        data, left = divmod(count, tensor * fsdp)
        if left or not data or data % slices or model.num_heads % tensor or model.intermediate_size % tensor:
            continue
        if data * fsdp % topology.hosts or tensor > count // topology.hosts:  # `check_processes`
            continue
        if tensor > 1 and model.attention in KERNEL_ROW_LENGTHS:  # `check_devices`
            continue
        sizes = Sizes(data, fsdp, tensor, slices)
        for remat in REMATS:
            on_mesh = config_on(config, sizes, remat)
            for n in config.phases[phase].valid_accumulations(sizes.row_shards):
                setting = on_mesh, phase, sizes, n
                memory = sum(estimate_memory(*setting).values())
                yield MeshCandidate(predict(*setting, topology.chip).step_seconds, memory, sizes, n, remat)
