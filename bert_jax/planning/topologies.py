"""Absent devices by name: ``v5e:16x16``, ``2xv5e:16x16`` for two slices, ``h100:8x8`` for nodes x GPUs.

TPU names are those of libtpu, GPUs are described by the files in gpus/: both compilers run on any machine. Without the
compiler for GPUs, which is the larger one, programs are lowered on an abstract mesh.
"""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, Mesh

from bert_jax.chips import CHIPS, Chip, Sizes
from bert_jax.config import MeshConfig
from bert_jax.distributed.jax_setup import cuda_plugin_versions
from bert_jax.errors import UserError, install_command, require
from bert_jax.training.sharding import abstract_mesh, make_mesh

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


DESCRIPTIONS = Path(__file__).parent / "gpus"
"""What XLA's compiler must know of a GPU, by the name of the chip."""
GPUS_PER_NODE = (1, 2, 4, 8)
SLICES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4"),
}
"""Shapes of slices by the dimensions of the torus; v3, v4 and v5p have more. From the pages of the chips at
https://cloud.google.com/tpu/docs."""
CUBES = {"v4": (16, 16, 16), "v5p": (16, 16, 24)}
"""Largest slices in multiples of 4."""


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
    hosts: int
    """Processes of a run: one per host of TPUs, or per node of GPUs."""
    devices: tuple[jax.Device, ...] | None
    """Devices for which jax compiles; None for GPUs without their compiler."""

    @property
    def chips(self) -> int:
        """Number of chips, the unit of pricing."""
        return self.count // self.chip.devices_per_chip

    def mesh(self, config: MeshConfig) -> Mesh | AbstractMesh:
        """Mesh over these devices.

        Raises:
          UserError: see `make_mesh`.
        """
        mesh = abstract_mesh(config, self.count, self.slices)  # jax does not tell which absent GPUs share a node
        return mesh if self.devices is None else make_mesh(config, list(self.devices))

    def sizes(self, mesh: Mesh | AbstractMesh) -> Sizes:
        """Sizes of a mesh over these devices, for the analytic models."""
        return Sizes(**mesh.shape, slices=self.slices)


def parse_topology(text: str) -> Topology:
    """Parse the name of a topology.

    Keeps jax on the CPU: no device is needed.

    Raises:
      UserError: unknown name, libtpu is not installed or does not support the shape, or the compiler for GPUs has
        another version than jax.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)", text)
    require(
        match is not None,
        f"--topology {text}: write v5e:16x16, 2xv5e:16x16 for two slices of it, or h100:8x8 for nodes x GPUs",
    )
    slices, name, shape = int(match[1] or 1), match[2], [int(size) for size in match[3].split("x")]
    require(name in CHIPS, f"--topology {text}: there is no chip '{name}': chips are {', '.join(CHIPS)}")
    chip = CHIPS[name]
    jax.config.update("jax_platforms", "cpu")
    if not chip.torus_dimensions:
        is_grid = match[1] is None and len(shape) == 2
        require(is_grid, f"--topology {text}: give the number of nodes and GPUs per node: {name}:8x8")
        require(
            shape[1] in GPUS_PER_NODE,
            f"--topology {text}: a node has {', '.join(map(str, GPUS_PER_NODE))} GPUs, not {shape[1]}: write "
            f"{name}:{math.ceil(math.prod(shape) / 8)}x8",
        )
        return Topology(text, chip, math.prod(shape), shape[0], shape[0], _gpu_devices(text, name, *shape))
    _check_slice(text, chip, shape)
    devices = _tpu_devices(text, name, match[3], slices)
    hosts = len({device.process_index for device in devices})
    return Topology(text, chip, len(devices), slices, hosts, devices)


def _check_slice(text: str, chip: Chip, shape: list[int]) -> None:
    """Check that Google Cloud has slices of this shape; libtpu takes others, or ends the process.

    Raises:
      UserError: it has none.
    """
    found = "x".join(map(str, shape)) in SLICES[chip.torus_dimensions]
    shapes = ", ".join(SLICES[chip.torus_dimensions])
    if chip.torus_dimensions == 3:
        largest = CUBES[chip.name]
        found |= shape == sorted(shape) and not any(size % 4 for size in shape) and len(shape) == 3
        found &= all(size <= most for size, most in zip(shape, largest, strict=False))
        shapes += f", and AxBxC of multiples of 4, A <= B <= C, up to {'x'.join(map(str, largest))}"
    elif chip.name == "v3":
        found, shapes = found or shape in ([16, 32], [32, 32]), f"{shapes}, 16x32, 32x32"
    require(
        found,
        f"--topology {text}: there is no {chip.name} slice of this shape: shapes are {shapes} "
        f"(https://cloud.google.com/tpu/docs/{chip.name})",
    )


def _tpu_devices(text: str, name: str, shape: str, slices: int) -> tuple[jax.Device, ...]:
    is_installed = importlib.util.find_spec("libtpu") is not None
    require(is_installed, f"--topology {text}: compiling for absent TPUs needs libtpu: {install_command('plan')}")
    options: dict[str, int | str] = {"num_slices": slices} if slices > 1 else {}
    if name == "v4":  # makes the two cores of a chip one device
        options["chip_config_name"] = "megacore"
    try:
        with compiling_for_absent_devices():
            description = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--topology {text}: libtpu does not support this shape: {reason}; see https://cloud.google.com/tpu/docs/"
            f"{name} for its shapes"
        ) from None
    # The topology of a single chip lists devices more than once.
    return tuple({device.id: device for device in description.devices}.values())


def _gpu_devices(text: str, name: str, nodes: int, per_node: int) -> tuple[jax.Device, ...] | None:
    """Devices of nodes of described GPUs; None if the compiler for GPUs is not installed."""
    if not (installed := cuda_plugin_versions()):
        return None
    wanted = jaxlib.version.__version__
    package, version = next(iter(installed.items()))
    require(
        version == wanted,
        f"--topology {text}: {package} {version} is installed, which cannot compile programs of jaxlib {wanted}: "
        f"pip install {package}=={wanted}",
    )
    description = (DESCRIPTIONS / f"{name}.txtpb").read_text()
    with compiling_for_absent_devices():
        found = topologies.get_topology_desc(
            platform="cuda", target_config=description, topology=f"1x{nodes}x{per_node}"
        )
    return tuple(found.devices)


@contextlib.contextmanager
def compiling_for_absent_devices() -> Iterator[None]:
    """Set libtpu's environment, and disable jax's compilation cache: it writes such programs, but cannot read them.

    At its first compilation, libtpu ends the process at a flag of another platform in XLA_FLAGS; its own flags are in
    LIBTPU_INIT_ARGS. jaxlib reads XLA_FLAGS when it creates its first backend.
    """
    jax.local_devices(backend="cpu")
    cache, environment = jax.config.jax_enable_compilation_cache, dict(os.environ)
    os.environ.pop("XLA_FLAGS", None)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in environment})
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the cache stores whether it is enabled
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", cache)
        compilation_cache.reset_cache()
        for name in ("XLA_FLAGS", *ENVIRONMENT):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]
