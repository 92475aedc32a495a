"""Ahead-of-time compilation of a phase's train step for absent devices, and statistics of the compiled program."""

import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.config import Config
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning.hlo import Collective, parse_collectives
from bert_jax.planning.topologies import compiling_for_absent_devices
from bert_jax.training.implementation import check_kernel_memory
from bert_jax.training.micro_batch import compiled_memory_bytes
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs

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
    config: Config, phase: int, mesh: Mesh, accumulation: int
) -> CompiledStepStats | OutOfMemoryReport:
    """Compile the train step of a phase for the devices of a mesh, present or not; arguments as of `trace_step`."""
    lowered = trace_step(config, phase, mesh, accumulation).lower()
    # Read from the compiler's dump: jax cannot print the parts that libtpu moves to the SparseCores of v5p.
    with tempfile.TemporaryDirectory() as directory:
        try:
            with compiling_for_absent_devices():
                compiled = lowered.compile({"xla_dump_to": directory, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            check_kernel_memory(error, config.model)
            return parse_out_of_memory(str(error))
        (text,) = (path.read_text() for path in Path(directory).glob("*.jit_train_step.*after_optimizations.txt"))
    usage = compiled.memory_analysis()
    total = int(compiled_memory_bytes(compiled)) + usage.generated_code_size_in_bytes
    # A loop with a bound known only at run time is that of a batch ramp: at the end of the ramp it runs in full.
    collectives = parse_collectives(text, unknown_trip_count=accumulation)
    return CompiledStepStats(usage.argument_size_in_bytes, usage.temp_size_in_bytes, total, collectives)


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
