"""Reads single records of an ArrayRecord shard in a store, without copying the shard.

The end of the shard gives the byte range of each record. The bytes of wanted records are placed where they are in the
shard in an otherwise empty file in memory, from which the ArrayRecord library reads them: it decompresses them and
compares their hashes, as for a file on disk.

Formats: riegeli's doc/riegeli_records_file_format.md; array_record's cpp/array_record_writer.cc (footer and postscript)
and cpp/layout.proto.
"""

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module
from etils import epath

from bert_jax.errors import UserError, install_command
from bert_jax.storage.ranges import ByteRange, read_ranges

try:
    from compression import zstd  # Python 3.14
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

BLOCK = 1 << 16
BLOCK_HEADER = 24
CHUNK_HEADER = 40
TAIL_BYTES = 1 << 19
"""Read first from the end of a shard: the index of 100,000 records takes about as much."""
MERGED_GAP = 1 << 16
"""Records with at most this many bytes between them are read by one request: that takes less time than a second one."""


class ShardParts:
    """A shard in a store, of which only the wanted records are read. May be shared by threads.

    Attributes:
      bytes_read: bytes of records that were requested so far.
    """

    def __init__(self, path: epath.Path, size: int):
        """Reads the index.

        Args:
          path: of the shard.
          size: in bytes.

        Raises:
          ValueError: it is not a finished ArrayRecord file with one record per chunk.
          FileNotFoundError, OutageError: see `read_ranges`.
        """
        if zstd is None:
            raise UserError(
                f"{path}: reading parts of shards needs the package backports.zstd: {install_command('s3')}"
            )
        if size < BLOCK:
            raise ValueError("it is too small")
        first = max(0, size - TAIL_BYTES) // BLOCK * BLOCK
        (tail,) = read_ranges([ByteRange(path, first, size)])
        postscript = _chunk_records(tail, first, size - BLOCK, size)[0]
        footer_offset = _varints(postscript).get(1, 0)
        if not 0 < footer_offset <= size - BLOCK:
            raise ValueError("its postscript is damaged")
        if footer_offset < first:
            start = footer_offset // BLOCK * BLOCK
            (head,) = read_ranges([ByteRange(path, start, first)])
            tail, first = head + tail, start
        self._path = path
        self._memory = os.memfd_create("shard")
        os.ftruncate(self._memory, size)
        os.pwrite(self._memory, tail, first)
        self._map = mmap.mmap(self._memory, size)
        self._reader = array_record_module.ArrayRecordReader(
            f"/proc/self/fd/{self._memory}", options="readahead_buffer_size:0", file_reader_buffer_size=1 << 15
        )
        self._reader.num_records()  # compares the hashes of the index, which is trusted below
        entries = [_varints(entry) for entry in _chunk_records(tail, first, footer_offset, size - BLOCK)[1:]]
        if any(entry.get(3) != 1 for entry in entries):
            raise ValueError("it has chunks of several records")
        self._offsets = np.array([*(entry[1] for entry in entries), footer_offset], np.int64)
        self._forget()
        self._lock = threading.Lock()
        self.bytes_read = 0

    def num_records(self) -> int:
        """Records in the shard."""
        return len(self._offsets) - 1

    def ranges(self, indices: Sequence[int]) -> list[ByteRange]:
        """Where records are; `indices` are ascending. Neighbours share a range."""
        merged: list[list[int]] = []
        for index in indices:
            start, end = int(self._offsets[index]), int(self._offsets[index + 1])
            if merged and start - merged[-1][1] <= MERGED_GAP:
                merged[-1][1] = end
            else:
                merged.append([start, end])
        return [ByteRange(self._path, start, end) for start, end in merged]

    def decode(self, indices: Sequence[int], ranges: Sequence[ByteRange], contents: Sequence[bytes]) -> list[bytes]:
        """Records by index, from the content of their `ranges`.

        Raises:
          RuntimeError, ValueError: the content is damaged.
        """
        with self._lock:
            self.bytes_read += sum(map(len, contents))
            for one, content in zip(ranges, contents, strict=True):
                os.pwrite(self._memory, content, one.start)
            try:
                return self._reader.read(list(indices))
            finally:
                self._forget()

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Records by index, ascending; raises as `decode` and `read_ranges` do."""
        ranges = self.ranges(indices)
        return self.decode(indices, ranges, read_ranges(ranges))

    def close(self) -> None:
        """Releases memory and descriptors."""
        self._reader.close()
        self._map.close()
        os.close(self._memory)

    def _forget(self) -> None:
        """Releases the memory of all bytes that were placed in the file."""
        self._map.madvise(mmap.MADV_REMOVE)


def _chunk_records(data: bytes, origin: int, start: int, end: int) -> list[bytes]:
    """Records of the chunk at [start, end) of a file, of which `data` are the bytes from `origin` on."""
    pieces, at = [], start
    while at < end:
        if at % BLOCK == 0:
            at += BLOCK_HEADER
        stop = min(end, (at // BLOCK + 1) * BLOCK)
        pieces.append(data[at - origin : stop - origin])
        at = stop
    chunk = b"".join(pieces)
    data_size, records = (int.from_bytes(chunk[at : at + 8], "little") for at in (8, 24))
    kind, count = records & 255, records >> 8
    content = chunk[CHUNK_HEADER : CHUNK_HEADER + data_size]
    if kind != ord("r") or not content:
        raise ValueError("its index is damaged")
    sizes_length, after = _varint(content, 1)
    sizes = _decompress(content[0], content[after : after + sizes_length])
    values = _decompress(content[0], content[after + sizes_length :])
    records_, at, value = [], 0, 0
    for _ in range(count):
        size, at = _varint(sizes, at)
        records_.append(values[value : value + size])
        value += size
    return records_


def _decompress(kind: int, data: bytes) -> bytes:
    if kind == 0:
        return data
    if kind != ord("z"):
        raise ValueError("its index is not compressed with zstd")
    _, start = _varint(data, 0)
    try:
        return zstd.decompress(data[start:])
    except zstd.ZstdError as error:
        raise ValueError("its index is damaged") from error


def _varints(message: bytes) -> dict[int, int]:
    """Numbers of a protobuf message, by field; other fields are skipped."""
    values, at = {}, 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        if tag & 7 == 2:
            at += value
        else:
            values[tag >> 3] = value
    return values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
