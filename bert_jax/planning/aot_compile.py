"""The real train step of a phase, lowered or compiled for absent devices, and what the compiler says of it."""

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
from bert_jax.planning.collectives import Collectives
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.step import abstract_step_arguments, make_train_step

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Program(NamedTuple):
    """What the compiler says of a program that it has made. Bytes are those of one device, tiles filled up."""

    arguments: int
    """State, batch and step inputs; the new state takes the old one's place."""
    temporaries: int
    """At the worst moment: activations, gradients, gathered parameters, scratch."""
    code: int
    total: int
    """Of these, and of what is returned and has no argument's place."""
    collectives: list[hlo.Collective]
    seconds: float
    """That it took to compile."""


class Refusal(NamedTuple):
    """What the compiler says of a program that does not fit into the memory of a device."""

    needed: int
    """Bytes that it counted before it gave up."""
    available: int
    """Bytes."""
    arguments_counted: bool
    """Whether state and batch are among them; else they come on top."""


def blank_task(config: Config) -> Pretraining:
    """Pretraining that can be compiled but not fed: which ids are special changes no shape."""
    size = config.model.vocab_size
    return Pretraining(config, Vocabulary(size, 4, (0, 1, 2, 3, 4), bytes(size)))


def trace(config: Config, phase: int, mesh: Mesh | AbstractMesh, accumulation: int) -> Any:
    """The train step of a phase, to be lowered: `.lower()` for the mesh's devices, which an abstract mesh lacks, or
    `.lower(lowering_platforms=("cuda",))` for others.

    Args:
      config: of the run.
      phase: index.
      mesh: over real devices, those of a topology, or none.
      accumulation: micro-batches per update.
    """
    task = blank_task(config).at(phase)
    return make_train_step(task, mesh, accumulation).trace(*abstract_step_arguments(task, mesh))


def compile_step(config: Config, phase: int, mesh: Mesh, accumulation: int) -> Program | Refusal:
    """Compile the train step of a phase for the devices of a mesh, which need not be there."""
    lowered = trace(config, phase, mesh, accumulation).lower()
    begun = time.perf_counter()
    # Read from the compiler's own dump: jax cannot write down what libtpu moves to the SparseCores of v5p.
    with tempfile.TemporaryDirectory() as directory:
        try:
            with _no_cache():
                compiled = lowered.compile({"xla_dump_to": directory, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return refusal(str(error))
        (text,) = (path.read_text() for path in Path(directory).glob("*.jit_train_step.*after_optimizations.txt"))
    usage = compiled.memory_analysis()
    arguments, temporaries = usage.argument_size_in_bytes, usage.temp_size_in_bytes
    code = usage.generated_code_size_in_bytes
    returned = usage.output_size_in_bytes - usage.alias_size_in_bytes
    # A loop whose bound only the run knows is that of a batch ramp; at its end it has all turns.
    found = hlo.collectives(text, unknown_turns=accumulation)
    total = arguments + temporaries + code + returned
    return Program(arguments, temporaries, code, total, found, time.perf_counter() - begun)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Keep jax's cache of programs out of it: it writes those for absent devices, but cannot read them."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def refusal(message: str) -> Refusal:
    """What XLA for TPUs says when it runs out of memory, in either of its two ways.

    Raises:
      ValueError: in none of them.
    """
    size = r"([\d.]+)([KMGT]?)i?B?"
    for pattern in (rf"\({size}\) exceeds available HBM \({size}\)", rf"Used {size} of {size} hbm"):
        if found := re.search(pattern, message):
            needed, available = (round(float(found[i]) * UNITS[found[i + 1]]) for i in (1, 3))
            return Refusal(needed, available, "HLO temporaries (" not in message)
    raise ValueError(f"out of memory, in words that are not known: {message}")


def shard_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on one device, by their shapes and shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def by_axis(found: list[hlo.Collective], sizes: Sizes) -> Collectives:
    """Bytes that a device sends in an update along each axis of the mesh, for the roofline.

    An exchange over several axes counts for the first of them. Rings: of n devices each keeps its own n-th part.
    """
    inside = (sizes.data // sizes.slices, sizes.fsdp, sizes.tensor)
    sent = dict.fromkeys(Collectives._fields, 0.0)
    for one in found:
        if one.kind == hlo.BETWEEN_SLICES:  # the hosts sum it up
            sent["network"] += 2 * one.turns * one.bytes * (sizes.slices - 1) / sizes.slices
        elif len(one.group) > 1:
            places = np.unravel_index(np.array(one.group) % math.prod(inside), inside)
            axis = next(name for name, place in zip(("data", "fsdp", "tensor"), places, strict=True) if np.ptp(place))
            sent[axis] += one.sent * (len(one.group) - 1) / len(one.group)
    return Collectives(**sent)
