"""Records of a corpus: at most 8,192 tokens of one document each, decoded from a serialised tf.Example."""

import bisect
import itertools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from array_record.python import array_record_module
from etils import epath

from bert_jax.data.shard_parts import ShardParts
from bert_jax.errors import UserError
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.paths import is_remote
from bert_jax.storage.ranges import ByteRange, read_ranges

REMEDY = "copy the corpus again or rebuild it"
COPIED_BYTES = 1 << 22
"""A shard of at most this size is copied at once: one request is made, as for a part."""


class Record(NamedTuple):
    """A part of one document."""

    document: int
    """index of the document in its split"""
    part: int
    """0, 1, ... within the document"""
    tokens: np.ndarray
    """token ids [num_tokens], uint16 or uint32"""
    sentence_ends: np.ndarray
    """tokens up to and including each sentence [num_sentences], uint16; the last is num_tokens"""


def parse_record(raw: bytes, dtype: np.dtype) -> Record:
    """Decodes a serialised tf.Example with the four features of a corpus record.

    TFDS's decoder takes longer than reading the record does. Wire format: protobuf.dev, "Encoding"; the tests compare
    with TFDS.

    Args:
      raw: the record's bytes.
      dtype: type of the token ids, see `token_dtype`.

    Raises:
      ValueError: the bytes are not such a record.
    """
    try:
        features, _ = _field(raw, 0)
        values: dict[bytes, bytes] = {}
        position = 0
        while position < len(features):
            entry, position = _field(features, position)
            name, after_name = _field(entry, 0)
            feature, _ = _field(entry, after_name)
            value_list, _ = _field(feature, 0)
            values[name], _ = _field(value_list, 0)
        return Record(
            document=_varint(values[b"document"], 0)[0],
            part=_varint(values[b"part"], 0)[0],
            tokens=np.frombuffer(values[b"tokens"], dtype),
            sentence_ends=np.frombuffer(values[b"sentence_ends"], "<u2"),
        )
    except (IndexError, KeyError) as error:
        raise ValueError("not a record of a bert_jax corpus") from error


def _field(data: bytes, position: int) -> tuple[bytes, int]:
    """The length-delimited field at a position, and the position of the next one."""
    if data[position] & 7 != 2:
        raise ValueError("not a record of a bert_jax corpus")
    length, begin = _varint(data, position + 1)
    return data[begin : begin + length], begin + length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return value, position
        shift += 7


class StoredFile(NamedTuple):
    """A file of a corpus, with what corpus.json says of it."""

    path: epath.Path
    sha256: str
    """in hex"""
    size: int
    """bytes"""
    records: int | None
    """number of records of a shard; None: not a shard"""


def open_shard(shard: StoredFile, cache: LocalCache) -> array_record_module.ArrayRecordReader | ShardParts:
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


def _open_checked(shard: StoredFile, local: str | None) -> array_record_module.ArrayRecordReader | ShardParts:
    """A reader of a local file, or None: of parts in the store."""
    path = shard.path
    try:
        if local is None:
            reader = ShardParts(path, shard.size)
        elif not Path(local).exists():
            raise FileNotFoundError(local)
        else:
            reader = array_record_module.ArrayRecordReader(
                local, options="readahead_buffer_size:0", file_reader_buffer_size=1 << 15
            )
        num_records = reader.num_records()
        if num_records != shard.records:
            reader.close()  # raises the error of a damaged file
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0][:120]
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
    read as it has is copied to this host by a thread, if the cache has room: so at most twice the bytes of the better
    choice are read, whichever that is.
    """

    def __init__(self, shards: Sequence[StoredFile], dtype: np.dtype, cache: LocalCache):
        """Opens no file yet; `dtype` is the type of token ids."""
        self._shards, self._dtype, self._cache = tuple(shards), dtype, cache
        self._starts = list(itertools.accumulate((shard.records for shard in shards), initial=0))
        self._readers: dict[tuple[int, int], array_record_module.ArrayRecordReader | ShardParts] = {}
        self._lock = threading.Lock()
        self._copying: threading.Thread | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Records by index, in the given order.

        Raises:
          DamagedRecordError: a record cannot be read.
          UserError: a shard cannot be opened.
          OutageError: the store of a shard does not answer.
        """
        groups = [(shard, list(group)) for shard, group in itertools.groupby(sorted(set(indices)), self._shard)]
        contents = self._contents(groups)
        records: dict[int, Record] = {}
        for shard, shard_indices in groups:
            start = self._starts[shard]
            own = [index - start for index in shard_indices]
            try:
                if shard in contents:
                    parts, ranges, content = contents[shard]
                    raws = parts.decode(own, ranges, content)
                else:
                    raws = self._reader(shard).read(own)
            except (RuntimeError, ValueError):  # the error does not name the record
                raws = [self._read_one(shard, index) for index in shard_indices]
            for index, raw in zip(shard_indices, raws, strict=True):
                try:
                    records[index] = parse_record(raw, self._dtype)
                except ValueError as error:
                    raise DamagedRecordError(index, str(error)) from error
        return [records[index] for index in indices]

    def _contents(
        self, groups: Sequence[tuple[int, list[int]]]
    ) -> dict[int, tuple[ShardParts, list[ByteRange], list[bytes]]]:
        """For shards that are read in parts: reader, byte ranges of the wanted records and their content."""
        ranges: dict[int, tuple[ShardParts, list[ByteRange]]] = {}
        for shard, shard_indices in groups:
            reader = self._reader(shard)
            if isinstance(reader, ShardParts):
                ranges[shard] = reader, reader.ranges([index - self._starts[shard] for index in shard_indices])
                if reader.bytes_read >= self._shards[shard].size:
                    self._copy(shard, reader)
        contents = iter(read_ranges([one for _, own in ranges.values() for one in own]))
        return {shard: (reader, own, [next(contents) for _ in own]) for shard, (reader, own) in ranges.items()}

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
            return self._reader(shard).read([index - self._starts[shard]])[0]
        except (RuntimeError, ValueError) as error:
            raise DamagedRecordError(index, str(error).splitlines()[0][:120]) from error

    def path(self, index: int) -> epath.Path:
        """The shard that contains a record."""
        return self._shards[self._shard(index)].path

    def _shard(self, index: int) -> int:
        return bisect.bisect_right(self._starts, index) - 1

    def _reader(self, shard: int) -> array_record_module.ArrayRecordReader | ShardParts:
        key = (os.getpid(), shard)  # a reader's threads do not survive a fork
        with self._lock:
            if key not in self._readers:
                self._readers[key] = open_shard(self._shards[shard], self._cache)
            return self._readers[key]
