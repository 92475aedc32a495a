"""Records by index from the ArrayRecord shards of a corpus, on disk or in a store.

A shard in a store is not copied for single records. Its end gives the byte range of each record. The bytes of wanted
records are placed where they are in the shard in an otherwise empty file, from which the ArrayRecord library reads: it
decompresses them and compares their hashes, as for a file on disk. `ShardParts` relies on this layout and checks it
(riegeli's doc/riegeli_records_file_format.md; array_record's cpp/array_record_writer.cc and cpp/layout.proto):

- A shard is a number of blocks of 64 KiB. Each begins with 24 bytes that belong to no chunk, which may span blocks.
- A chunk has a header of 40 bytes: in bytes 8 to 15 the size of its content, in byte 24 its type, in bytes 25 to 31 its
  number of records. The content of type "r" is its compression (0: none, "z": zstd, each part after its size), the size
  of the sizes of its records, these sizes, the records. All integers of content are varints.
- The last block is the chunk of the postscript, with one record: {1: offset of the footer, 2: MAGIC}.
- The footer is a chunk whose first record is {1: {1: version 1, 2: number of chunks, 3: number of records}}; each other
  record is of a chunk: {1: its offset, 3: its number of records}. Chunks are in order, without gaps, up to the footer.
"""

import bisect
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_record.python import array_record_module
from etils import epath

from bert_jax.data.record import Record, parse_record
from bert_jax.errors import UserError, install_command
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.files import allow_open_files
from bert_jax.storage.paths import is_remote
from bert_jax.storage.ranges import ByteRange, read_ranges
from bert_jax.storage.varints import decode_varint

try:
    from compression import zstd  # Python 3.14
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

REMEDY = "copy the corpus again or rebuild it"
COPIED_BYTES = 1 << 22
"""A shard of at most this size is copied at once: one request is made, as for a part."""
BLOCK, BLOCK_HEADER, CHUNK_HEADER = 1 << 16, 24, 40
MAGIC, LAYOUT_VERSION = 0x71930E704FDAE05E, 1
FIRST_CHUNK = 64
"""Offset of the first chunk with records, after the chunk of riegeli's signature."""
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
        if size < BLOCK or size % BLOCK:
            raise ValueError("its size is no number of blocks")
        first = max(0, size - TAIL_BYTES) // BLOCK * BLOCK
        (tail,) = read_ranges([ByteRange(path, first, size)])
        postscript = _fields(_chunk_records(tail, first, size - BLOCK, size)[0])
        footer_offset = postscript.get(1, 0)
        if postscript.get(2) != MAGIC or not FIRST_CHUNK <= footer_offset <= size - BLOCK:
            raise ValueError("its postscript is damaged")
        if footer_offset < first:
            start = footer_offset // BLOCK * BLOCK
            (head,) = read_ranges([ByteRange(path, start, first)])
            tail, first = head + tail, start
        self._path, self._size = path, size
        self._file, self._reader = _read_sparse_file(size, tail, first)
        self._reader.num_records()  # compares the hashes of the index, which is trusted below
        self._offsets = _chunk_offsets(_chunk_records(tail, first, footer_offset, size - BLOCK), footer_offset)
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

    def decode(self, indices: Sequence[int], contents: Sequence[bytes]) -> list[bytes]:
        """Records by index, ascending, from the content of their `ranges`.

        Raises:
          RuntimeError, ValueError: the content is damaged.
        """
        with self._lock:
            self.bytes_read += sum(map(len, contents))
            for one, content in zip(self.ranges(indices), contents, strict=True):
                os.pwrite(self._file, content, one.start)
            try:
                return self._reader.read(list(indices))
            finally:
                self._forget()

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Records by index, ascending; raises as `decode` and `read_ranges` do."""
        return self.decode(indices, read_ranges(self.ranges(indices)))

    def close(self) -> None:
        """Releases memory and descriptors."""
        self._reader.close()
        os.close(self._file)

    def _forget(self) -> None:
        """Leaves the file with its size and without content."""
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, self._size)


def _read_sparse_file(size: int, content: bytes, start: int) -> tuple[int, array_record_module.ArrayRecordReader]:
    """Descriptor and reader of a file that has `content` at `start`: in memory on Linux, elsewhere without a name."""
    in_memory = hasattr(os, "memfd_create")
    file, name = (os.memfd_create("shard"), None) if in_memory else tempfile.mkstemp(prefix="shard-")
    try:
        os.ftruncate(file, size)
        os.pwrite(file, content, start)
        return file, _local_reader(name or f"/proc/self/fd/{file}")
    finally:
        if name:
            Path(name).unlink()


def _local_reader(path: str) -> array_record_module.ArrayRecordReader:
    return array_record_module.ArrayRecordReader(
        path, options="readahead_buffer_size:0", file_reader_buffer_size=1 << 15
    )


def _chunk_offsets(footer: Sequence[bytes], footer_offset: int) -> np.ndarray:
    """Where the chunks of the footer's records begin, and where the last one ends: int64 [records + 1]."""
    about = _fields(_fields(footer[0])[1])
    if about[1] != LAYOUT_VERSION:
        raise ValueError(f"its layout has version {about[1]} instead of {LAYOUT_VERSION}")
    entries = [_fields(entry) for entry in footer[1:]]
    if any(entry.get(3) != 1 for entry in entries):
        raise ValueError("it has chunks of several records")
    offsets = np.array([*(entry[1] for entry in entries), footer_offset], np.int64)
    if about.get(2, 0) != len(entries) or offsets[0] != FIRST_CHUNK or (np.diff(offsets) <= CHUNK_HEADER).any():
        raise ValueError("its index has gaps")
    return offsets


