"""The number of micro-batches per step: from the config, from the command line, or the fewest that fit into memory.

It changes results by rounding only (guarantee 1), so it is not part of a run's identity. Numbers that were found for
the available memory are in the ledger.
"""

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.chips import MEMORY_SHARE
from bert_jax.config import Config, ModelConfig, Phase
from bert_jax.distributed.agreement import all_gather
from bert_jax.errors import UserError
from bert_jax.training.implementation import check_devices, check_kernel_memory
from bert_jax.training.programs import Programs, TrainStep
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.sharding import check_heads, check_processes, check_rows, device_kind, row_shards

EVENT = "micro_batch"
FIRST_TOKENS = 65_536
"""Largest micro-batch of the first program that is tried, in tokens per device."""
PHASE_FIELDS = (
    "batch_size",
    "start_batch_size",
    "seq_len",
    "num_layers",
    "max_predictions",
    "mask_rate",
    "end_mask_rate",
    "direction",
)
"""Fields of a phase that determine its number of micro-batches. They may change until the phase begins."""

MicroBatchRequest = int | Literal["auto"] | None
"""Rows of a micro-batch on each device; "auto": the most that fit into memory; None: `Phase.accumulation`."""


class TrainSteps:
    """The train step of each phase, with the number of micro-batches that was requested or that fits into memory."""

    def __init__(self, programs: Programs, ledger: Ledger, accumulations: Sequence[int | None]):
        """Compiles nothing yet.

        Args:
          programs: of the run.
          ledger: keeps the numbers of micro-batches that fit into memory.
          accumulations: of `choose_accumulations`.
        """
        self._programs, self._ledger, self._accumulations = programs, ledger, accumulations
        self._steps: dict[int, tuple[TrainStep, int]] = {}

    def precompile(self, first_phase: int) -> None:
        """Compile the train steps of all phases from `first_phase` on, if the memory of the devices is known.

        Raises:
          UserError: a phase needs more memory than a device has.
        """
        if None in self._accumulations or devices_report_memory(self._programs.mesh):
            for phase in range(first_phase, len(self._accumulations)):
                self.of_phase(phase)

    def of_phase(self, phase: int) -> tuple[TrainStep, int]:
        """The compiled train step of a phase, and the number of micro-batches of a full batch."""
        if phase not in self._steps:
            self._steps[phase] = self._compile(phase)
        return self._steps[phase]

    def of_batch(self, phase: int, size: int) -> tuple[TrainStep, int, int]:
        """The compiled train step for a batch of `size` rows, the rows that it takes, and its micro-batches with rows.

        With micro-batches it is the step of a full batch, and the missing rows are padding; without, it takes `size`.
        """
        step, accumulation = self.of_phase(phase)
        settings = self._programs.task.config.phases[phase]
        if accumulation > 1 or size == settings.batch_size:
            return step, settings.batch_size, micro_batch_count(settings, size, accumulation)
        return self._programs.train_step(phase, 1, size), size, 1

    def _compile(self, phase: int) -> tuple[TrainStep, int]:
        config, mesh, accumulation = self._programs.task.config, self._programs.mesh, self._accumulations[phase]
        compile_step, program = functools.partial(self._programs.train_step, phase), None
        if accumulation is None:
            accumulation, program = smallest_fitting_accumulation(config, phase, mesh, self._ledger, compile_step)
        if program is None:
            program, needed = _try_compile(compile_step, accumulation, config.model)
            _check_fits(phase, mesh, accumulation, needed)
        return program, accumulation


def micro_batch_count(phase: Phase, size: int, accumulation: int) -> int:
    """Micro-batches of a batch of `size` rows, if the phase's full batch has `accumulation`."""
    return size * accumulation // phase.batch_size


