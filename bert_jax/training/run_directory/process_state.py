"""The part of a state that one process has, as bytes: copied from the devices, in one file, and put back.

A file is the CRC-32C of the rest, the length of the metadata, the metadata as JSON, and the arrays.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import jax
import numpy as np

_CHECKSUM_BYTES = 4

Index = tuple[tuple[int, int], ...]
"""A part of an array: first and last + 1 of each dimension."""


class Layout(NamedTuple):
    """What a process's copy of a state has, in its order."""

    key: str
    """Hash of the rest, and `size`: ``HASH-SIZE``."""
    parts: list[tuple[int, Index, tuple[int, ...], np.dtype, int]]
    """Of each part of an array: leaf of the state, index, shape, type and first byte."""
    size: int
    """Bytes."""


def layout_of(state: Any) -> Layout:
    """The layout of the arrays on this process's devices; equal parts on several devices count once.

    Args:
      state: a tree of arrays, or of their shapes with shardings.
    """
    parts, size, digest = [], 0, hashlib.sha256()
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        dtype = np.dtype(leaf.dtype)
        for index in sorted(set(_indices(leaf).values())):
            shape = tuple(end - begin for begin, end in index)
            parts.append((number, index, shape, dtype, size))
            size += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {dtype} {index}\n".encode())
    return Layout(f"{digest.hexdigest()[:32]}-{size}", parts, size)


def _indices(leaf: Any) -> dict[jax.Device, Index]:
    """The part of an array that each of this process's devices has."""
    found = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return {device: _normalized(index, leaf.shape) for device, index in found.items()}


def _normalized(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def copy_to_buffer(state: Any, layout: Layout, buffer: np.ndarray) -> None:
    """Copy the arrays of this process's devices into a buffer; returns when they may be donated."""
    shards = []
    for leaf in jax.tree.leaves(state):
        by_index = {_normalized(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        shards.append(by_index)
    for number, index, *_ in layout.parts:
        shards[number][index].copy_to_host_async()
    for number, index, shape, dtype, begin in layout.parts:
        _view(buffer, shape, dtype, begin)[...] = np.asarray(shards[number][index])


def _view(buffer: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, begin: int) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return buffer[begin : begin + size].view(dtype).reshape(shape)


def file_parts(metadata: dict[str, Any], buffer: np.ndarray) -> list[bytes | memoryview]:
    """The content of a file, in parts that are not copied."""
    text = json.dumps(metadata).encode()
    body = [struct.pack("!Q", len(text)) + text, buffer.data]
    return [_checksum(body), *body]


def _checksum(parts: Sequence[memoryview | bytes]) -> bytes:
    checksum = 0
    for part in parts:
        checksum = google_crc32c.extend(checksum, np.frombuffer(part, np.uint8))
    return struct.pack("!I", checksum)


def read_file(file: Path) -> tuple[dict[str, Any], memoryview] | None:
    """Metadata and arrays of a copy; None if it is damaged."""
    content = memoryview(file.read_bytes())
    if _checksum([content[_CHECKSUM_BYTES:]]) != content[:_CHECKSUM_BYTES]:
        return None
    begin = _CHECKSUM_BYTES + 8
    try:
        (length,) = struct.unpack("!Q", content[_CHECKSUM_BYTES:begin])
        metadata = json.loads(bytes(content[begin : begin + length]))
    except (struct.error, ValueError, OverflowError, RecursionError):
        return None
    return (metadata, content[begin + length :]) if isinstance(metadata, dict) else None


def restore_state(content: memoryview, shapes: Any, layout: Layout) -> Any:
    """The state with these shapes and shardings from the arrays in the copy of this process."""
    buffer = np.frombuffer(content, np.uint8)
    parts = {(number, index): _view(buffer, shape, dtype, begin) for number, index, shape, dtype, begin in layout.parts}
    leaves, tree = jax.tree.flatten(shapes)
    arrays = []
    for number, leaf in enumerate(leaves):
        own = [jax.device_put(parts[number, index], device) for device, index in _indices(leaf).items()]
        arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, own))
    return jax.tree.unflatten(tree, arrays)