def _fields(message: bytes) -> dict[int, Any]:
    """The fields of a protobuf message by number: integers and bytes (protobuf.dev, "Encoding")."""
    values: dict[int, Any] = {}
    at = 0
    while at < len(message):
        tag, at = decode_varint(message, at)
        value, at = decode_varint(message, at)
        if tag & 7 == 2:
            value, at = message[at : at + value], at + value
        values[tag >> 3] = value
    return values


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
    content = chunk[CHUNK_HEADER : CHUNK_HEADER + int.from_bytes(chunk[8:16], "little")]
    if chunk[24:25] != b"r" or not content:
        raise ValueError("its index is damaged")
    sizes_length, after = decode_varint(content, 1)
    sizes = _decompress(content[0], content[after : after + sizes_length])
    values = _decompress(content[0], content[after + sizes_length :])
    records, at, value = [], 0, 0
    for _ in range(int.from_bytes(chunk[25:32], "little")):
        size, at = decode_varint(sizes, at)
        records.append(values[value : value + size])
        value += size
    return records


def _decompress(kind: int, data: bytes) -> bytes:
    if kind == 0:
        return data
    if kind != ord("z"):
        raise ValueError("its index is not compressed with zstd")
    _, start = decode_varint(data, 0)
    try:
        return zstd.decompress(data[start:])
    except zstd.ZstdError as error:
        raise ValueError("its index is damaged") from error


ShardReader = array_record_module.ArrayRecordReader | ShardParts


class StoredFile(NamedTuple):
    """A file of a corpus, with what corpus.json says of it."""

    path: epath.Path
    sha256: str
    """in hex"""
    size: int
    """bytes"""
    records: int | None
    """number of records of a shard; None: not a shard"""


def open_shard(shard: StoredFile, cache: LocalCache) -> ShardReader:
    """Opens a shard for reading single records: on disk, its copy on this host, or its parts in the store.

    A small shard is copied if the cache has room for it.

    Raises:
      UserError: it is missing, is not an ArrayRecord file, or has another number of records.
    """
    path = shard.path
    try:
        if not is_remote(path) or shard.size <= COPIED_BYTES or cache.use_existing(shard.sha256):
            local = cache.path_if_room(path, shard.sha256, shard.size)
        else:
            local = None
        return _open_checked(shard, local)
    except FileNotFoundError as error:
        raise UserError(f"{path}: this shard is missing; {REMEDY}") from error


def _open_checked(shard: StoredFile, local: str | None) -> ShardReader:
    """A reader of a local file, or None: of parts in the store."""
    path = shard.path
    try:
        if local is None:
            reader = ShardParts(path, shard.size)
        elif not Path(local).exists():
            raise FileNotFoundError(local)
        else:
            reader = _local_reader(local)
        num_records = reader.num_records()
        if num_records != shard.records:
            reader.close()  # raises the error of a damaged file
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        reason = str(error).splitlines()[0][:120]
        if "Too many open files" in reason:
            raise UserError(f"{path}: too many files are open; raise the limit of the machine (`ulimit -n`)") from error
        raise UserError(f"{path}: damaged, it cannot be read as ArrayRecord ({reason}); {REMEDY}") from error
    if num_records != shard.records:
        raise UserError(f"{path}: holds {num_records} records where corpus.json lists {shard.records}; {REMEDY}")
    return reader


class DamagedRecordError(Exception):
    """A record that cannot be used; `Corpus.records` turns it into a UserError."""

    def __init__(self, index: int, reason: str):
        super().__init__(index, reason)
        self.index, self.reason = index, reason


