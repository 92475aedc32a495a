"""Bytes that devices send each other per step, and the time on their links. Arithmetic only.

The step (training/step.py) gathers parameters over fsdp once per step and reduces gradients once per step, by a
reduce-scatter over fsdp and then a reduction over data, all in float32. XLA splits matrix products over tensor, which
costs all-reduces in every layer of every micro-batch. Collectives are rings in all dimensions of the torus at once: an
all-gather or reduce-scatter of V bytes over n devices sends (n - 1)/n V from each device, an all-reduce twice that.
Between slices, only the part of a device after the reduce-scatter crosses the network.
"""

import math
from typing import NamedTuple

from bert_jax.chips import Chip, Sizes
from bert_jax.planning.workload import Workload, shard_size

FLOAT32 = 4
ALL_REDUCES = {"none": 4, "dots": 4, "full": 6}
"""All-reduces of a layer's activations over tensor, by remat: outputs of attention and feed-forward, gradients of both
inputs, and with `full` both outputs again."""


class CollectiveBytes(NamedTuple):
    """Bytes that each device sends in one step, by axis."""

    data: float = 0.0
    """Within the slice, along the data axis."""
    fsdp: float = 0.0
    tensor: float = 0.0
    network: float = 0.0
    """Between slices."""


def expected_collectives(work: Workload) -> CollectiveBytes:
    """Bytes that the step must send, computed from its shapes."""
    sizes, parameters, model = work.sizes, work.parameters, work.model
    inside = sizes.data // sizes.slices
    copied = parameters.whole - parameters.gathered
    per_device = FLOAT32 * (parameters.gathered / sizes.fsdp + copied)
    fsdp = FLOAT32 * _remote_share(sizes.fsdp) * (2 * parameters.gathered + 2 * copied)
    data = 2 * _remote_share(inside) * per_device
    network = 2 * _remote_share(sizes.slices) * per_device / inside
    layers = ALL_REDUCES[model.remat] * model.num_layers * work.tokens * model.hidden_size * work.activation_bytes
    # A split table: each device looks up its own rows, and the sum over devices is the embedding of every token; the
    # backward pass of the decoded positions does the same.
    tables = FLOAT32 * model.embedding_width * (work.tokens + work.rows * work.predictions)
    table_is_split = shard_size(model.vocab_size, sizes.tensor) < model.vocab_size
    tensor = 2 * _remote_share(sizes.tensor) * (layers + tables * table_is_split) * work.micro_batches
    return CollectiveBytes(data, fsdp, tensor, network)


def _remote_share(devices: int) -> float:
    """Share of an array that is on other devices."""
    return (devices - 1) / devices


def link_seconds(collectives: CollectiveBytes, sizes: Sizes, chip: Chip) -> dict[str, float]:
    """Seconds for each axis, and for the network between slices, without overlap.

    Args:
      collectives: bytes that each device sends.
      sizes: of the mesh.
      chip: kind of the devices.
    """
    inside = sizes.data // sizes.slices
    lengths = {"data": inside, "fsdp": sizes.fsdp, "tensor": sizes.tensor}
    devices = math.prod(lengths.values())
    seconds = {
        axis: getattr(collectives, axis) / axis_bandwidth(chip, length, devices) for axis, length in lengths.items()
    }
    return seconds | {"network": collectives.network / chip.network_bandwidth}


def axis_bandwidth(chip: Chip, length: int, devices: int) -> float:
    """Bytes/s that each device sends in a collective over `length` neighbours, in a slice of `devices` devices.

    The slice is assumed to be a cube; an axis longer than its side spans several dimensions and uses the links of all
    of them. A dimension too short for a closed ring is a line, whose ends have one link: half the bandwidth.
    """
    if not chip.torus_dimensions:
        return chip.link_bandwidth
    side = max(2.0, devices ** (1 / chip.torus_dimensions))
    dimensions = min(chip.torus_dimensions, max(1, math.ceil(math.log(max(2, length)) / math.log(side) - 1e-9)))
    closed = length ** (1 / dimensions) >= chip.ring_size - 1e-9
    return 2 * dimensions * chip.link_bandwidth * (1.0 if closed else 0.5)
