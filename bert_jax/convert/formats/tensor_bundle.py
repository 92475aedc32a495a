"""Reads and writes TensorFlow's checkpoints ("tensor bundle", format V2) without TensorFlow.

``PREFIX.index`` is a table (leveldb_table.py): the empty key has a header, each tensor's name an entry with dtype,
shape, CRC-32C and position in one of the files ``PREFIX.data-00000-of-00002``, which consist of the tensors' bytes.

Source: tensorflow v2.21, core/protobuf/tensor_bundle.proto, core/util/tensor_bundle/{tensor_bundle.h,naming.h},
core/framework/types.proto; tests compare with TensorFlow.
"""

from collections.abc import Mapping
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from bert_jax.convert.formats import leveldb_table
from bert_jax.convert.tensors import LazyTensor, LazyTensors
from bert_jax.errors import UserError, require
from bert_jax.storage import StoredPath, is_remote, write_atomic

VERSION = 1
CRC_BYTES = 1 << 24
"""Bytes that are read at a time to verify a tensor."""
STRING = 7
DTYPES: dict[int, np.dtype] = {
    number: np.dtype(kind).newbyteorder("<")
    for number, kind in {
        1: np.float32,
        2: np.float64,
        3: np.int32,
        4: np.uint8,
        5: np.int16,
        6: np.int8,
        9: np.int64,
        10: np.bool_,
        14: ml_dtypes.bfloat16,
        17: np.uint16,
        19: np.float16,
        22: np.uint32,
        23: np.uint64,
    }.items()
}
"""By TensorFlow's number (DataType of types.proto)."""

# Message name -> fields: name, number, type. An enum is encoded like an int32.
_MESSAGES = {
    "Version": (("producer", 1, "int32"), ("min_consumer", 2, "int32")),
    "Header": (("num_shards", 1, "int32"), ("endianness", 2, "int32"), ("version", 3, "Version")),
    "Dim": (("size", 1, "int64"),),
    "Shape": (("dim", 2, "repeated Dim"), ("unknown_rank", 3, "bool")),
    "Slice": (),
    "Entry": (
        ("dtype", 1, "int32"),
        ("shape", 2, "Shape"),
        ("shard_id", 3, "int32"),
        ("offset", 4, "int64"),
        ("size", 5, "int64"),
        ("crc32c", 6, "fixed32"),
        ("slices", 7, "repeated Slice"),
    ),
}


def _message_classes() -> dict[str, Any]:
    package = "bert_jax.tensor_bundle"
    file = descriptor_pb2.FileDescriptorProto(name="bert_jax/tensor_bundle.proto", package=package, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        message_type = file.message_type.add(name=message)
        for name, number, kind in fields:
            label = kinds.LABEL_REPEATED if kind.startswith("repeated ") else kinds.LABEL_OPTIONAL
            field = message_type.field.add(name=name, number=number, label=label)
            kind = kind.removeprefix("repeated ")
            if kind in _MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _MESSAGES
    }


_classes = _message_classes()
_Header, _Entry = _classes["Header"], _classes["Entry"]


def index_path(prefix: StoredPath) -> StoredPath:
    """The index file of a checkpoint."""
    return prefix.parent / f"{prefix.name}.index"


def shard_path(prefix: StoredPath, shard: int, num_shards: int) -> StoredPath:
    """One of the files with the tensors' bytes."""
    return prefix.parent / f"{prefix.name}.data-{shard:05}-of-{num_shards:05}"


