"""Ahead-of-time compilation of a phase's train step for absent devices, and statistics of the compiled program."""

import functools
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.config import Config
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning.compiler_output import CompilerOutput, cached_output
from bert_jax.planning.hlo import Collective, parse_collectives
from bert_jax.planning.kernels import Kernel, parse_kernels
from bert_jax.planning.topologies import compiling_for_absent_devices
from bert_jax.training.implementation import check_kernel_memory
from bert_jax.training.micro_batch import compiled_memory_bytes
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs

GPU_OPTIONS: dict[str, bool | int] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Nothing can be timed, so XLA cannot choose among kernels of a product. Its own, untuned, are off: on an H200, four
fifths of the time of products was in cuBLAS's (docs/log/model.md, 2026-11-26)."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class CompiledStepStats(NamedTuple):
    """Statistics of a compiled step. Bytes are per device, padded to tiles."""

    argument_bytes: int
    """State, batch and step inputs; the new state replaces the old one in place."""
    temporary_bytes: int
    """Peak of activations, gradients, gathered parameters and scratch."""
    total_bytes: int
    """Arguments, temporaries, code, and outputs that are not aliased with arguments."""
    collectives: list[Collective]
    kernels: list[Kernel] | None
    """None if XLA cannot print the program with the compiler's estimates: v5p and v6e."""
    machine_code: dict[str, str] | None = None
    """PTX of the kernels for GPUs, by name of a file."""


class OutOfMemoryReport(NamedTuple):
    """Error of the compiler for a program that does not fit into the memory of a device."""

    needed_bytes: int
    """Bytes that the compiler counted before it stopped."""
    arguments_counted: bool
    """Whether `needed_bytes` includes state and batch."""


def compile_only_task(config: Config) -> Pretraining:
    """A task for compilation only: its special token ids are made up, which changes no shape."""
    size = config.model.vocab_size
    return Pretraining(config, Vocabulary(size, 4, (0, 1, 2, 3, 4), bytes(size)))


def trace_step(config: Config, phase: int, mesh: Mesh | AbstractMesh, accumulation: int) -> Any:
    """Trace the train step of a phase: `.lower()` lowers it for the mesh's devices,
    `.lower(lowering_platforms=("cuda",))` for other platforms and for abstract meshes, which have no devices.

    Args:
      config: of the run.
      phase: index.
      mesh: over real devices, those of a topology, or abstract.
      accumulation: micro-batches per step.
    """
    return Programs(compile_only_task(config), mesh).trace_train_step(phase, accumulation)


def compiled_step_stats(
    config: Config, phase: int, mesh: Mesh, accumulation: int, dump: str | None = None
) -> CompiledStepStats | OutOfMemoryReport:
    """Compile the train step of a phase for the devices of a mesh, present or not.

    Args:
      config, phase, mesh, accumulation: as of `trace_step`.
      dump: directory to which XLA writes the program in all its forms, machine code of GPUs included.

    Raises:
      UserError: a kernel needs more memory than a core of the devices has.
    """
    lowered = trace_step(config, phase, mesh, accumulation).lower()
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    options = GPU_OPTIONS if is_gpu else {}
    compile_step = functools.partial(_compile, lowered, options, dump, is_gpu)
    output = compile_step() if dump else cached_output(lowered, mesh.devices, options, compile_step)
    if output.error is not None:
        check_kernel_memory(output.error, config.model)
        return parse_out_of_memory(output.error)
    text = output.printed if output.dumped is None else output.dumped
    assert text is not None, "programs that XLA cannot print have a dump"
    # A loop with a bound known only at run time is that of a batch ramp: at the end of the ramp it runs in full.
    collectives = parse_collectives(text, unknown_trip_count=accumulation)
    kernels = None if output.printed is None else parse_kernels(output.printed, unknown_trip_count=accumulation)
    sizes = output.argument_bytes, output.temporary_bytes, output.total_bytes
    return CompiledStepStats(*sizes, collectives, kernels, output.machine_code)


def _compile(
    lowered: jax.stages.Lowered, options: dict[str, bool | int], dump: str | None, is_gpu: bool
) -> CompilerOutput:
    dumped = machine_code = None
    with tempfile.TemporaryDirectory() as directory:
        extra: dict[str, bool | int | str] = {"xla_dump_to": dump or directory, "xla_dump_hlo_as_text": True}
        try:
            with compiling_for_absent_devices():
                compiled = lowered.compile(options | extra)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return CompilerOutput(error=str(error))
        if is_gpu:
            machine_code = {path.name: path.read_text() for path in sorted(Path(dump or directory).glob("*.ptx"))}
        else:
            # Collectives are read from the compiler's dump, which has all parts of the program, but no estimates.
            files = Path(dump or directory).glob("*.jit_train_step.*after_optimizations.txt")
            (dumped,) = (path.read_text() for path in files)
    usage = compiled.memory_analysis()
    total = int(compiled_memory_bytes(compiled)) + usage.generated_code_size_in_bytes
    sizes = usage.argument_size_in_bytes, usage.temp_size_in_bytes, total
    return CompilerOutput(*sizes, _printed(compiled), dumped, machine_code)


def _printed(compiled: jax.stages.Compiled) -> str | None:
    """The text of a program; None if it has parts that libtpu moves to the SparseCores of a TPU."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        if "async-update instruction" not in str(error):
            raise
        return None


def parse_out_of_memory(message: str) -> OutOfMemoryReport:
    """Parse the out-of-memory message of XLA for TPUs, which has two forms.

    Raises:
      ValueError: the message has neither form.
    """
    size = r"([\d.]+)([KMGT]?)i?B?"
    match = re.search(rf"\({size}\) exceeds available HBM", message) or re.search(rf"Used {size} of .* hbm", message)
    if not match:
        raise ValueError(f"unknown out-of-memory message: {message}")
    return OutOfMemoryReport(round(float(match[1]) * UNITS[match[2]]), "HLO temporaries (" not in message)
