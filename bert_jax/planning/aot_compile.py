"""Ahead-of-time compilation of a phase's train step for absent devices, and statistics of the compiled program."""

import contextlib
import math
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, Mesh

from bert_jax.chips import Sizes
from bert_jax.config import Config
from bert_jax.objectives.masking import Vocabulary
from bert_jax.planning import hlo
from bert_jax.planning.roofline import CollectiveBytes
from bert_jax.planning.topologies import libtpu_environment
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class CompiledStepStats(NamedTuple):
    """Statistics of a compiled step. Bytes are per device, padded to tiles."""

    argument_bytes: int
    """State, batch and step inputs; the new state replaces the old one in place."""
    temporary_bytes: int
    """Peak of activations, gradients, gathered parameters and scratch."""
    code_bytes: int
    total_bytes: int
    """Sum of the above and of outputs that are not aliased with arguments."""
    collectives: list[hlo.Collective]
    compile_seconds: float


class OutOfMemoryReport(NamedTuple):
    """Error of the compiler for a program that does not fit into the memory of a device."""

    needed_bytes: int
    """Bytes that the compiler counted before it stopped."""
    available_bytes: int
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


def compile_step(config: Config, phase: int, mesh: Mesh, accumulation: int) -> CompiledStepStats | OutOfMemoryReport:
    """Compile the train step of a phase for the devices of a mesh, present or not."""
    lowered = trace_step(config, phase, mesh, accumulation).lower()
    start = time.perf_counter()
    # Read from the compiler's dump: jax cannot print the parts that libtpu moves to the SparseCores of v5p.
    with tempfile.TemporaryDirectory() as directory:
        try:
            with compiling_for_absent_devices():
                compiled = lowered.compile({"xla_dump_to": directory, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return parse_out_of_memory(str(error))
        (text,) = (path.read_text() for path in Path(directory).glob("*.jit_train_step.*after_optimizations.txt"))
    usage = compiled.memory_analysis()
    arguments, temporaries = usage.argument_size_in_bytes, usage.temp_size_in_bytes
    code = usage.generated_code_size_in_bytes
    outputs = usage.output_size_in_bytes - usage.alias_size_in_bytes
    # A loop with a bound known only at run time is that of a batch ramp: at the end of the ramp it runs in full.
    collectives = hlo.parse_collectives(text, unknown_trip_count=accumulation)
    total = arguments + temporaries + code + outputs
    return CompiledStepStats(arguments, temporaries, code, total, collectives, time.perf_counter() - start)


@contextlib.contextmanager
def compiling_for_absent_devices() -> Iterator[None]:
    """Set libtpu's environment, and disable jax's compilation cache: it writes such programs, but cannot read them."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the cache stores whether it is enabled
    try:
        with libtpu_environment():
            yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def parse_out_of_memory(message: str) -> OutOfMemoryReport:
    """Parse the out-of-memory message of XLA for TPUs, which has two forms.

    Raises:
      ValueError: the message has neither form.
    """
    size = r"([\d.]+)([KMGT]?)i?B?"
    for pattern in (rf"\({size}\) exceeds available HBM \({size}\)", rf"Used {size} of {size} hbm"):
        if match := re.search(pattern, message):
            needed, available = (round(float(match[i]) * UNITS[match[i + 1]]) for i in (1, 3))
            return OutOfMemoryReport(needed, available, "HLO temporaries (" not in message)
    raise ValueError(f"unknown out-of-memory message: {message}")


def collective_bytes_per_device(collectives: list[hlo.Collective], sizes: Sizes) -> CollectiveBytes:
    """Bytes that a device sends per step along each axis of the mesh, for the roofline.

    A collective over several axes counts for the first of them. In a ring of n devices, each keeps its own n-th part.
    """
    inside = (sizes.data // sizes.slices, sizes.fsdp, sizes.tensor)
    sent = dict.fromkeys(CollectiveBytes._fields, 0.0)
    for one in collectives:
        if one.kind == hlo.BETWEEN_SLICES:  # the hosts compute the sum
            sent["network"] += 2 * one.executions * one.bytes * (sizes.slices - 1) / sizes.slices
        elif len(one.group) > 1:
            coordinates = np.unravel_index(np.array(one.group) % math.prod(inside), inside)
            axes = zip(("data", "fsdp", "tensor"), coordinates, strict=True)
            axis = next(name for name, coordinate in axes if np.ptp(coordinate))
            sent[axis] += one.bytes_sent * (len(one.group) - 1) / len(one.group)
    return CollectiveBytes(**sent)
