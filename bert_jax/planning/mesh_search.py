"""`bert-jax plan --search`: mesh, remat policy and micro-batches. All candidates are rated by arithmetic, few compiled.

A run has one mesh and one remat policy: both are chosen for the phase with the most tokens; the other phases only
choose their micro-batches.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from bert_jax.chips import GIB, Sizes
from bert_jax.config import Config, MeshConfig
from bert_jax.config.sections import KERNEL_ROW_LENGTHS
from bert_jax.errors import UserError, require
from bert_jax.planning.memory_model import estimate_memory
from bert_jax.planning.roofline import predict
from bert_jax.planning.topologies import Topology

MAX_COMPILED = 6
"""Maximum number of programs that a search compiles."""
MARGIN = 0.2
"""A candidate is compiled only if its estimated memory exceeds the chip's by at most this share, the observed error of
the estimates (planning/memory_model.py)."""
RETRY_FACTOR = 0.9
"""After a candidate that did not fit, only candidates with at most this share of its estimate are compiled."""
SLOWER_SHOWN = 7
"""Number of candidates in the output that are slower than the chosen one."""

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
Values = dict[str, Any]
PlanPhase = Callable[[Config, int, Topology, int], Values]
"""Compiles the step of a phase with a number of micro-batches: its row of the plan (`run_plan.plan_phase`)."""


class Candidate(NamedTuple):
    """One way to train a phase, with its estimates. The fastest is the smallest, and of these the one with the least
    memory."""

    step_seconds: float
    memory: int
    """Bytes per device."""
    sizes: Sizes
    accumulation: int
    """Micro-batches per step."""
    remat: Remat

    def to_dict(self, row: Values | None) -> Values:
        """Plain values, with the outcome of the compilation if there was one."""
        outcome = "slower" if row is None else "chosen" if row["fits"] else "does not fit"
        needed = row["memory"]["total"] if row and row["compiled"] else None
        return self._asdict() | {"sizes": self.sizes._asdict(), "needed": needed, "outcome": outcome}


def config_on(config: Config, sizes: Sizes, remat: Remat) -> Config:
    """The config with this mesh and remat policy."""
    model = dataclasses.replace(config.model, remat=remat)
    return dataclasses.replace(config, mesh=MeshConfig(sizes.data, sizes.fsdp, sizes.tensor), model=model)


def search_mesh(config: Config, topology: Topology, plan_phase: PlanPhase) -> tuple[Config, list[Values], Values]:
    """Find the fastest setting by the model that fits; compiles at most `MAX_COMPILED` programs.

    Candidates are compiled in the order of their predicted time, except those whose estimated memory is too large,
    until one fits.

    Returns:
      the config with the best mesh, remat policy and micro-batches; the plan's row of each phase; and the search as
      plain values: the `flags` of the commands for this config, and the candidates of `phases`.

    Raises:
      UserError: nothing fits, or a batch cannot be split over the devices.
    """
    tokens = [phase.rows_before(phase.steps) * phase.seq_len for phase in config.phases]
    order = sorted(range(len(tokens)), key=lambda i: tokens[i], reverse=True)
    rows: dict[int, Values] = {}
    searches: dict[str, Values] = {}
    best: Candidate | None = None
    left = MAX_COMPILED
    for phase in order:
        rated = sorted(candidates(config, phase, topology))
        if best is not None:
            rated = [one for one in rated if (one.sizes, one.remat) == (best.sizes, best.remat)]
        require(
            bool(rated),
            f"phases.{phase}.batch_size {config.phases[phase].batch_size} cannot be split over {topology.count} "
            f"device(s) in {topology.slices} slice(s): change the batch size or the number of devices",
        )
        waiting = len(order) - len(rows) - 1  # one program is left for each of them
        tried = compile_until_one_fits(config, phase, topology, rated, plan_phase, left - waiting)
        left -= len(tried)
        if not tried or not tried[-1][1]["fits"]:
            smallest = min(one.memory for one in rated) / GIB
            raise UserError(
                f"phases.{phase}: no tried setting fits {topology.name} (the smallest needs {smallest:.1f} of "
                f"{topology.chip.memory / GIB:.1f} GiB by estimate): use more chips, or smaller batches"
            )
        chosen, rows[phase] = tried[-1]
        best = best or chosen
        slower = rated[rated.index(chosen) + 1 :][:SLOWER_SHOWN]
        shown = [one.to_dict(row) for one, row in [*tried, *((one, None) for one in slower)]]
        searches[str(phase)] = {"rated": len(rated), "shown": shown}
    assert best is not None
    counts = [rows[i]["accumulation"] for i in range(len(order))]
    phases = tuple(dataclasses.replace(one, accumulation=n) for one, n in zip(config.phases, counts, strict=True))
    found = dataclasses.replace(config_on(config, best.sizes, best.remat), phases=phases)
    flags = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(found.mesh).items()]
    flags += [f"--model.attention {config.model.attention}"]
    flags += [f"--model.remat {best.remat}", *(f"--phases.{i}.accumulation {n}" for i, n in enumerate(counts))]
    return found, [rows[i] for i in range(len(order))], {"flags": flags, "phases": searches}


def compile_until_one_fits(
    config: Config, phase: int, topology: Topology, rated: list[Candidate], plan_phase: PlanPhase, most: int
) -> list[tuple[Candidate, Values]]:
    """Compile at most `most` of the rated candidates in their order, but none that is too large by estimate.

    Returns:
      those that were compiled, with their rows of the plan; only the last can fit.
    """
    # For GPUs, the estimate itself decides whether a candidate fits.
    limit = topology.chip.memory * (1 if topology.devices is None else 1 + MARGIN)
    tried: list[tuple[Candidate, Values]] = []
    for one in rated:
        if one.memory > limit:
            continue
        row = plan_phase(config_on(config, one.sizes, one.remat), phase, topology, one.accumulation)
        tried.append((one, row))
        if row["fits"] or len(tried) >= most:
            break
        limit = min(limit, one.memory * RETRY_FACTOR)
    return tried


def candidates(config: Config, phase: int, topology: Topology) -> Iterator[Candidate]:
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
        for n, remat in itertools.product(config.phases[phase].valid_accumulations(sizes.row_shards), REMATS):
            setting = config_on(config, sizes, remat), phase, sizes, n
            memory = sum(estimate_memory(*setting).values())
            yield Candidate(predict(*setting, topology.chip).step_seconds, memory, sizes, n, remat)
