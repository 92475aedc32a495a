"""What accelerators can do, by their makers' pages, and how many of them a mesh takes.

All figures are for one *jax device*: on v3 that is a core, two to a chip, so a chip's figures are halved; on v4, v5p
(two cores that act as one), v5e, v6e and GPUs it is the whole chip. No jax is needed here.

What "unconfirmed" says of a chip was not found on its maker's page, and is estimated as told there.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30


class Sizes(NamedTuple):
    """How many devices each axis of the mesh has, and how many slices the data axis spans."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    slices: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.fsdp * self.tensor

    @property
    def row_shards(self) -> int:
        """Devices, or groups of them, that hold rows of their own."""
        return self.data * self.fsdp


class Efficiency(NamedTuple):
    """What share of the roof each kind of work reaches. Above 1: caches serve it, not memory."""

    matmul: float
    """Of the peak, in products of a transformer's shapes."""
    hidden: float
    """Of memory bandwidth, in everything as long as the hidden or feed-forward width."""
    scores: float
    """Of memory bandwidth, in attention probabilities."""
    logits: float
    """Of memory bandwidth, in the loss over the vocabulary."""
    parameters: float
    """Of memory bandwidth, in weights, gradients and the optimizer."""


# Assumed: products of width 1,024 reach 0.85 of what large ones do, which is 0.80 of the peak on an H200
# (790 TFLOP/s, measured); copies 4.3 of its 4.8 TB/s, measured. TPUs: between that and the 65 % of all FLOPs that
# MaxText publishes for v5p, and its 50 % for v6e (docs/reference/models/tiering.md). Not calibrated on any of them.
GPU = Efficiency(0.68, 0.9, 0.9, 0.9, 0.9)
TPU = Efficiency(0.75, 0.9, 0.9, 0.9, 0.9)
TPU_V6 = Efficiency(0.55, 0.9, 0.9, 0.9, 0.9)
CPU = Efficiency(1.0, 0.87, 1.27, 0.68, 1.6)
"""Of rates measured on the machine at hand. Fitted by scripts/benchmarks/calibrate_roofline.py on one with two cores
(docs/LOG.md)."""


@dataclass(frozen=True)
class Chip:
    """One jax device. A slice is what fast links connect: a pod slice of TPUs, a node of GPUs."""

    name: str
    kinds: tuple[str, ...]
    """How `jax.Device.device_kind` begins; the longest that fits counts."""
    peak_flops: float
    """FLOP/s of dense bfloat16 matrix products."""
    float32_share: float
    """What of it float32 products reach at jax's default precision: all on TPUs, which take one bfloat16 pass;
    half on GPUs, which take TF32."""
    vector_ops: float
    """Elementwise float32 or 32-bit integer operations per second."""
    memory_bandwidth: float
    """Bytes/s, reading and writing together."""
    memory: float
    """Bytes that a program may use: TPUs, what their compiler allows; GPUs, the 75 % that jax reserves unless told
    otherwise (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
    link_bandwidth: float
    """Bytes/s that one link carries one way."""
    torus: int
    """Dimensions of the slice's torus, with two links each; 0: a switch, behind one link."""
    wraps_at: int
    """Devices along a dimension from which it is closed to a ring; shorter ones are lines, worth half."""
    slice_devices: int
    """Devices of the largest slice."""
    network: float
    """Bytes/s one way between slices, per device: the share of its host's cards."""
    efficiency: Efficiency
    """Assumed, or fitted by scripts/benchmarks/calibrate_roofline.py."""
    source: str
    """The maker's page."""
    unconfirmed: str = ""
    """Which figures are not from there, and how they were estimated."""

    @property
    def links(self) -> int:
        """Of each device."""
        return max(1, 2 * self.torus)


def _tpu(name: str, kinds: tuple[str, ...], **figures) -> Chip:
    efficiency = TPU_V6 if name == "v6e" else TPU
    return Chip(name, kinds, float32_share=1.0, efficiency=efficiency, **figures)


def _gpu(name: str, **figures) -> Chip:
    kind = f"NVIDIA {name.upper()}"
    fixed = {"float32_share": 0.5, "torus": 0, "wraps_at": 1, "slice_devices": 8, "efficiency": GPU}
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
        torus=2,
        wraps_at=32,
        slice_devices=2048,
        network=3.125e9 / 2,
        source="https://cloud.google.com/tpu/docs/v3",
        unconfirmed=_VECTOR + "network: taken as v5e's; wraps_at: only whole pods",
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
        torus=3,
        wraps_at=4,
        slice_devices=4096,
        network=3.125e9,
        source="https://cloud.google.com/tpu/docs/v4",
        unconfirmed=_VECTOR + "network: taken as v5e's",
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
        torus=2,
        wraps_at=16,
        slice_devices=256,
        network=6.4e12 / 8 / 256,
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
        torus=3,
        wraps_at=4,
        slice_devices=6144,
        network=50e9 / 8,
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
        torus=2,
        wraps_at=16,
        slice_devices=256,
        network=25.6e12 / 8 / 256,
        source="https://cloud.google.com/tpu/docs/v6e",
        unconfirmed="vector_ops: taken as v5e's",
    ),
    # GPUs: SXM boards of 8 behind an NVSwitch; `network` is one InfiniBand card per GPU, as in the maker's DGX.
    _gpu(
        "a100",
        peak_flops=312e12,
        vector_ops=19.5e12 / 2,
        memory_bandwidth=2039e9,
        memory=0.75 * 80e9,
        link_bandwidth=600e9 / 2,
        network=200e9 / 8,
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
        network=400e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/h100",
        unconfirmed="from pages that quote the data sheet; network: recalled",
    ),
    _gpu(
        "h200",
        peak_flops=989e12,
        vector_ops=67e12 / 2,
        memory_bandwidth=4800e9,
        memory=0.75 * 141e9,
        link_bandwidth=900e9 / 2,
        network=400e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/h200",
        unconfirmed="from pages that quote the data sheet; network: recalled",
    ),
    _gpu(
        "b200",
        peak_flops=2250e12,
        vector_ops=80e12 / 2,
        memory_bandwidth=7700e9,
        memory=0.75 * 180e9,
        link_bandwidth=1800e9 / 2,
        network=400e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/hgx",
        unconfirmed="from pages that quote the data sheet (HGX, 1,000 W); network: recalled",
    ),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _ALL}
"""By the name that a topology begins with: ``v5e`` of ``v5e:16x16``."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip that jax calls so, or None: `TPU v5 lite` is v5e, though `TPU v5`, v5p, begins it too."""
    fitting = [(len(kind), chip.name) for chip in _ALL for kind in chip.kinds if device_kind.startswith(kind)]
    return CHIPS[max(fitting)[1]] if fitting else None


def slices_for(chip: Chip, devices: int) -> int:
    """The fewest slices that hold so many devices."""
    return math.ceil(devices / chip.slice_devices)
