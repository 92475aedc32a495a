"""The mesh, and one table from parameter to PartitionSpec. No other file says PartitionSpec.

Axes: ``data`` splits rows and copies parameters (it spans slices); ``fsdp`` splits rows, parameters and
moments; ``tensor`` splits heads, feed-forward units and the vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.errors import UserError
from bert_jax.training.param_paths import map_with_table, name_leaves

AXES = ("data", "fsdp", "tensor")
DATA_AXES = ("data", "fsdp")
"""Axes over which rows are split; the step is manual over them and automatic over ``tensor``."""

PADDING = {"example_id": -1, "pair_labels": -1}
"""What stands in a row without tokens, where it is not 0: no example, no label."""

# First match wins. Moments have the parameter's path at the end of theirs, so they match the same rule.
SPECS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embeddings/word", ("tensor", "fsdp")),
    (r"embeddings/(position|token_type)", (None, "fsdp")),
    (r"layers/qkv/kernel", (None, "fsdp", None, "tensor", None)),
    (r"layers/qkv/bias", (None, None, "tensor", None)),
    (r"layers/attention_out/kernel", (None, "tensor", None, "fsdp")),
    (r"layers/(up|gate)/kernel", (None, "fsdp", "tensor")),
    (r"layers/(up|gate)/bias", (None, "tensor")),
    (r"layers/down/kernel", (None, "tensor", "fsdp")),
    (r"(embeddings/projection|pooler|transform)/kernel", ("fsdp", None)),
    (r"pair/dense/kernel", ()),
    (r"mlm/bias", ("tensor",)),
    (r"bias|scale", ()),
    (r"count|step|watch/\w+", ()),
)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes data, fsdp and tensor over all devices, real ones or those of a topology.

    Slices (what fast links connect: a TPU pod slice, a node of GPUs) lie one behind the other along data, so that
    fsdp and tensor, which exchange more, never leave one.

    Raises:
      UserError: the axes do not multiply to the number of devices, or data to a multiple of the slices.
    """
    devices = jax.devices() if devices is None else devices
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        # Devices of a single slice's topology, and of some platforms, have no such attribute.
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    data, fsdp, tensor = _axis_sizes(config, len(devices), len(slices))
    # Neighbours on the mesh are neighbours on the torus, whose axes are cut in two only where the sizes ask for it.
    grids = [
        mesh_utils.create_device_mesh((data // len(slices), fsdp, tensor), own, allow_split_physical_axes=True)
        for _, own in sorted(slices.items())
    ]
    # Auto axes: the step says itself which axes are manual; jax.make_mesh now defaults to Explicit.
    return Mesh(np.concatenate(grids), AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(config: MeshConfig, devices: int, slices: int = 1) -> AbstractMesh:
    """The same axes over devices that are not there: programs can be lowered on it, not compiled.

    Raises:
      UserError: as `make_mesh`.
    """
    return AbstractMesh(_axis_sizes(config, devices, slices), AXES, axis_types=(AxisType.Auto,) * 3)


def _axis_sizes(config: MeshConfig, devices: int, slices: int) -> tuple[int, int, int]:
    sizes = [config.data, config.fsdp, config.tensor]
    wanted = f"mesh {config.data} x {config.fsdp} x {config.tensor} (data x fsdp x tensor)"
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise UserError(f"{wanted}: sizes must be positive, and at most one of them -1 for all that is left")
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    if math.prod(sizes) != devices:
        raise UserError(f"{wanted} does not fit {devices} devices: change mesh.data, mesh.fsdp or mesh.tensor")
    if sizes[0] % slices:
        raise UserError(
            f"{wanted}: {devices} devices lie in {slices} slices, which fsdp and tensor may not span: make mesh.data a "
            f"multiple of {slices}"
        )
    return sizes[0], sizes[1], sizes[2]


class Undivided(NamedTuple):
    """A dimension of a parameter that stays whole because an axis of the mesh does not divide it."""

    path: str
    """Of the parameter."""
    dimension: int
    """Which of its dimensions, from 0."""
    size: int
    """Of that dimension."""
    axis: str
    """Of the mesh."""
    bytes: int
    """Of the parameter on each device."""


def undivided(params: Any) -> list[Undivided]:
    """What the table would split, and `state_shardings` does not.

    Args:
      params: parameters with shapes and shardings, abstract or real.
    """
    # A frozenset, because jax takes tuples and lists for parts of the tree.
    wanted = name_leaves(map_with_table(SPECS, lambda axes, leaf: frozenset(enumerate(axes[: leaf.ndim])), params))
    found = []
    for path, leaf in name_leaves(params).items():
        sizes, own = leaf.sharding.mesh.shape, leaf.sharding.shard_shape(leaf.shape)
        found += [
            Undivided(path, i, leaf.shape[i], axis, math.prod(own) * leaf.dtype.itemsize)
            for i, axis in sorted(wanted[path])
            if axis is not None and leaf.shape[i] % sizes[axis]
        ]
    return found


def state_shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """NamedSharding of every leaf of a state, by the table.

    An axis that does not divide its dimension is dropped, and that dimension stays whole: a vocabulary of
    30,522 over 4 devices is copied. So is an axis of one device, which would only leave copies behind.

    Raises:
      LookupError: a leaf that no rule matches.
    """

    def fit(axes: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        axes = axes if leaf.ndim else ()
        divisible = [
            axis if axis and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, leaf.shape, strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*divisible))

    return map_with_table(SPECS, fit, tree)


def row_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Of batches: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Of scalars."""
    return NamedSharding(mesh, PartitionSpec())


def manual_specs(shardings: Any) -> Any:
    """What a function that is manual over `DATA_AXES` is told of each array: its fsdp dimension only."""

    def keep(sharding: NamedSharding) -> PartitionSpec:
        return PartitionSpec(*(axis if axis == "fsdp" else None for axis in sharding.spec))

    return jax.tree.map(keep, shardings)


def row_spec() -> PartitionSpec:
    """Of batches, inside the same function."""
    return PartitionSpec(DATA_AXES)


def gather_parameters(params: Any, shardings: Any) -> Any:
    """Whole parameters from this device's shards (inside the manual region): one all-gather per array."""

    def gather(shard: jax.Array, sharding: NamedSharding) -> jax.Array:
        axis = _fsdp_axis(sharding)
        if axis is None:
            return shard
        return _split_over_tensor(lambda x: jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True), shard, sharding)

    return jax.tree.map(gather, params, shardings)


def sum_over_rows(tree: Any, mesh: Mesh | AbstractMesh, axes: tuple[str, ...] = DATA_AXES) -> Any:
    """Sum over devices that hold other rows (inside the manual region).

    Axes of one device are left out: XLA's CPU backend would really run their all-reduce.
    """
    spread = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return jax.lax.psum(tree, spread) if spread else tree


def reduce_gradients(gradients: Any, shardings: Any) -> Any:
    """Sum over all row axes, leaving each device with the shard it owns: one reduction per array."""

    def reduce(gradient: jax.Array, sharding: NamedSharding) -> jax.Array:
        axis = _fsdp_axis(sharding)
        if axis is None:
            return sum_over_rows(gradient, sharding.mesh)
        scattered = _split_over_tensor(
            lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=axis, tiled=True), gradient, sharding
        )
        return sum_over_rows(scattered, sharding.mesh, ("data",))

    return jax.tree.map(reduce, gradients, shardings)


def _split_over_tensor(use: Callable[[jax.Array], jax.Array], x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """``use(x)`` on each device's part of an array that is split over tensor: left to itself, XLA would make the array
    whole before a collective over fsdp, on every device.
    """
    if "tensor" not in sharding.spec:
        return use(x)
    spec = PartitionSpec(*(axis if axis == "tensor" else None for axis in sharding.spec))
    return jax.shard_map(use, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False)(x)


def _fsdp_axis(sharding: NamedSharding) -> int | None:
    return next((i for i, axis in enumerate(sharding.spec) if axis == "fsdp"), None)


def put_rows(rows: dict[str, np.ndarray], mesh: Mesh, global_rows: int) -> dict[str, jax.Array]:
    """Global arrays from this process's rows; each device receives its own.

    Args:
      rows: this process's share of the batch, [rows, ...].
      mesh: where to.
      global_rows: rows of the arrays to make. If the batch has fewer, those of each device are followed by padding.
    """
    sharding = row_sharding(mesh)
    local = global_rows // jax.process_count()
    shards = math.prod(mesh.shape[axis] for axis in DATA_AXES) // jax.process_count()
    return {
        name: jax.make_array_from_process_local_data(
            sharding, _padded(array, shards, local, PADDING.get(name, 0)), (global_rows, *array.shape[1:])
        )
        for name, array in rows.items()
    }


def _padded(array: np.ndarray, shards: int, rows: int, value: int) -> np.ndarray:
    if len(array) == rows:
        return array
    padded = np.full((shards, rows // shards, *array.shape[1:]), value, array.dtype)
    real = array.reshape(shards, -1, *array.shape[1:])
    padded[:, : real.shape[1]] = real
    return padded.reshape(rows, *array.shape[1:])


def put_everywhere(tree: Any, mesh: Mesh) -> Any:
    """The same small numpy arrays on every device; every process must pass equal ones."""

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, replicated(mesh), lambda index: x[index])

    return jax.tree.map(put, tree)


def check_processes(mesh: Mesh | AbstractMesh, processes: int) -> None:
    """Raise UserError unless every one of so many processes holds rows of its own: that is how they are read."""
    shards = math.prod(mesh.shape[axis] for axis in DATA_AXES)
    if shards % processes:
        raise UserError(
            f"mesh data x fsdp splits rows over {shards} device(s), but there are {processes} processes, which must "
            f"all read rows of their own: make it a multiple of {processes} (mesh.tensor may not span processes)"
        )
    if processes == 1 or isinstance(mesh, AbstractMesh):
        return
    owners = np.array([device.process_index for device in mesh.devices.flat]).reshape(shards, -1)
    if (owners != owners[:, :1]).any():
        raise UserError(
            f"mesh.tensor {mesh.shape['tensor']} spans processes on these devices, and each must have rows of its own: "
            "make it a divisor of the devices of a process"
        )
    _, counts = np.unique(owners[:, 0], return_counts=True)
    if len(set(counts.tolist())) > 1:
        raise UserError(
            f"processes have different numbers of devices ({', '.join(map(str, counts[:8]))}): give each equally many"
        )


def check_heads(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise UserError unless every device of the tensor axis gets whole attention heads, and as many as the others."""
    if model.num_heads % mesh.shape["tensor"]:
        raise UserError(
            f"mesh.tensor {mesh.shape['tensor']} does not divide the {model.num_heads} attention heads "
            "(model.num_heads): use a divisor"
        )


def splittable(rows: int, mesh: Mesh) -> int:
    """As many rows, or a few more, so that all devices get equally many."""
    shards = math.prod(mesh.shape[axis] for axis in DATA_AXES)
    return -(-rows // shards) * shards


def check_rows(batch_size: int, accumulation: int, mesh: Mesh | AbstractMesh, what: str) -> None:
    """Raise UserError unless every device gets the same number of whole micro-batches."""
    shards = math.prod(mesh.shape[axis] for axis in DATA_AXES)
    if batch_size % (shards * accumulation):
        raise UserError(
            f"{what} {batch_size} is not divisible by {shards} row shards (mesh data x fsdp) x accumulation "
            f"{accumulation}: use a multiple of {shards * accumulation}"
        )
