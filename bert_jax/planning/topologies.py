"""Absent devices by name: ``v5e:16x16``, ``2xv5e:16x16`` for two slices, ``h100:8x8`` for nodes x GPUs.

TPU names are those of libtpu, which compiles for them on any machine. GPU programs cannot be compiled without a GPU:
they are lowered on an abstract mesh.
"""

import contextlib
import difflib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from bert_jax.chips import CHIPS, Chip, Sizes
from bert_jax.config import MeshConfig
from bert_jax.errors import UserError, install_command
from bert_jax.training.sharding import abstract_mesh, make_mesh

EXAMPLES = {
    "v3": "v3:32x32",
    "v4": "v4:8x8x8",
    "v5e": "v5e:16x16",
    "v5p": "v5p:8x8x8",
    "v6e": "v6e:16x16",
    "a100": "a100:8x8",
    "h100": "h100:8x8",
    "h200": "h200:8x8",
    "b200": "b200:8x8",
}
GRAMMAR = "write v5e:16x16, 2xv5e:16x16 for two slices of it, or h100:8x8 for nodes x GPUs"
# Without these, libtpu queries the Google Cloud metadata server for minutes and writes errors to stderr. Their values
# have no effect for a named topology.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise only one process at a time may load libtpu
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind and their layout."""

    name: str
    """Name as given by the user."""
    chip: Chip
    count: int
    """jax devices in all slices together: chips, but two for each chip of v3."""
    slices: int
    """TPU pod slices, or nodes of GPUs."""
    devices: tuple[jax.Device, ...] | None
    """Devices for which jax compiles; None for GPUs."""

    @property
    def devices_per_chip(self) -> int:
        """Number of jax devices per chip: each of the two cores of a v3 chip is a device."""
        return 2 if self.chip.name == "v3" else 1

    @property
    def chips(self) -> int:
        """Number of chips, the unit of pricing."""
        return self.count // self.devices_per_chip

    def mesh(self, config: MeshConfig) -> Mesh | AbstractMesh:
        """Mesh over these devices.

        Raises:
          UserError: see `make_mesh`.
        """
        if self.devices is None:
            return abstract_mesh(config, self.count, self.slices)
        return make_mesh(config, list(self.devices))

    def sizes(self, mesh: Mesh | AbstractMesh) -> Sizes:
        """Sizes of a mesh over these devices, for the analytic models."""
        return Sizes(**mesh.shape, slices=self.slices)


@contextlib.contextmanager
def libtpu_environment() -> Iterator[None]:
    """The environment variables with which libtpu is loaded and compiles; they are restored on exit.

    At its first compilation, libtpu ends the process at a flag of another platform in XLA_FLAGS; its own flags are in
    LIBTPU_INIT_ARGS. jaxlib reads XLA_FLAGS when it creates its first backend.
    """
    jax.local_devices(backend="cpu")
    before = {name: os.environ.get(name) for name in ("XLA_FLAGS", *ENVIRONMENT)}
    os.environ.pop("XLA_FLAGS", None)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def parse_topology(text: str) -> Topology:
    """Parse the name of a topology.

    Keeps jax on the CPU: no device is needed.

    Raises:
      UserError: unknown name, libtpu is not installed, or libtpu does not support the shape.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)", text)
    if not match:
        raise UserError(f"--topology {text}: {_nearest(text, list(EXAMPLES.values()))}{GRAMMAR}")
    slices, name, shape = int(match[1] or 1), match[2], [int(size) for size in match[3].split("x")]
    if name not in CHIPS:
        suggestion = _nearest(name, list(CHIPS))
        raise UserError(f"--topology {text}: there is no chip '{name}': {suggestion}chips are {', '.join(CHIPS)}")
    if slices < 1 or 0 in shape:
        raise UserError(f"--topology {text}: sizes must be at least 1")
    chip = CHIPS[name]
    jax.config.update("jax_platforms", "cpu")
    if not chip.torus_dimensions:
        if match[1] or len(shape) != 2:
            raise UserError(f"--topology {text}: give the number of nodes and GPUs per node: {name}:8x8")
        return Topology(text, chip, math.prod(shape), shape[0], None)
    devices = _devices(text, name, match[3], slices)
    return Topology(text, chip, len(devices), slices, devices)


def _devices(text: str, name: str, shape: str, slices: int) -> tuple[jax.Device, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology {text}: compiling for absent TPUs needs libtpu: {install_command('plan')}")
    options: dict[str, int | str] = {"num_slices": slices} if slices > 1 else {}
    if name == "v4":  # makes the two cores of a chip one device
        options["chip_config_name"] = "megacore"
    try:
        with libtpu_environment():
            description = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--topology {text}: libtpu does not support this shape: {reason}; try {EXAMPLES[name]}"
        ) from None
    # The topology of a single chip lists devices more than once.
    return tuple({device.id: device for device in description.devices}.values())


def _nearest(text: str, names: list[str]) -> str:
    matches = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    return f"did you mean '{matches[0]}'? " if matches else ""
