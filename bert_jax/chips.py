"""Performance figures of accelerators, from the manufacturers' pages, and the axis sizes of a mesh.

All figures are per *jax device*: on v3 that is a core, two per chip, so the figures of a chip are halved; on v4, v5p
(two cores that act as one), v5e, v6e and GPUs it is the whole chip. This module does not import jax.

Comments at the tables name the pages, and the figures that are not from them.
"""

from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30
MEMORY_SHARE = 0.9
"""Share of the available memory that a program may use; the rest is for fragmentation and for batches in transfer."""


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


# Calibrated from published runs of other programs; bert_jax's steps on an H200 did not change them. One factor per
# family, fitted by `scripts/benchmarks/calibrate_roofline.py --published` to the runs of planning/published_runs.py,
# on V100 and A100 for GPUs, on v3 for TPUs. So they include the losses of these programs. The ratio of matmul to the
# others is assumed: before the factors, 0.68 (GPUs: products of width 1,024 at 0.85 of the rate of large ones, 790 of
# 989 TFLOP/s measured on an H200, 801 on another one), 0.75 and 0.55 (TPUs, v6e: after the 65 % and 50 % of all
# FLOPs on v5p and v6e in maxtext/docs/reference/models/tiering.md) to 0.9. In bert_large on an H200, products were at
# 0.95 of that rate: with 0.77 instead of 0.68 the fit is 0.44 and 0.52 and no run is nearer (largest error 28 instead
# of 27 %), so it was left. No published BERT run on v4, v5e, v5p or v6e is known: they have the factor of v3.
GPU = Efficiency(0.42, 0.56, 0.56, 0.56, 0.56)
TPU = Efficiency(0.44, 0.52, 0.52, 0.52, 0.52)
TPU_V6 = Efficiency(0.32, 0.52, 0.52, 0.52, 0.52)


@dataclass(frozen=True)
class Chip:
    """One jax device. A slice is a set of devices with fast links: a pod slice of TPUs, a node of GPUs."""

    name: str
    device_kinds: tuple[str, ...]
    """Prefixes of `jax.Device.device_kind`; the longest match counts."""
    peak_flops: float
    """FLOP/s of dense bfloat16 matrix products."""
    vector_ops: float
    """Elementwise float32 or 32-bit integer operations per second."""
    memory_bandwidth: float
    """Bytes/s, reads and writes together."""
    memory: float
    """Bytes that a program may use: on TPUs the compiler's limit; on GPUs the 75 % that jax reserves by default
    (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
    link_bandwidth: float
    """Bytes/s of one link in one direction."""
    network_bandwidth: float
    """Bytes/s in one direction between slices, per device: its share of the host's network cards."""
    torus_dimensions: int
    """Dimensions of the slice's torus, with two links each; 0: a switch, reached by one link."""
    ring_size: int
    """Minimum number of devices along a dimension that closes to a ring; a shorter one is a line with half the
    bandwidth."""
    float32_share: float
    """Share of peak_flops that float32 products reach at jax's default precision: all on TPUs, which use one bfloat16
    pass; half on GPUs, which use TF32."""
    float8_share: float
    """The same of products of 8-bit floats; 0: it has none."""
    clock: float
    """Cycles/s of the estimates in programs for TPUs; 0: programs for GPUs have none."""
    efficiency: Efficiency
    """Fitted by scripts/benchmarks/calibrate_roofline.py, to published runs of the family or to own measurements."""

    @property
    def devices_per_chip(self) -> int:
        """jax devices of a chip, the unit of prices: each of the two cores of a v3 chip is a device."""
        return 2 if self.name == "v3" else 1


