"""What devices send each other in an update, and how fast their links carry it. Arithmetic only.

The step (training/step.py) gathers parameters over fsdp once per update, reduces gradients once per update, by
scattering over fsdp and then over data, all in float32, and lets XLA split products over tensor, which costs
all-reduces in every layer of every micro-batch. Collectives are rings in every dimension of the torus at once:
gathering or scattering n parts of V bytes in all sends (n - 1)/n V from each device, all-reducing twice that.
Across slices only what a device of the slice has left after scattering goes over the network.
"""

import math
from typing import NamedTuple

from bert_jax.chips import Chip, Sizes
from bert_jax.planning.workload import Workload, split

FLOAT32 = 4
ALL_REDUCES = {"none": 4, "dots": 4, "full": 6}
"""Of a layer's activations over tensor, by remat: attention's and the feed-forward's output, the gradients of both
inputs, and with `full` both outputs again."""


class Collectives(NamedTuple):
    """Bytes that each device sends in one update."""

    data: float = 0.0
    """Within the slice, along the data axis."""
    fsdp: float = 0.0
    tensor: float = 0.0
    network: float = 0.0
    """To other slices."""


def expected_collectives(work: Workload) -> Collectives:
    """What the step must send, by its shapes."""
    sizes, parameters, model = work.sizes, work.parameters, work.model
    inside = sizes.data // sizes.slices
    copied = parameters.whole - parameters.gathered
    mine = FLOAT32 * (parameters.gathered / sizes.fsdp + copied)
    fsdp = FLOAT32 * _others(sizes.fsdp) * (2 * parameters.gathered + 2 * copied)
    data = 2 * _others(inside) * mine
    network = 2 * _others(sizes.slices) * mine / inside
    layers = ALL_REDUCES[model.remat] * model.num_layers * work.tokens * model.hidden_size * work.activation_bytes
    # A split table: each device looks up its own rows, and the sum is every token's embedding; the same backwards
    # for the positions that it decodes.
    tables = FLOAT32 * model.embedding_width * (work.tokens + work.rows * work.predictions)
    table_is_split = split(model.vocab_size, sizes.tensor) < model.vocab_size
    tensor = 2 * _others(sizes.tensor) * (layers + tables * table_is_split) * work.micro_batches
    return Collectives(data, fsdp, tensor, network)


def _others(devices: int) -> float:
    """Share of an array that lies on other devices."""
    return (devices - 1) / devices


def link_seconds(collectives: Collectives, sizes: Sizes, chip: Chip) -> dict[str, float]:
    """Seconds for each axis, and for the network between slices; nothing of it at the same time.

    Args:
      collectives: bytes that each device sends.
      sizes: of the mesh.
      chip: what it consists of.
    """
    inside = sizes.data // sizes.slices
    lengths = {"data": inside, "fsdp": sizes.fsdp, "tensor": sizes.tensor}
    devices = math.prod(lengths.values())
    seconds = {
        axis: getattr(collectives, axis) / axis_bandwidth(chip, length, devices) for axis, length in lengths.items()
    }
    return seconds | {"network": collectives.network / chip.network_bandwidth}


def axis_bandwidth(chip: Chip, length: int, devices: int) -> float:
    """Bytes/s that each device sends in a collective over `length` neighbours, in a slice of so many devices.

    The slice is taken for a cube; an axis longer than its side lies along several dimensions and uses the links of
    all of them. A dimension too short to be closed to a ring is a line, whose ends have one link: half the speed.
    """
    if not chip.torus_dimensions:
        return chip.link_bandwidth
    side = max(2.0, devices ** (1 / chip.torus_dimensions))
    dimensions = min(chip.torus_dimensions, max(1, math.ceil(math.log(max(2, length)) / math.log(side) - 1e-9)))
    closed = length ** (1 / dimensions) >= chip.ring_size - 1e-9
    return 2 * dimensions * chip.link_bandwidth * (1.0 if closed else 0.5)