def requested_accumulation(
    phase: Phase, index: int, mesh: Mesh | AbstractMesh, request: MicroBatchRequest
) -> int | None:
    """Number of micro-batches of a phase from the command line or the config; None if neither sets it.

    Args:
      phase: of the run.
      index: of the phase.
      mesh: of the run.
      request: from the command line.

    Raises:
      UserError: this number of rows does not split the batches of the phase into equal parts.
    """
    if request is None:
        return phase.accumulation
    if request == "auto":
        return None
    shards = row_shards(mesh)
    by_rows = {phase.batch_size // (shards * n): n for n in phase.valid_accumulations(shards)}
    if request not in by_rows:
        raise UserError(
            f"--micro-batch {request} does not split the batches of phases.{index} ({phase.batch_size_at(0)} to "
            f"{phase.batch_size} rows on {shards} row shard(s)) into equal parts: use one of {sorted(by_rows)}"
        )
    return by_rows[request]


def choose_accumulations(
    programs: Programs, processes: int, micro_batch: MicroBatchRequest = None
) -> tuple[int | None, ...]:
    """Choose how many micro-batches each phase has, before a run, and check that its processes can train and evaluate.

    Args:
      programs: the task and the mesh, which can be abstract.
      processes: of the run.
      micro_batch: rows of a micro-batch on each device, "auto", or None for the config's `accumulation`.

    Returns:
      the number of micro-batches of each phase; None: to be found by the memory of the devices.

    Raises:
      UserError: batches that cannot be split, patterns that match no parameter.
    """
    config, mesh = programs.task.config, programs.mesh
    check_processes(mesh, processes)
    check_heads(config.model, mesh)
    check_devices(config.model, mesh.shape["tensor"], device_kind(mesh))
    is_searched = micro_batch == "auto" or devices_report_memory(mesh)
    accumulations = []
    for i, phase in enumerate(config.phases):
        requested = requested_accumulation(phase, i, mesh, micro_batch)
        accumulation = requested or phase.fewest_micro_batches
        first = phase.batch_size_at(0)  # later batch sizes are multiples of it
        name = "start_batch_size" if phase.start_batch_size else "batch_size"
        check_rows(first, micro_batch_count(phase, first, accumulation), mesh, f"phases.{i}.{name}")
        programs.abstract_state(i)  # checks the patterns
        accumulations.append(requested if is_searched else accumulation)
        task_head = None if config.finetune is None else config.finetune.head
        if task_head is not None and task_head.cls_norm == "batch" and accumulations[-1] != 1:
            raise UserError(
                f"finetune.head.cls_norm batch normalises over the whole batch at once: set phases.{i}.accumulation 1, "
                "and leave out --micro-batch"
            )
    return tuple(accumulations)


def _check_fits(index: int, mesh: Mesh, count: int, needed: float) -> None:
    """Check that a train step with a given number of micro-batches fits into device memory.

    Args:
      index: of the phase.
      mesh: of the run.
      count: number of micro-batches.
      needed: bytes on each device; infinite if the compiler ran out of memory.

    Raises:
      UserError: the step needs more. Devices that do not report their memory are not checked.
    """
    local = device_memory(mesh.local_devices[0])
    available = min(all_gather("the available memory", math.inf if local is None else local))
    needed = max(all_gather("the memory of a program", needed))
    if needed <= available and needed < math.inf:
        return
    figures = "" if math.inf in (needed, available) else f" ({needed / 2**30:.1f} of {available / 2**30:.1f} GiB)"
    raise UserError(
        f"phases.{index}: a step with accumulation {count} needs more memory than a device has{figures}: leave out "
        f"phases.{index}.accumulation and --micro-batch, so that they are chosen for this memory, shard the model "
        "(mesh.fsdp, mesh.tensor), or set model.remat full"
    )


def smallest_fitting_accumulation(
    config: Config, index: int, mesh: Mesh, ledger: Ledger, compile_step: Callable[[int], Any]
) -> tuple[int, Any | None]:
    """Find the smallest number of micro-batches whose program fits into the available memory.

    Micro-batches of `FIRST_TOKENS` are tried first, then the neighbouring numbers one by one, so that no program is
    compiled that needs many times the memory.

    Args:
      config: of the run.
      index: of the phase.
      mesh: of the run.
      ledger: of the run; a number that was found before on the same kind of devices is reused.
      compile_step: compiles the train step for a number of micro-batches.

    Returns:
      the number, and the program if it was compiled in the search.

    Raises:
      UserError: a micro-batch of one row per device does not fit.
    """
    phase, device = config.phases[index], mesh.devices.flat[0]
    setup = {"phase": index, "devices": mesh.devices.size, "device": device.device_kind, "mesh": dict(mesh.shape)}
    # These may change when a run is continued, and the memory of its programs depends on them.
    setup |= {name: getattr(phase, name) for name in PHASE_FIELDS}
    setup |= {name: getattr(config.model, name) for name in ("attention", "dense_dtype", "remat", "scan_unroll")}
    for entry in ledger.entries_of(EVENT):
        if setup.items() <= entry.items():
            return entry["accumulation"], None
    limit = MEMORY_SHARE * min(all_gather("the available memory", available_memory(mesh.local_devices[0])))
    shards = row_shards(mesh)
    candidates = phase.valid_accumulations(shards)
    tokens = [phase.batch_size // (shards * n) * phase.seq_len for n in candidates]
    first = next((i for i, size in enumerate(tokens) if size <= FIRST_TOKENS), len(candidates) - 1)

    def fitting(count: int) -> tuple[int, Any, float] | None:
        program, needed = _try_compile(compile_step, count, config.model)
        needed = max(all_gather("the memory of a program", needed))  # programs may differ between hosts
        return (count, program, needed) if needed <= limit else None

    # Larger and larger micro-batches while they fit; if the first one does not, smaller ones until one fits.
    best = None
    for larger in itertools.takewhile(bool, map(fitting, candidates[first::-1])):
        best = larger
    best = best or next(filter(None, map(fitting, candidates[first + 1 :])), None)
    if best is None:
        raise UserError(
            f"phases.{index}: one row at a time on each device needs more than {limit / 2**30:.1f} GiB, "
            f"{MEMORY_SHARE:.0%} of the available memory: shard the model (mesh.fsdp, mesh.tensor) or set "
            "model.remat full"
        )
    count, program, needed = best
    ledger.make_decision(EVENT, lambda: setup | {"accumulation": count, "bytes": int(needed), "limit": int(limit)})
    return count, program


def _try_compile(compile_step: Callable[[int], Any], count: int, model: ModelConfig) -> tuple[Any | None, float]:
    """The program for `count` micro-batches and its bytes of memory; None and infinity if they are too many."""
    try:
        program = compile_step(count)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        check_kernel_memory(str(error), model)
        return None, math.inf  # on TPUs, compilation fails if the program does not fit
    return program, compiled_memory_bytes(program)


def compiled_memory_bytes(program: Any) -> float:
    """Memory of a compiled program on each device, in bytes."""
    usage = program.memory_analysis()
    return (
        usage.argument_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes + usage.temp_size_in_bytes
    )


def device_memory(device: jax.Device) -> float | None:
    """Memory of a device that programs can use, in bytes; None if the device does not report it (CPUs)."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else float(limit)


def devices_report_memory(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh are present and report their memory."""
    return not isinstance(mesh, AbstractMesh) and device_memory(mesh.local_devices[0]) is not None


def available_memory(device: jax.Device) -> float:
    """Memory that a program can use on a device, in bytes: that of the device, or available host memory for a CPU."""
    return device_memory(device) or min(_free_memory(), host_memory())


def _free_memory(root: Path = Path("/")) -> float:
    """Bytes of this host; on Linux with the file cache, which the kernel gives up."""
    with contextlib.suppress(OSError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        for line in lines:
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def host_memory(root: Path = Path("/")) -> float:
    """Memory of this host in bytes, or the part of it that the process's control group may use.

    Args:
      root: of the file system.
    """
    return min([float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[float]:
    """Limits of the process's control groups, versions 1 and 2, and of the groups that contain them, in bytes.

    In a container, a group's directory may be missing: its limit is in the directory where the groups are mounted.
    """
    with contextlib.suppress(OSError):  # another system
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mount, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            group = PurePosixPath(name.lstrip("/"))
            for directory in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # no such directory, or "max"
                    yield float((root / "sys/fs/cgroup" / mount / directory / file).read_text())