def is_table(path: StoredPath) -> bool:
    """Whether a file is a table of TensorFlow: an index, or a checkpoint of the format V1."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - len(leveldb_table.MAGIC)))
        return file.read() == leveldb_table.MAGIC


def open_bundle(prefix: StoredPath) -> LazyTensors:
    """The tensors of a checkpoint by name, sorted, without strings. From disk each is a read-only memory map.

    Dtypes are numpy's names, or TensorFlow's number if numpy has no such type. The checksum of a tensor is verified
    when it is read.

    Args:
      prefix: path without ``.index``.

    Raises:
      UserError: a file is missing, truncated or damaged, or the checkpoint is not supported: format V1, big-endian,
        partitioned variables, compressed blocks; on access: the tensor is damaged, or numpy does not have its dtype.
    """
    index = index_path(prefix)
    try:
        content = index.read_bytes()
    except FileNotFoundError as error:
        raise UserError(_absent(prefix)) from error
    items = dict(leveldb_table.read_table(content, str(index)))
    num_shards = _read_header(items.pop(b"", b""), index)
    entries = {}
    for key, value in items.items():
        name = key.decode(errors="backslashreplace")
        entries[name] = _read_entry(name, value, num_shards, index)
    _check_shards(prefix, num_shards, entries)
    return LazyTensors(
        {
            name: _lazy(name, entry, shard_path(prefix, entry.shard_id, num_shards), index)
            for name, entry in entries.items()
            if entry.dtype != STRING
        }
    )


def _lazy(name: str, entry: Any, path: StoredPath, index: StoredPath) -> LazyTensor:
    dtype, shape = DTYPES.get(entry.dtype), _shape(entry)

    def read() -> np.ndarray:
        require(dtype is not None, f"{index}: tensor '{name}' has TensorFlow's dtype {entry.dtype}: unsupported")
        raw = _read_bytes(path, entry.offset, entry.size)
        if _stored_crc(raw) != entry.crc32c:
            raise UserError(f"{path}: tensor '{name}' is damaged (CRC-32C); copy or download the file again")
        return raw.view(dtype).reshape(shape)

    return LazyTensor(shape, dtype.name if dtype else f"number {entry.dtype} of TensorFlow", read)


def _shape(entry: Any) -> tuple[int, ...]:
    return tuple(dim.size for dim in entry.shape.dim)


def _read_header(value: bytes, index: StoredPath) -> int:
    """The number of shards."""
    header = _parse(_Header, value, "the header", index)
    require(header.num_shards > 0, f"{index}: not a checkpoint of TensorFlow: it has no header")
    require(header.endianness == 0, f"{index}: written on a big-endian machine, which is not supported")
    oldest = header.version.min_consumer
    require(oldest <= VERSION, f"{index}: its format {oldest} is newer than the supported {VERSION}")
    return header.num_shards


def _read_entry(name: str, value: bytes, num_shards: int, index: StoredPath) -> Any:
    entry = _parse(_Entry, value, f"tensor '{name}'", index)
    if entry.slices:
        advice = "save it again without a partitioner"
        raise UserError(f"{index}: variable '{name}' is partitioned, which is not supported: {advice}")
    shape, dtype = _shape(entry), DTYPES.get(entry.dtype)
    whole = dtype is None or entry.size == dtype.itemsize * np.prod(shape, dtype=object)
    if not whole or not 0 <= entry.shard_id < num_shards or min(entry.offset, *shape, 0) < 0:
        raise UserError(f"{index}: the entry of tensor '{name}' contradicts itself; copy the file again")
    return entry


def _parse(message: Any, value: bytes, what: str, index: StoredPath) -> Any:
    try:
        return message.FromString(value)
    except DecodeError as error:
        raise UserError(f"{index}: {what} cannot be read; copy or download the file again") from error


def _check_shards(prefix: StoredPath, num_shards: int, entries: Mapping[str, Any]) -> None:
    """Raise UserError for a file with tensors that is missing or truncated."""
    for shard in range(num_shards):
        path = shard_path(prefix, shard, num_shards)
        inside = {name: entry for name, entry in entries.items() if entry.shard_id == shard}
        if not path.exists():
            target = index_path(prefix).name
            raise UserError(f"{path} is missing, with {len(inside)} tensors: copy it to the directory of {target}")
        with path.open("rb") as file:
            size = file.seek(0, 2)
        for name, entry in inside.items():
            if entry.offset + entry.size > size:
                raise UserError(f"{path}: truncated, tensor '{name}' is not in it; copy or download it again")


def _absent(prefix: StoredPath) -> str:
    if is_table(prefix):
        advice = "save it again with TensorFlow's tf.train.Saver, which writes V2"
        return f"{prefix}: a checkpoint of TensorFlow's format V1 (one file), which is not supported: {advice}"
    return f"{index_path(prefix)} is missing: {prefix} is not a checkpoint of TensorFlow"


def _read_bytes(path: StoredPath, offset: int, size: int) -> np.ndarray:
    """uint8[size] of a file."""
    if size and not is_remote(path):
        return np.memmap(path, np.uint8, mode="r", offset=offset, shape=(size,)).view(np.ndarray)
    with path.open("rb") as file:
        file.seek(offset)
        return np.frombuffer(file.read(size), np.uint8)


def _stored_crc(raw: np.ndarray) -> int:
    """The CRC-32C in the form of an entry, of uint8[bytes]."""
    crc = 0
    for start in range(0, raw.size, CRC_BYTES):
        crc = google_crc32c.extend(crc, raw[start : start + CRC_BYTES].tobytes())
    return leveldb_table.mask(crc)


def write(prefix: StoredPath, tensors: Mapping[str, np.ndarray], block_bytes: int = leveldb_table.BLOCK_BYTES) -> None:
    """Write a checkpoint in one shard that TensorFlow reads; equal tensors give equal bytes.

    The index is written last, so that an interrupted write leaves no checkpoint.

    Args:
      prefix: path without ``.index``; its directory exists.
      tensors: by name; each is read once, in the order of the names.
      block_bytes: of the index; see make_table.

    Raises:
      UserError: TensorFlow does not have a tensor's dtype.
    """
    numbers = {dtype: number for number, dtype in DTYPES.items()}
    header = _Header(num_shards=1)
    header.version.producer = VERSION
    items, offset = [(b"", header.SerializeToString(deterministic=True))], 0
    with shard_path(prefix, 0, 1).open("wb") as file:
        for key, name in sorted((name.encode(), name) for name in tensors):
            array = np.asarray(tensors[name])
            dtype = array.dtype.newbyteorder("<")
            require(
                dtype in numbers, f"{prefix}: tensor '{name}' has dtype {array.dtype}, which TensorFlow does not have"
            )
            raw = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
            entry = _Entry(dtype=numbers[dtype], offset=offset, size=raw.size, crc32c=_stored_crc(raw))
            for size in array.shape:
                entry.shape.dim.add(size=size)
            items.append((key, entry.SerializeToString(deterministic=True)))
            file.write(raw.data)
            offset += raw.size
    write_atomic(index_path(prefix), leveldb_table.make_table(items, block_bytes))
