"""Performance figures of accelerators, from the manufacturers' pages, and the axis sizes of a mesh.

All figures are per *jax device*: on v3 that is a core, two per chip, so the figures of a chip are halved; on v4, v5p
(two cores that act as one), v5e, v6e and GPUs it is the whole chip. This module does not import jax.

The field `unconfirmed` lists the figures of a chip that are not on its manufacturer's page, with their estimates.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30


class Sizes(NamedTuple):
    """Number of devices along each axis of the mesh, and number of slices that the data axis spans."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    slices: int = 1

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Number of shards that a batch's rows are split into."""
        return self.data * self.fsdp


class Efficiency(NamedTuple):
    """Share of the roofline that each kind of work reaches. Above 1: served by caches instead of memory."""

    matmul: float
    """Of peak_flops, in matrix products of a transformer's shapes."""
    hidden: float
    """Of memory bandwidth, in elementwise work of the hidden or feed-forward width."""
    scores: float
    """Of memory bandwidth, in attention probabilities."""
    logits: float
    """Of memory bandwidth, in the loss over the vocabulary."""
    parameters: float
    """Of memory bandwidth, in weights, gradients and the optimizer."""


# Assumed: products of width 1,024 reach 0.85 of the rate of large ones, which is 0.80 of the peak on an H200
# (790 TFLOP/s, measured); copies reach 4.3 of its 4.8 TB/s, measured. TPUs: between that and the 65 % of all FLOPs that
# MaxText publishes for v5p, and its 50 % for v6e (docs/reference/models/tiering.md). Not calibrated on any TPU.
GPU = Efficiency(0.68, 0.9, 0.9, 0.9, 0.9)
TPU = Efficiency(0.75, 0.9, 0.9, 0.9, 0.9)
TPU_V6 = Efficiency(0.55, 0.9, 0.9, 0.9, 0.9)
CPU = Efficiency(1.0, 0.87, 1.27, 0.68, 1.6)
"""Shares of rates measured on the same machine. Fitted by scripts/benchmarks/calibrate_roofline.py on a machine with
two cores (docs/LOG.md)."""


@dataclass(frozen=True)
class Chip:
    """One jax device. A slice is a set of devices with fast links: a pod slice of TPUs, a node of GPUs."""

    name: str
    device_kinds: tuple[str, ...]
    """Prefixes of `jax.Device.device_kind`; the longest match counts."""
    peak_flops: float
    """FLOP/s of dense bfloat16 matrix products."""
    float32_share: float
    """Share of peak_flops that float32 products reach at jax's default precision: all on TPUs, which use one bfloat16
    pass; half on GPUs, which use TF32."""
    vector_ops: float
    """Elementwise float32 or 32-bit integer operations per second."""
    memory_bandwidth: float
    """Bytes/s, reads and writes together."""
    memory: float
    """Bytes that a program may use: on TPUs the compiler's limit; on GPUs the 75 % that jax reserves by default
    (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
    link_bandwidth: float
    """Bytes/s of one link in one direction."""
    torus_dimensions: int
    """Dimensions of the slice's torus, with two links each; 0: a switch, reached by one link."""
    ring_size: int
    """Minimum number of devices along a dimension that closes to a ring; a shorter one is a line with half the
    bandwidth."""
    slice_devices: int
    """Number of devices of the largest slice."""
    network_bandwidth: float
    """Bytes/s in one direction between slices, per device: its share of the host's network cards."""
    efficiency: Efficiency
    """Assumed, or fitted by scripts/benchmarks/calibrate_roofline.py."""
    source: str
    """The manufacturer's page."""
    unconfirmed: str = ""
    """Figures that are not from that page, and how they were estimated."""

    @property
    def links(self) -> int:
        """Number of links of each device."""
        return max(1, 2 * self.torus_dimensions)


def _tpu(name: str, device_kinds: tuple[str, ...], **figures) -> Chip:
    efficiency = TPU_V6 if name == "v6e" else TPU
    return Chip(name, device_kinds, float32_share=1.0, efficiency=efficiency, **figures)


def _gpu(name: str, **figures) -> Chip:
    kind = f"NVIDIA {name.upper()}"
    fixed = {"float32_share": 0.5, "torus_dimensions": 0, "ring_size": 1, "slice_devices": 8, "efficiency": GPU}
    return Chip(name, (kind,), **fixed, **figures)


_VECTOR = "vector_ops: lanes x units x clock, from papers, not from the page; "