class RecordReader:
    """Reads the records of one split by index, over all its shards.

    A shard in a store is read in parts, all parts of one call at the same time. A shard of which as many bytes were
    read as it has is copied to this host by a thread, if the cache has room: at most twice the bytes of the better way.
    """

    def __init__(self, shards: Sequence[StoredFile], dtype: np.dtype, cache: LocalCache):
        """Opens no file yet; `dtype` is the type of token ids."""
        allow_open_files(len(shards))  # each reader has one
        self._shards, self._dtype, self._cache = tuple(shards), dtype, cache
        self._index = {shard.path: index for index, shard in enumerate(shards)}
        self._starts = list(itertools.accumulate((shard.records for shard in shards), initial=0))
        self._readers: dict[tuple[int, int], ShardReader] = {}
        self._lock = threading.Lock()
        self._copying: threading.Thread | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def open(self, shard: StoredFile) -> None:
        """Opens a shard, which stays open for `read`; one of another split is closed again. Raises as `open_shard`."""
        reader = open_shard(shard, self._cache)
        if shard.path in self._index:
            with self._lock:
                self._readers.setdefault((os.getpid(), self._index[shard.path]), reader)
        else:
            reader.close()

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Records by index, in the given order.

        Raises:
          DamagedRecordError: a record cannot be read.
          UserError: a shard cannot be opened.
          OutageError: the store of a shard does not answer.
        """
        groups = {
            shard: [index - self._starts[shard] for index in group]
            for shard, group in itertools.groupby(sorted(set(indices)), self._shard)
        }
        contents = self._contents(groups)
        records: dict[int, Record] = {}
        for shard, own in groups.items():
            reader = self._reader(shard)  # if its parts were replaced meanwhile, the copy
            try:
                is_parts = isinstance(reader, ShardParts)
                raws = reader.decode(own, contents[shard]) if is_parts else reader.read(own)
            except (RuntimeError, ValueError):  # the error does not name the record
                raws = [self._read_one(shard, one) for one in own]
            for index, raw in zip(own, raws, strict=True):
                try:
                    records[self._starts[shard] + index] = parse_record(raw, self._dtype)
                except ValueError as error:
                    raise DamagedRecordError(self._starts[shard] + index, str(error)) from error
        return [records[index] for index in indices]

    def _contents(self, groups: Mapping[int, Sequence[int]]) -> dict[int, list[bytes]]:
        """For shards that are read in parts: the content of the byte ranges of the wanted records."""
        ranges: dict[int, list[ByteRange]] = {}
        for shard, own in groups.items():
            reader = self._reader(shard)
            if isinstance(reader, ShardParts):
                ranges[shard] = reader.ranges(own)
                if reader.bytes_read >= self._shards[shard].size:
                    self._copy(shard, reader)
        contents = iter(read_ranges(list(itertools.chain(*ranges.values()))))
        return {shard: list(itertools.islice(contents, len(own))) for shard, own in ranges.items()}

    def _copy(self, shard: int, parts: ShardParts) -> None:
        """Copies a shard in a thread, unless one is being copied or `parts` is no longer the shard's reader."""
        with self._lock:
            is_copying = self._copying is not None and self._copying.is_alive()
            if not is_copying and self._readers[os.getpid(), shard] is parts:
                self._copying = threading.Thread(target=self._replace_reader, args=(shard, parts), daemon=True)
                self._copying.start()

    def _replace_reader(self, shard: int, parts: ShardParts) -> None:
        file = self._shards[shard]
        parts.bytes_read = 0  # if there is no room, this is tried again after as many bytes
        try:
            if (local := self._cache.path_if_room(file.path, file.sha256, file.size)) is not None:
                reader = _open_checked(file, local)
                with self._lock:
                    self._readers[os.getpid(), shard] = reader
        except (UserError, OSError) as error:  # what it reports is reported again when parts are read
            print(f"note: {file.path} was not copied to this host: {error}", file=sys.stderr)

    def _read_one(self, shard: int, index: int) -> bytes:
        try:
            return self._reader(shard).read([index])[0]
        except (RuntimeError, ValueError) as error:
            raise DamagedRecordError(self._starts[shard] + index, str(error).splitlines()[0][:120]) from error

    def path(self, index: int) -> epath.Path:
        """The shard that contains a record."""
        return self._shards[self._shard(index)].path

    def _shard(self, index: int) -> int:
        return bisect.bisect_right(self._starts, index) - 1

    def _reader(self, shard: int) -> ShardReader:
        key = (os.getpid(), shard)  # a reader's threads do not survive a fork
        with self._lock:
            if key not in self._readers:
                self._readers[key] = open_shard(self._shards[shard], self._cache)
            return self._readers[key]
