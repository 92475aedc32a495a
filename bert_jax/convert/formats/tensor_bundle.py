"""Reads and writes TensorFlow's checkpoints ("tensor bundle", format V2) without TensorFlow.

``PREFIX.index`` is a table (leveldb_table.py): the empty key has a header, each tensor's name an entry with dtype,
shape, CRC-32C and position in one of the files ``PREFIX.data-00000-of-00002``, which consist of the tensors' bytes.

Source: tensorflow v2.21, core/protobuf/tensor_bundle.proto, core/util/tensor_bundle/{tensor_bundle.h,naming.h},
core/framework/types.proto; tests compare with TensorFlow.
"""

import math
from collections.abc import Mapping
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from bert_jax.convert.formats import leveldb_table
from bert_jax.convert.tensors import LazyStateDict, LazyTensor
from bert_jax.errors import UserError, require
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath

VERSION = 1
DTYPES: dict[int, np.dtype] = {
    number: np.dtype(kind).newbyteorder("<")
    for number, kind in {
        1: np.float32,
        2: np.float64,
        3: np.int32,
        9: np.int64,
        14: ml_dtypes.bfloat16,
        19: np.float16,
    }.items()
}
"""Those of weights and step counts, by TensorFlow's number (DataType of types.proto)."""

# Message name -> fields: name, number, type. An enum is encoded like an int32.
_MESSAGES = {
    "Version": (("producer", 1, "int32"), ("min_consumer", 2, "int32")),
    "Header": (("num_shards", 1, "int32"), ("endianness", 2, "int32"), ("version", 3, "Version")),
    "Dim": (("size", 1, "int64"),),
    "Shape": (("dim", 2, "repeated Dim"),),
    "Entry": (
        ("dtype", 1, "int32"),
        ("shape", 2, "Shape"),
        ("shard_id", 3, "int32"),
        ("offset", 4, "int64"),
        ("size", 5, "int64"),
        ("crc32c", 6, "fixed32"),
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


def open_bundle(prefix: StoredPath) -> LazyStateDict:
    """The tensors of a checkpoint by name, sorted, without those whose dtype is not in DTYPES, such as strings.

    The checksum of a tensor is verified when it is read.

    Args:
      prefix: path without ``.index``.

    Raises:
      UserError: the index is truncated or damaged, or not supported: big-endian, partitioned variables, compressed
        blocks; on access: the file of the tensor is missing or damaged.
    """
    index = index_path(prefix)
    items = dict(leveldb_table.read_table(index.read_bytes(), str(index)))
    header = _parse(_Header, items.pop(b"", b""), "the header", index)
    supported = header.num_shards > 0 and header.endianness == 0 and header.version.min_consumer <= VERSION
    require(supported, f"{index}: not a checkpoint of TensorFlow, or of a kind that is not supported")
    tensors = {}
    for key, value in items.items():
        name = key.decode(errors="backslashreplace")
        entry = _parse(_Entry, value, f"tensor '{name}'", index)
        if entry.dtype in DTYPES:
            tensors[name] = _lazy(name, entry, shard_path(prefix, entry.shard_id, header.num_shards), index)
    return LazyStateDict(tensors)


def _parse(message: Any, value: bytes, what: str, index: StoredPath) -> Any:
    try:
        return message.FromString(value)
    except DecodeError as error:
        raise UserError(f"{index}: {what} cannot be read; copy or download the file again") from error


def _lazy(name: str, entry: Any, path: StoredPath, index: StoredPath) -> LazyTensor:
    dtype, shape = DTYPES[entry.dtype], tuple(dim.size for dim in entry.shape.dim)
    whole = entry.size == dtype.itemsize * math.prod(shape) and min(shape, default=0) >= 0
    require(whole, f"{index}: the entry of tensor '{name}' is damaged, or of a partitioned variable")

    def read() -> np.ndarray:
        try:
            raw = np.fromfile(path, np.uint8, entry.size, offset=entry.offset)
        except OSError as error:
            raise UserError(f"{path} with tensor '{name}' cannot be read: copy or download it again") from error
        if _stored_crc(raw) != entry.crc32c:
            raise UserError(f"{path}: tensor '{name}' is damaged (CRC-32C): copy or download the file again")
        return raw.view(dtype).reshape(shape)

    return LazyTensor(shape, dtype.name, read)


def _stored_crc(raw: np.ndarray) -> int:
    """The CRC-32C in the form of an entry, of uint8[bytes]."""
    return leveldb_table.mask(google_crc32c.value(raw.tobytes()))


def write(prefix: StoredPath, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a checkpoint in one shard that TensorFlow reads; equal tensors give equal bytes.

    The index is written last, so that an interrupted write leaves no checkpoint.

    Args:
      prefix: path without ``.index``; its directory exists.
      tensors: by name, with a dtype of DTYPES; each is read once, in the order of the names.
    """
    numbers = {dtype: number for number, dtype in DTYPES.items()}
    header = _Header(num_shards=1)
    header.version.producer = VERSION
    items, offset = [(b"", header.SerializeToString(deterministic=True))], 0
    with shard_path(prefix, 0, 1).open("wb") as file:
        for key, name in sorted((name.encode(), name) for name in tensors):
            array = np.asarray(tensors[name])
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            entry = _Entry(dtype=numbers[array.dtype], offset=offset, size=raw.size, crc32c=_stored_crc(raw))
            for size in array.shape:
                entry.shape.dim.add(size=size)
            items.append((key, entry.SerializeToString(deterministic=True)))
            file.write(raw.data)
            offset += raw.size
    write_atomic(index_path(prefix), leveldb_table.make_table(items))
