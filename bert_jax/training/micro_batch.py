"""How many micro-batches an update is cut into: the config's number, the command's, or the fewest that fit into memory.

It changes no result but rounding (promise 1), so it is not among the settings that identify a run. What was found for
the memory at hand is in the ledger.
"""

import math
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.config import Config, Phase
from bert_jax.distributed.agreement import all_gather
from bert_jax.errors import UserError
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.sharding import DATA_AXES

EVENT = "micro_batch"
FILLED = 0.9
"""Of the memory at hand; the rest is left to fragmentation and to batches that are on their way."""
FIRST_TOKENS = 65_536
"""On each device: what the first program that is tried computes at a time, or less."""
PHASE_FIELDS = ("batch_size", "start_batch_size", "seq_len", "num_layers", "max_predictions")
"""Fields of a phase that its number of micro-batches depends on. They may change until the phase begins."""

Asked = int | Literal["auto"] | None
"""Rows of a micro-batch on each device; found for the memory at hand, the host's too; or as `Phase.accumulation`."""


def accumulations(phase: Phase, shards: int) -> list[int]:
    """All numbers of micro-batches that cut a phase's batches into whole rows for every device, fewest first."""
    smallest = phase.batch_size_at(0)
    return [n for n in range(1, phase.batch_size // shards + 1) if _cuts(phase, smallest, shards, n)]


def _cuts(phase: Phase, smallest: int, shards: int, count: int) -> bool:
    rows, left = divmod(phase.batch_size, count)
    return not left and rows % shards == 0 and smallest % rows == 0


def given(phase: Phase, index: int, mesh: Mesh | AbstractMesh, asked: Asked) -> int | None:
    """Micro-batches of a phase, as the command or the config gives them; None if neither does.

    Args:
      phase, index: of the run.
      mesh: where.
      asked: rows on each device, if a number.

    Raises:
      UserError: this number of rows does not cut its batches into equal parts.
    """
    if asked is None:
        return phase.accumulation
    return None if asked == "auto" else _asked_for(phase, index, mesh, asked)


def check_fits(index: int, mesh: Mesh, count: int, needed: float) -> None:
    """See that an update that was not fitted to the memory does not need more than each device has.

    Args:
      index: of the phase.
      mesh: where.
      count: its micro-batches.
      needed: bytes on each device; infinite if its compiler refused it.

    Raises:
      UserError: it needs more. Devices that do not report their memory have enough for what was compiled.
    """
    here = device_memory(mesh.local_devices[0])
    available = min(all_gather("the memory at hand", math.inf if here is None else here))
    needed = max(all_gather("what a program needs", needed))
    if needed <= available and needed < math.inf:
        return
    figures = "" if math.inf in (needed, available) else f" ({needed / 2**30:.1f} of {available / 2**30:.1f} GiB)"
    raise UserError(
        f"phases.{index}: an update with accumulation {count} needs more memory than a device has{figures}: leave out "
        f"phases.{index}.accumulation and --micro-batch, so that they are chosen for this memory, split the model "
        "(mesh.fsdp, mesh.tensor), or set model.remat full"
    )


def _asked_for(phase: Phase, index: int, mesh: Mesh | AbstractMesh, rows: int) -> int:
    shards = math.prod(mesh.shape[axis] for axis in DATA_AXES)
    count, left = divmod(phase.batch_size, shards * rows)
    if left or not _cuts(phase, phase.batch_size_at(0), shards, count):
        fitting = sorted(phase.batch_size // (shards * n) for n in accumulations(phase, shards))
        raise UserError(
            f"--micro-batch {rows} does not cut the batches of phases.{index} ({phase.batch_size_at(0)} to "
            f"{phase.batch_size} rows on {shards} row shard(s)) into equal parts: use one of {fitting}"
        )
    return count


def fit(
    config: Config, index: int, mesh: Mesh, ledger: Ledger, compiled: Callable[[int], Any]
) -> tuple[int, Any | None]:
    """The fewest micro-batches whose program fits into the memory at hand.

    Micro-batches of `FIRST_TOKENS` are tried first, then one number after the other: no program is compiled that needs
    many times the memory.

    Args:
      config: of the run.
      index: of the phase.
      mesh: where.
      ledger: what was found before, on devices like these, is taken from there.
      compiled: the program for a number of micro-batches.

    Returns:
      their number, and the program if it was compiled to find it.

    Raises:
      UserError: not even single rows fit.
    """
    phase, device = config.phases[index], mesh.devices.flat[0]
    here = {"phase": index, "devices": mesh.devices.size, "device": device.device_kind, "mesh": dict(mesh.shape)}
    # A run may change these from one start to the next, and the memory of its programs depends on them.
    here |= {name: getattr(phase, name) for name in PHASE_FIELDS}
    here |= {name: getattr(config.model, name) for name in ("attention", "remat", "scan_unroll")}
    for entry in ledger.of(EVENT):
        if here.items() <= entry.items():
            return entry["accumulation"], None
    limit = FILLED * min(all_gather("the memory at hand", memory_of(mesh.local_devices[0])))
    shards = math.prod(mesh.shape[axis] for axis in DATA_AXES)
    candidates = accumulations(phase, shards)
    tokens = [phase.batch_size // (shards * n) * phase.seq_len for n in candidates]
    at = next((i for i, size in enumerate(tokens) if size <= FIRST_TOKENS), len(candidates) - 1)
    step, best = 0, None
    while 0 <= at < len(candidates):
        program, needed = attempt(compiled, candidates[at])
        needed = max(all_gather("what a program needs", needed))  # compilers may choose differently on each host
        if needed <= limit:
            best = candidates[at], program, needed
            if step > 0:
                break
            step = -1
        elif best is not None:
            break
        else:
            step = 1
        at += step
    if best is None:
        raise UserError(
            f"phases.{index}: one row at a time on each device needs more than {limit / 2**30:.1f} GiB, "
            f"{FILLED:.0%} of the memory at hand: split the model (mesh.fsdp, mesh.tensor) or set model.remat full"
        )
    count, program, needed = best
    ledger.decide(EVENT, lambda: here | {"accumulation": count, "bytes": int(needed), "limit": int(limit)})
    return count, program


def attempt(compiled: Callable[[int], Any], count: int) -> tuple[Any | None, float]:
    """The program for a number of micro-batches and the bytes that it needs; None and infinity if it is refused."""
    try:
        program = compiled(count)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, math.inf  # TPUs refuse at compilation what does not fit
    return program, needed_by(program)


def needed_by(program: Any) -> float:
    """Bytes of each device that a compiled program needs."""
    usage = program.memory_analysis()
    return (
        usage.argument_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes + usage.temp_size_in_bytes
    )


def device_memory(device: jax.Device) -> float | None:
    """Bytes that a program may use on a device; None if it does not report them, as CPUs do not."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else float(limit)


def memory_of(device: jax.Device) -> float:
    """Bytes that a program may use on a device: its own memory, or what the host has free for a CPU."""
    return device_memory(device) or float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