_TPU_KINDS = {
    "v3": ("TPU v3",),
    "v4": ("TPU v4",),
    "v5e": ("TPU v5 lite", "TPU v5e"),
    "v5p": ("TPU v5", "TPU v5p"),
    "v6e": ("TPU v6 lite", "TPU v6e"),
}
# fmt: off
# https://cloud.google.com/tpu/docs/v3 and so on. Links: v3, 340 TB/s of all-reduce bandwidth per pod / 1,024 chips / 4
# links = 83 GB/s, halved for a core; v4, 1.1 PB/s per pod / 4,096 chips / 6; v5e and v5p, 400 and 1,200 GB/s both ways
# / 2 / 4 and 6; v6e, 3,200 Gbit/s one way / 4. Networks: v5e 6.4 and v6e 25.6 Tbit/s per pod of 256, v5p 50 Gbit/s per
# chip. Not on these pages: vector_ops, which are lanes x units x clock from papers, v6e's taken as v5e's; the networks
# of v3 and v4, taken as v5e's; the ring_size of v3: only whole pods; the clocks, which are peak_flops / 2 /
# multipliers, these recalled: 2 (v3), 8, 4, 8 units of 128 x 128, 4 of 256 x 256 (v6e).
_TPUS = (
    # name  peak_flops  vector_ops  memory B/s  memory      link B/s               network B/s      torus ring clock
    ("v3",  123e12 / 2, 1.9e12,     900e9 / 2, 15.48 * GIB, 340e12 / 1024 / 4 / 2, 3.125e9 / 2,       2, 32, 0.94e9),
    ("v4",  275e12,     8.6e12,     1200e9,    30.75 * GIB, 1.1e15 / 4096 / 6,     3.125e9,           3, 4,  1.05e9),
    ("v5e", 197e12,     6.1e12,     819e9,     15.75 * GIB, 400e9 / 2 / 4,         6.4e12 / 8 / 256,  2, 16, 1.5e9),
    ("v5p", 459e12,     14.3e12,    2765e9,    95.74 * GIB, 1200e9 / 2 / 6,        50e9 / 8,          3, 4,  1.75e9),
    ("v6e", 918e12,     6.1e12,     1600e9,    31.25 * GIB, 3200e9 / 8 / 4,        25.6e12 / 8 / 256, 2, 16, 1.75e9),
)
# https://www.nvidia.com/en-us/data-center/h100 and so on (b200: hgx). SXM boards of 8 with an NVSwitch; the network is
# one InfiniBand card per GPU, as in NVIDIA's DGX. Not read on these pages: of a100 all but peak_flops and memory, which
# are recalled from the data sheet, as is all of l40s, a PCIe board without NVLink, whose links are PCIe 4.0 x16; the
# others are from pages that quote the data sheets (b200: HGX, 1,000 W), and their networks are recalled.
_GPUS = (
    # name   peak_flops  vector_ops   memory B/s  memory        link B/s    network B/s float8
    ("a100", 312e12,     19.5e12 / 2, 2039e9,     0.75 * 80e9,  600e9 / 2,  200e9 / 8, 0),
    ("l40s", 362e12,     91.6e12 / 2, 864e9,      0.75 * 48e9,  64e9 / 2,   200e9 / 8, 2),
    ("h100", 989e12,     67e12 / 2,   3350e9,     0.75 * 80e9,  900e9 / 2,  400e9 / 8, 2),
    ("h200", 989e12,     67e12 / 2,   4800e9,     0.75 * 141e9, 900e9 / 2,  400e9 / 8, 2),
    ("b200", 2250e12,    80e12 / 2,   7700e9,     0.75 * 180e9, 1800e9 / 2, 400e9 / 8, 2),
)
# fmt: on
_CHIPS = [
    Chip(name, _TPU_KINDS[name], *rest, 1.0, 0, clock, TPU_V6 if name == "v6e" else TPU) for name, *rest, clock in _TPUS
]
_CHIPS += [Chip(name, (f"NVIDIA {name.upper()}",), *rest, 0, 1, 0.5, float8, 0, GPU) for name, *rest, float8 in _GPUS]
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}
"""Chips by name, the first part of a topology's name: ``v5e`` of ``v5e:16x16``."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip with the longest matching prefix, or None: `TPU v5 lite` is v5e, although it starts with `TPU v5`."""
    matches = [
        (len(kind), chip.name) for chip in CHIPS.values() for kind in chip.device_kinds if device_kind.startswith(kind)
    ]
    return CHIPS[max(matches)[1]] if matches else None
