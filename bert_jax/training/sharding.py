"""The mesh, and one table from parameter to PartitionSpec. No other file uses PartitionSpec.

Axes: ``data`` splits rows and replicates parameters (it spans slices); ``fsdp`` splits rows, parameters and
moments; ``tensor`` splits heads, feed-forward units and the vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.distributed.agreement import all_gather
from bert_jax.errors import UserError, require
from bert_jax.training.param_paths import map_with_table, name_leaves

AXES = ("data", "fsdp", "tensor")
DATA_AXES = ("data", "fsdp")
"""Axes over which rows are split; the step is manual over them, and automatic over ``tensor`` where it splits."""

PADDING = {"example_id": -1, "pair_labels": -1}
"""Values of padding rows other than 0: no example, no label."""

# First match wins. Paths of moments end with the path of their parameter, so they match the same rule.
SPECS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embeddings/word", ("tensor", "fsdp")),
    (r"embeddings/(position|token_type)", (None, "fsdp")),
    (r"layers/(qkv|query_key)/kernel", (None, "fsdp", None, "tensor", None)),
    (r"layers/(qkv|query_key)/bias", (None, None, "tensor", None)),
    (r"layers/value/kernel", (None, "fsdp", "tensor", None)),
    (r"layers/value/bias", (None, "tensor", None)),
    (r"layers/attention_out/kernel", (None, "tensor", None, "fsdp")),
    (r"layers/(networks/\d/)?(up|gate)/kernel", (None, "fsdp", "tensor")),
    (r"layers/(networks/\d/)?(up|gate)/bias", (None, "tensor")),
    (r"layers/(networks/\d/)?down/kernel", (None, "tensor", "fsdp")),
    (r"layers/bottleneck/(input|attention)/kernel", (None, "fsdp", None)),
    (r"layers/bottleneck/output/kernel", (None, None, "fsdp")),
    (r"(embeddings/projection|pooler|transform)/kernel", ("fsdp", None)),
    (r"(pair/dense|task/\w+|projections/\w+)/kernel", ()),
    (r"layers/\w+_adapter/(down|up)/kernel", ()),
    (r"task/(mix/weights|cls_norm/(mean|std|variance))", ()),
    (r"mlm/extra_columns", ("tensor", "fsdp")),
    (r"mlm/bias", ("tensor",)),
    (r"bias|scale", ()),
    (r"count|step|divergence/\w+", ()),
    (r"optimizer/.*", ()),  # constants of an optimizer
)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes data, fsdp and tensor over all devices, real ones or those of a topology.

    Slices (sets of devices with fast links: a TPU pod slice, a node of GPUs) are consecutive along data, so that fsdp
    and tensor, which communicate more, never cross slices.

    Raises:
      UserError: the product of the axes is not the number of devices, or data is not a multiple of the slices.
    """
    devices = jax.devices() if devices is None else devices
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        # Devices of a single slice's topology, and of some platforms, have no such attribute.
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    data, fsdp, tensor = _axis_sizes(config, len(devices), len(slices))
    # Neighbours on the mesh are neighbours on the torus; a physical axis is split only if the sizes require it.
    grids = [
        mesh_utils.create_device_mesh((data // len(slices), fsdp, tensor), members, allow_split_physical_axes=True)
        for _, members in sorted(slices.items())
    ]
    # Auto axes: the step declares its manual axes with shard_map; jax.make_mesh now defaults to Explicit.
    return Mesh(np.concatenate(grids), AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(config: MeshConfig, devices: int, slices: int = 1) -> AbstractMesh:
    """The same axes without devices: programs can be lowered on this mesh, not compiled.

    Raises:
      UserError: as `make_mesh`.
    """
    return AbstractMesh(_axis_sizes(config, devices, slices), AXES, axis_types=(AxisType.Auto,) * 3)


def _axis_sizes(config: MeshConfig, devices: int, slices: int) -> tuple[int, int, int]:
    sizes = [config.data, config.fsdp, config.tensor]
    shown = f"mesh {config.data} x {config.fsdp} x {config.tensor} (data x fsdp x tensor)"
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise UserError(f"{shown}: sizes must be positive, and at most one of them -1 for all remaining devices")
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    if math.prod(sizes) != devices:
        raise UserError(f"{shown} does not fit {devices} devices: change mesh.data, mesh.fsdp or mesh.tensor")
    if sizes[0] % slices:
        raise UserError(
            f"{shown}: {devices} devices are in {slices} slices, which fsdp and tensor must not cross: make mesh.data "
            f"a multiple of {slices}"
        )
    return sizes[0], sizes[1], sizes[2]


class UnshardedDimension(NamedTuple):
    """A dimension of a parameter that is not sharded because the mesh axis does not divide it."""

    path: str
    """Path of the parameter."""
    dimension: int
    """Index of the dimension, from 0."""
    size: int
    """Size of that dimension."""
    axis: str
    """Axis of the mesh."""
    bytes: int
    """Size of the parameter on each device."""


def unsharded_dimensions(params: Any) -> list[UnshardedDimension]:
    """The dimensions that the table would shard but `state_shardings` does not.

    Args:
      params: parameters with shapes and shardings, abstract or real.
    """
    # A frozenset, because jax treats tuples and lists as parts of the tree.
    rules = name_leaves(map_with_table(SPECS, lambda axes, leaf: frozenset(enumerate(axes[: leaf.ndim])), params))
    unsharded = []
    for path, leaf in name_leaves(params).items():
        sizes, shard = leaf.sharding.mesh.shape, leaf.sharding.shard_shape(leaf.shape)
        unsharded += [
            UnshardedDimension(path, i, leaf.shape[i], axis, math.prod(shard) * leaf.dtype.itemsize)
            for i, axis in sorted(rules[path])
            if axis is not None and leaf.shape[i] % sizes[axis]
        ]
    return unsharded


def state_shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """NamedSharding of every leaf of a state, by the table.

    An axis that does not divide its dimension is dropped, and that dimension is replicated: a vocabulary of 30,522
    over 4 devices, for example. An axis of one device is dropped, too, because it would only cause copies.

    Raises:
      LookupError: no rule matches a leaf.
    """

    def fit(axes: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        axes = axes if leaf.ndim else ()
        divisible = [
            axis if axis and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, leaf.shape, strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*divisible))

    return map_with_table(SPECS, fit, tree)


def device_kind(mesh: Mesh | AbstractMesh) -> str:
    """The kind of the devices, as jax has it; "" for an abstract mesh."""
    return "" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Number of parts that the rows of a batch are split into: the product of the data axes."""
    return math.prod(mesh.shape[axis] for axis in DATA_AXES)


def row_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Sharding of batches: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Sharding of scalars: the same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def manual_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Axes over which the step is manual: also tensor where it splits nothing, as attention by kernels cannot be
    partitioned automatically.
    """
    return set(AXES if mesh.shape["tensor"] == 1 else DATA_AXES)


def manual_specs(shardings: Any) -> Any:
    """Specs of arrays for a function that is manual over `manual_axes`: their fsdp dimension only."""

    def keep(sharding: NamedSharding) -> PartitionSpec:
        return PartitionSpec(*(axis if axis == "fsdp" else None for axis in sharding.spec))

    return jax.tree.map(keep, shardings)


def row_spec() -> PartitionSpec:
    """Spec of batches for the same function."""
    return PartitionSpec(DATA_AXES)


def sum_over_rows(tree: Any, mesh: Mesh | AbstractMesh, axes: tuple[str, ...] = DATA_AXES) -> Any:
    """Sum over devices with different rows (inside the manual region).

    Axes of one device are omitted: XLA's CPU backend would execute their all-reduce.
    """
    used = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return jax.lax.psum(tree, used) if used else tree


def sum_over_devices(x: jax.Array) -> jax.Array:
    """Sum over devices with different rows inside the manual region; `x` outside of it.

    Its gradient is the sum of the devices' gradients: with ``check_vma=False``, the transpose of a psum is a psum.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return sum_over_rows(x, mesh, tuple(axis for axis in DATA_AXES if axis in mesh.manual_axes))


def split_over_tensor(use: Callable[[jax.Array], jax.Array], x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """``use(x)`` on each device's part of an array that is split over tensor. Without this, XLA would gather the array
    over tensor before a collective over fsdp.
    """
    if "tensor" not in sharding.spec:
        return use(x)
    spec = PartitionSpec(*(axis if axis == "tensor" else None for axis in sharding.spec))
    return jax.shard_map(use, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False)(x)


def fsdp_axis(sharding: NamedSharding) -> int | None:
    """The dimension that is split over fsdp; None: none."""
    return next((i for i, axis in enumerate(sharding.spec) if axis == "fsdp"), None)


def replica_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """The axes of several devices along which all have the same part of an array."""
    split = jax.tree.leaves(tuple(sharding.spec))
    return tuple(axis for axis in AXES if axis not in split and sharding.mesh.shape[axis] > 1)


def compute_on_each_device(compute: Callable[[Any], jax.Array], shardings: Any) -> Callable[[Any], jax.Array]:
    """A function of arrays that returns ``compute(parts)`` of each device's parts of them, [data, fsdp, tensor, ...].

    Args:
      compute: without collectives.
      shardings: of the arrays, a tree.
    """
    specs, mesh = jax.tree.map(lambda x: x.spec, shardings), jax.tree.leaves(shardings)[0].mesh

    def with_place(parts: Any) -> jax.Array:
        return compute(parts)[None, None, None]

    return jax.shard_map(with_place, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(*AXES), check_vma=False)


def put_rows(rows: dict[str, np.ndarray], mesh: Mesh, global_rows: int) -> dict[str, jax.Array]:
    """Global arrays from this process's rows; each device receives its part.

    Args:
      rows: this process's rows of the batch, [rows, ...].
      mesh: of the run.
      global_rows: rows of the global arrays. If the batch has fewer, the rows of each device are followed by padding.
    """
    sharding = row_sharding(mesh)
    local = global_rows // jax.process_count()
    shards = row_shards(mesh) // jax.process_count()
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


def put_replicated(tree: Any, mesh: Mesh) -> Any:
    """Small numpy arrays, replicated on every device; all processes must pass equal values."""

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, replicated(mesh), lambda index: x[index])

    return jax.tree.map(put, tree)


def put_equal(tree: Any, shardings: Any, origin: object) -> Any:
    """Global arrays from numpy arrays that every process has read for itself; each device receives its part.

    The processes compare one checksum of all arrays. `jax.device_put` would gather every array from every process.

    Args:
      tree: the same arrays on all processes.
      shardings: a tree of NamedSharding.
      origin: what they were read from, for the message.

    Raises:
      UserError: a process has other arrays than process 0.
    """
    if jax.process_count() > 1:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(tree):
            digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
        digests = all_gather("a checksum of arrays", digest.hexdigest())
        others = [process for process, one in enumerate(digests) if one != digests[0]]
        require(
            not others,
            f"process(es) {', '.join(map(str, others[:8]))} read other parameters from {origin} than process 0: give "
            "all hosts the same files",
        )

    def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])

    return jax.tree.map(put, tree, shardings)


def check_processes(mesh: Mesh | AbstractMesh, processes: int) -> None:
    """Raise UserError unless each process has devices for rows of its own: every process reads its rows."""
    shards = row_shards(mesh)
    if shards % processes:
        raise UserError(
            f"mesh data x fsdp splits rows over {shards} device(s), but there are {processes} processes, which must "
            f"all read rows of their own: make it a multiple of {processes} (mesh.tensor must not span processes)"
        )
    if processes == 1 or isinstance(mesh, AbstractMesh):
        return
    owners = np.array([device.process_index for device in mesh.devices.flat]).reshape(shards, -1)
    if (owners != owners[:, :1]).any():
        raise UserError(
            f"mesh.tensor {mesh.shape['tensor']} spans processes on these devices, and each must have rows of its own: "
            "make it a divisor of the number of devices of a process"
        )
    _, counts = np.unique(owners[:, 0], return_counts=True)
    if len(set(counts.tolist())) > 1:
        raise UserError(
            f"processes have different numbers of devices ({', '.join(map(str, counts[:8]))}): give each the same "
            "number"
        )


def check_heads(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise UserError unless all devices of the tensor axis get the same number of attention heads."""
    if model.num_heads % mesh.shape["tensor"]:
        raise UserError(
            f"mesh.tensor {mesh.shape['tensor']} does not divide the {model.num_heads} attention heads "
            "(model.num_heads): use a divisor"
        )


def round_up_to_shards(rows: int, mesh: Mesh | AbstractMesh) -> int:
    """`rows`, rounded up to a multiple of the row shards."""
    shards = row_shards(mesh)
    return -(-rows // shards) * shards


def check_rows(batch_size: int, accumulation: int, mesh: Mesh | AbstractMesh, field: str) -> None:
    """Raise UserError unless every device gets the same number of rows in each micro-batch."""
    shards = row_shards(mesh)
    if batch_size % (shards * accumulation):
        raise UserError(
            f"{field} {batch_size} is not divisible by {shards} row shards (mesh data x fsdp) x accumulation "
            f"{accumulation}: use a multiple of {shards * accumulation}"
        )