_ALL = (
    # Links: all-reduce bandwidth per pod / chips / 4 links = 83 GB/s, halved for a core.
    _tpu(
        "v3",
        ("TPU v3",),
        peak_flops=123e12 / 2,
        vector_ops=1.9e12,
        memory_bandwidth=900e9 / 2,
        memory=15.48 * GIB,
        link_bandwidth=340e12 / 1024 / 4 / 2,
        torus_dimensions=2,
        ring_size=32,
        slice_devices=2048,
        network_bandwidth=3.125e9 / 2,
        source="https://cloud.google.com/tpu/docs/v3",
        unconfirmed=_VECTOR + "network_bandwidth: taken as v5e's; ring_size: only whole pods",
    ),
    # Links: 1.1 PB/s of all-reduce bandwidth per pod / 4,096 chips / 6 links.
    _tpu(
        "v4",
        ("TPU v4",),
        peak_flops=275e12,
        vector_ops=8.6e12,
        memory_bandwidth=1200e9,
        memory=30.75 * GIB,
        link_bandwidth=1.1e15 / 4096 / 6,
        torus_dimensions=3,
        ring_size=4,
        slice_devices=4096,
        network_bandwidth=3.125e9,
        source="https://cloud.google.com/tpu/docs/v4",
        unconfirmed=_VECTOR + "network_bandwidth: taken as v5e's",
    ),
    # Links: 400 GB/s both ways together / 2 / 4 links. Network: 6.4 Tbit/s per pod of 256.
    _tpu(
        "v5e",
        ("TPU v5 lite", "TPU v5e"),
        peak_flops=197e12,
        vector_ops=6.1e12,
        memory_bandwidth=819e9,
        memory=15.75 * GIB,
        link_bandwidth=400e9 / 2 / 4,
        torus_dimensions=2,
        ring_size=16,
        slice_devices=256,
        network_bandwidth=6.4e12 / 8 / 256,
        source="https://cloud.google.com/tpu/docs/v5e",
        unconfirmed=_VECTOR.removesuffix("; "),
    ),
    # Links: 1,200 GB/s both ways together / 2 / 6 links. Network: 50 Gbit/s per chip.
    _tpu(
        "v5p",
        ("TPU v5", "TPU v5p"),
        peak_flops=459e12,
        vector_ops=14.3e12,
        memory_bandwidth=2765e9,
        memory=95.74 * GIB,
        link_bandwidth=1200e9 / 2 / 6,
        torus_dimensions=3,
        ring_size=4,
        slice_devices=6144,
        network_bandwidth=50e9 / 8,
        source="https://cloud.google.com/tpu/docs/v5p",
        unconfirmed=_VECTOR.removesuffix("; "),
    ),
    # Links: 3,200 Gbit/s one way / 4 links. Network: 25.6 Tbit/s per pod of 256.
    _tpu(
        "v6e",
        ("TPU v6 lite", "TPU v6e"),
        peak_flops=918e12,
        vector_ops=6.1e12,
        memory_bandwidth=1600e9,
        memory=31.25 * GIB,
        link_bandwidth=3200e9 / 8 / 4,
        torus_dimensions=2,
        ring_size=16,
        slice_devices=256,
        network_bandwidth=25.6e12 / 8 / 256,
        source="https://cloud.google.com/tpu/docs/v6e",
        unconfirmed="vector_ops: taken as v5e's",
    ),
    # GPUs: SXM boards of 8 with an NVSwitch; `network_bandwidth` is one InfiniBand card per GPU, as in NVIDIA's DGX.
    _gpu(
        "a100",
        peak_flops=312e12,
        vector_ops=19.5e12 / 2,
        memory_bandwidth=2039e9,
        memory=0.75 * 80e9,
        link_bandwidth=600e9 / 2,
        network_bandwidth=200e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/a100",
        unconfirmed="all but peak_flops and memory: recalled from the data sheet, not read again",
    ),
    _gpu(
        "h100",
        peak_flops=989e12,
        vector_ops=67e12 / 2,
        memory_bandwidth=3350e9,
        memory=0.75 * 80e9,
        link_bandwidth=900e9 / 2,
        network_bandwidth=400e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/h100",
        unconfirmed="from pages that quote the data sheet; network_bandwidth: recalled",
    ),
    _gpu(
        "h200",
        peak_flops=989e12,
        vector_ops=67e12 / 2,
        memory_bandwidth=4800e9,
        memory=0.75 * 141e9,
        link_bandwidth=900e9 / 2,
        network_bandwidth=400e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/h200",
        unconfirmed="from pages that quote the data sheet; network_bandwidth: recalled",
    ),
    _gpu(
        "b200",
        peak_flops=2250e12,
        vector_ops=80e12 / 2,
        memory_bandwidth=7700e9,
        memory=0.75 * 180e9,
        link_bandwidth=1800e9 / 2,
        network_bandwidth=400e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/hgx",
        unconfirmed="from pages that quote the data sheet (HGX, 1,000 W); network_bandwidth: recalled",
    ),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _ALL}
"""Chips by name, the first part of a topology's name: ``v5e`` of ``v5e:16x16``."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip with the longest matching prefix, or None: `TPU v5 lite` is v5e, although it starts with `TPU v5`."""
    matches = [(len(kind), chip.name) for chip in _ALL for kind in chip.device_kinds if device_kind.startswith(kind)]
    return CHIPS[max(matches)[1]] if matches else None


def slices_for(chip: Chip, devices: int) -> int:
    """The minimum number of slices with this number of devices."""
    return math.ceil(devices / chip.slice_devices)
