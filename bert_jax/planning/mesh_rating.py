"""Which mesh, micro-batch and remat policy to rent chips for: all are rated by arithmetic, and few are compiled."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from bert_jax.chips import Chip, Sizes
from bert_jax.config import Config
from bert_jax.errors import UserError
from bert_jax.planning.memory_model import estimate
from bert_jax.planning.roofline import Bound, predict
from bert_jax.training.micro_batch import valid_accumulations

MOST_COMPILED = 6
"""Programs that a search compiles at most."""
MARGIN = 0.2
"""A candidate is compiled only if its estimated memory is at most so much above the chip's: that is how far
estimates were off (planning/memory_model.py)."""
STEP_DOWN = 0.9
"""After one that did not fit, only candidates are compiled that need at most so much of its estimate."""

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
Outcome = Literal["chosen", "slower", "too large", "did not fit", "not compiled"]


class Candidate(NamedTuple):
    """One way to train a phase."""

    sizes: Sizes
    accumulation: int
    """Micro-batches per update."""
    remat: Remat

    def config(self, config: Config) -> Config:
        """The config that trains so."""
        return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=self.remat))


class Looked(NamedTuple):
    """What a search found out about a candidate."""

    candidate: Candidate
    memory: int
    """Bytes per device, estimated."""
    step_seconds: float
    """Of an update, predicted."""
    bound: Bound
    """What the update waits for most."""
    outcome: Outcome
    reason: str
    """Of the outcome, in figures."""
    compiled: int | None = None
    """Bytes per device that the compiled program needs."""


class Found(NamedTuple):
    """All that was looked at, fastest first; the chosen one, if any, too."""

    chosen: Looked | None
    looked: list[Looked]


Compile = Callable[[Candidate], int]
"""Bytes per device that a candidate's program needs; UserError if its compiler refuses it."""


def candidates(config: Config, phase: int, devices: int, slices: int) -> Iterator[Candidate]:
    """All meshes whose sizes are powers of two and divide what they split, with all micro-batches and policies.

    Args:
      config: of the run; its batch sizes stay as they are.
      phase: index.
      devices: in all slices together.
      slices: that the data axis spans.
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


def search(
    config: Config,
    phase: int,
    devices: int,
    slices: int,
    chip: Chip,
    compile: Compile,
    allowed: Callable[[Candidate], bool] = lambda candidate: True,
    most: int = MOST_COMPILED,
) -> Found:
    """The fastest candidate by the roofline that compiles and fits.

    Candidates are compiled in the order of their predicted time, those left out whose estimated memory rules them
    out, until one fits or `most` have been compiled.

    Args:
      config, phase: what is trained.
      devices: in all slices together.
      slices: that the data axis spans.
      chip: what they consist of.
      compile: called for the few.
      allowed: which candidates are looked at.
      most: programs to compile.

    Raises:
      UserError: the batch cannot be split over so many devices.
    """
    wanted = filter(allowed, candidates(config, phase, devices, slices))
    rated = sorted(_rate(config, phase, chip, wanted), key=_order)
    if not rated:
        raise UserError(
            f"phases.{phase}.batch_size {config.phases[phase].batch_size} cannot be split over {devices} device(s) in "
            f"{slices} slice(s): change the batch size or the number of devices"
        )
    limit, bound, compiled, chosen, looked = chip.memory, chip.memory * (1 + MARGIN), 0, None, []
    for one in rated:
        if chosen is not None:
            longer = one.step_seconds / chosen.step_seconds - 1
            one = one._replace(outcome="slower", reason=f"by {longer:.1%} than the chosen one")
        elif one.memory > bound:
            reason = f"estimated {one.memory / 2**30:.1f} GiB; tried are at most {bound / 2**30:.1f}"
            one = one._replace(outcome="too large", reason=reason)
        elif compiled == most:
            one = one._replace(outcome="not compiled", reason=f"{most} others were, and none fitted")
        else:
            compiled += 1
            one = _try(one, limit, compile)
            if one.outcome == "chosen":
                chosen = one
            else:
                bound = min(bound, one.memory * STEP_DOWN)
        looked.append(one)
    return Found(chosen, looked)


def _rate(config: Config, phase: int, chip: Chip, wanted: Iterator[Candidate]) -> Iterator[Looked]:
    for candidate in wanted:
        with_remat = candidate.config(config)
        memory = sum(estimate(with_remat, phase, candidate.sizes, candidate.accumulation).values())
        prediction = predict(with_remat, phase, candidate.sizes, candidate.accumulation, chip)
        yield Looked(candidate, memory, prediction.step_seconds, prediction.bound, "not compiled", "")


def _order(one: Looked) -> tuple[float, int]:
    """Fastest first; of equally fast ones that which needs least memory."""
    return one.step_seconds, one.memory


def _try(one: Looked, limit: float, compile: Compile) -> Looked:
    try:
        needed = compile(one.candidate)
    except UserError as error:
        return one._replace(outcome="did not fit", reason=str(error))
    said = f"compiled: {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}"
    return one._replace(outcome="chosen" if needed <= limit else "did not fit", reason=said, compiled=needed)
