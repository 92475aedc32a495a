"""Search of mesh, micro-batch and remat policy for a phase: all candidates are rated by arithmetic, few compiled."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from bert_jax.chips import Chip, Sizes
from bert_jax.config import Config
from bert_jax.errors import UserError
from bert_jax.planning.memory_model import estimate_memory
from bert_jax.planning.roofline import Bound, predict
from bert_jax.training.micro_batch import valid_accumulations

MAX_COMPILED = 6
"""Maximum number of programs that a search compiles."""
MARGIN = 0.2
"""A candidate is compiled only if its estimated memory exceeds the chip's by at most this share, the observed error of
the estimates (planning/memory_model.py)."""
RETRY_FACTOR = 0.9
"""After a candidate that did not fit, only candidates with at most this share of its estimate are compiled."""

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
    outcome: Outcome
    reason: str
    """Reason of the outcome, with figures."""
    compiled: int | None = None
    """Bytes per device that the compiled program needs."""


class PhaseSearch(NamedTuple):
    """Result of a search for one phase: the chosen candidate, and all rated ones, fastest first."""

    chosen: RatedCandidate | None
    rated: list[RatedCandidate]


Compile = Callable[[Candidate], int]
"""Returns the bytes per device that a candidate's program needs; UserError if the compiler refuses it."""


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


def search_phase(
    config: Config,
    phase: int,
    devices: int,
    slices: int,
    chip: Chip,
    compile: Compile,
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
      compile: compiles a candidate.
      allowed: filter of the candidates.
      max_compiled: maximum number of programs to compile.

    Raises:
      UserError: the batch cannot be split over the devices.
    """
    wanted = filter(allowed, candidates(config, phase, devices, slices))
    rated = sorted(_rate(config, phase, chip, wanted), key=_order)
    if not rated:
        raise UserError(
            f"phases.{phase}.batch_size {config.phases[phase].batch_size} cannot be split over {devices} device(s) in "
            f"{slices} slice(s): change the batch size or the number of devices"
        )
    limit, bound, compiled, chosen, results = chip.memory, chip.memory * (1 + MARGIN), 0, None, []
    for one in rated:
        if chosen is not None:
            longer = one.step_seconds / chosen.step_seconds - 1
            one = one._replace(outcome="slower", reason=f"by {longer:.1%} than the chosen candidate")
        elif one.memory > bound:
            reason = f"estimated {one.memory / 2**30:.1f} GiB, more than {bound / 2**30:.1f} GiB"
            one = one._replace(outcome="too large", reason=reason)
        elif compiled == max_compiled:
            reason = f"{max_compiled} others were compiled, and none fitted"
            one = one._replace(outcome="not compiled", reason=reason)
        else:
            compiled += 1
            one = _try(one, limit, compile)
            if one.outcome == "chosen":
                chosen = one
            else:
                bound = min(bound, one.memory * RETRY_FACTOR)
        results.append(one)
    return PhaseSearch(chosen, results)


def _rate(config: Config, phase: int, chip: Chip, wanted: Iterator[Candidate]) -> Iterator[RatedCandidate]:
    for candidate in wanted:
        with_remat = candidate.config(config)
        memory = sum(estimate_memory(with_remat, phase, candidate.sizes, candidate.accumulation).values())
        prediction = predict(with_remat, phase, candidate.sizes, candidate.accumulation, chip)
        yield RatedCandidate(candidate, memory, prediction.step_seconds, prediction.bound, "not compiled", "")


def _order(one: RatedCandidate) -> tuple[float, int]:
    """Fastest first; of equally fast candidates, the one with the least memory."""
    return one.step_seconds, one.memory


def _try(one: RatedCandidate, limit: float, compile: Compile) -> RatedCandidate:
    try:
        needed = compile(one.candidate)
    except UserError as error:
        return one._replace(outcome="did not fit", reason=str(error))
    reason = f"compiled: {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}"
    return one._replace(outcome="chosen" if needed <= limit else "did not fit", reason=reason, compiled=needed)
