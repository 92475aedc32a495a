"""Prepared corpora on disk: documents and sentences by index. Needs no jax and no TensorFlow.

A corpus is a TFDS dataset directory (ArrayRecord shards, one record for at most 8,192 tokens of one document) with four
additional arrays per split, so that planning reads no record, and `corpus.json`, which is written last: a directory
without it is not a corpus. docs/corpus.md specifies the format.
"""

import bisect
import dataclasses
import hashlib
import itertools
import json
import os
import reprlib
import threading
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module
from etils import epath

from bert_jax.data.record import Record, parse_record
from bert_jax.errors import UserError
from bert_jax.storage import check_reachable, is_remote, local_path

FORMAT_VERSION = 2
MANIFEST = "corpus.json"
INCOMPLETE = "corpus.incomplete"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation")
ARRAYS = ("sentence_lengths", "document_offsets", "record_offsets", "token_counts")
MAX_RECORD_TOKENS = 8192
_COUNTS = ("documents", "sentences", "tokens", "records", "unknown_tokens", "text_bytes")
_SCHEMA = {
    "name": str,
    "tokenizer": {"fingerprint": str},
    "vocab_size": int,
    "splits": {str: dict.fromkeys(_COUNTS, int) | {"shards": [{"file": str, "records": int}]}},
    "files": {str: {"sha256": str, "bytes": int}},
}
"""The part of corpus.json that this module and `integrity` read, see `check_schema`."""
_TYPE_NAMES = {str: "text", int: "a count", list: "a list", dict: "an object"}


def array_file(split: str, array: str) -> str:
    """File name of one of ARRAYS."""
    return f"{split}.{array}.npy"


def shard_file(name: str, split: str, index: int, count: int) -> str:
    """File name of a shard, in TFDS's naming scheme."""
    return f"{name}-{split}.array_record-{index:05d}-of-{count:05d}"


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian type of token ids in records: uint16 if every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def read_manifest(directory: os.PathLike | str) -> dict:
    """The content of corpus.json, with the types of all values checked that are needed to open the corpus.

    Raises:
      UserError: the directory does not exist, holds no finished corpus or one of another format, its corpus.json is
        damaged, or its store cannot be reached.
    """
    directory = epath.Path(directory)
    check_reachable(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such corpus; make one with `bert-data build`")
    path = directory / MANIFEST
    if not path.exists():
        raise UserError(f"{directory}: not a finished corpus (it has no {MANIFEST}); build it with `bert-data build`")
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, it cannot be read as JSON; build the corpus again") from error
    check_schema(path, manifest, {"format_version": int})
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        remedy = "update bert_jax" if version > FORMAT_VERSION else "build the corpus again with `bert-data build`"
        raise UserError(f"{directory} has corpus format {version}, and this bert_jax reads {FORMAT_VERSION}: {remedy}")
    check_schema(path, manifest, _SCHEMA)
    return manifest


def check_schema(path: os.PathLike | str, value: object, schema: type | dict | list, key: str = "") -> None:
    """Checks the types of JSON values.

    Args:
      path: of corpus.json, for the message.
      value: all of its content, or a part of it.
      schema: a type (`int` is a count, at least 0 and below 2**48), `[schema of each item]`, `{str: schema of each
        value}`, or the required names of an object with their schemas; other names are ignored.
      key: of the value in the file.

    Raises:
      UserError: the first value that is missing or has another type.
    """
    kind = schema if isinstance(schema, type) else type(schema)
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value < 1 << 48):
        what = f"{key or 'it'} is {reprlib.repr(value)}, not {_TYPE_NAMES[kind]}"
        raise UserError(f"{path}: damaged, {what}; build the corpus again")
    if isinstance(schema, list):
        for index, item in enumerate(value):
            check_schema(path, item, schema[0], f"{key}[{index}]")
    elif isinstance(schema, dict):
        for name in value if str in schema else schema:
            inner_key = f"{key}.{name}" if key else name
            if name not in value:
                raise UserError(f"{path}: damaged, it lacks {inner_key!r}; build the corpus again")
            check_schema(path, value[name], schema.get(str, schema.get(name)), inner_key)


def identity_of(directory: os.PathLike | str, manifest: dict) -> str:
    """SHA-256, in hex, of the content of a corpus: records, length arrays and tokenizer, in this format.

    It does not depend on the name of the corpus, the paths of its sources, or the settings of the build.

    Args:
      directory: of the corpus, for the message.
      manifest: the content of corpus.json.

    Raises:
      UserError: the manifest lacks a file.
    """
    try:
        files = manifest["files"]
        content = {"format_version": manifest["format_version"], "tokenizer": manifest["tokenizer"]["fingerprint"]}
        for split, counts in manifest["splits"].items():
            names = [*(shard["file"] for shard in counts["shards"]), *(array_file(split, array) for array in ARRAYS)]
            content[split] = [files[name]["sha256"] for name in names]
    except KeyError as error:
        raise UserError(f"{epath.Path(directory) / MANIFEST}: damaged, it lacks {error}; rebuild the corpus") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """One split of a prepared corpus.

    May be shared by threads and pickled: each process opens files when it first reads them. Sentence and document
    indices count from the start of the split.

    Attributes:
      directory: of the corpus.
      split: "train" or "validation".
      name: of the corpus.
      identity: see `identity_of`; corpora with the same identity have the same content.
      vocab_size: token ids are in [0, vocab_size).
      tokenizer_fingerprint: `Tokenizer.fingerprint` of the tokenizer that made the ids.
      sentence_lengths: tokens of each sentence, uint16 [num_sentences], memory-mapped.
      document_offsets: first sentence of each document, int64 [num_documents + 1].
      record_offsets: first sentence of each record, int64 [num_records + 1].
      token_counts: occurrences of each id in the split, int64 [vocab_size].
      num_tokens: tokens in the split.
    """

    directory: epath.Path
    split: str
    name: str
    identity: str
    vocab_size: int
    tokenizer_fingerprint: str
    sentence_lengths: np.ndarray
    document_offsets: np.ndarray
    record_offsets: np.ndarray
    token_counts: np.ndarray
    num_tokens: int
    _records: "RecordReader"

    @classmethod
    def open(cls, directory: os.PathLike | str, split: str = "train") -> "Corpus":
        """Opens a split; the time does not depend on the size of the corpus.

        Raises:
          UserError: not a finished corpus of this format, no such split, or arrays or shards that contradict
            corpus.json.
        """
        directory = epath.Path(directory)
        manifest = read_manifest(directory)
        if split not in manifest["splits"]:
            raise UserError(f"{directory}: no split {split!r}; it has {', '.join(sorted(manifest['splits']))}")
        counts = manifest["splits"][split]
        expected = {
            "sentence_lengths": (np.dtype("<u2"), counts["sentences"], None),
            "document_offsets": (np.dtype("<i8"), counts["documents"] + 1, counts["sentences"]),
            "record_offsets": (np.dtype("<i8"), counts["records"] + 1, counts["sentences"]),
            "token_counts": (np.dtype("<i8"), manifest["vocab_size"], None),
        }
        arrays = {
            array: _map_array(directory, array_file(split, array), manifest, *properties)
            for array, properties in expected.items()
        }
        if arrays["token_counts"].sum() != counts["tokens"]:
            raise UserError(
                f"{directory / MANIFEST}: counts {counts['tokens']} tokens in {split}, but"
                f" {array_file(split, 'token_counts')} holds {arrays['token_counts'].sum()}; copy the corpus again or"
                " rebuild it"
            )
        records = RecordReader(directory, manifest, split)
        if len(records) != counts["records"]:
            raise UserError(
                f"{directory / MANIFEST}: its {split} shards hold {len(records)} records, but it counts"
                f" {counts['records']}; build the corpus again"
            )
        return cls(
            directory=directory,
            split=split,
            name=manifest["name"],
            identity=identity_of(directory, manifest),
            vocab_size=manifest["vocab_size"],
            tokenizer_fingerprint=manifest["tokenizer"]["fingerprint"],
            num_tokens=counts["tokens"],
            _records=records,
            **arrays,
        )

    def __reduce__(self):
        # Memory-mapped arrays would be pickled with their whole content.
        return _reopen, (os.fspath(self.directory), self.split)

    @property
    def num_documents(self) -> int:
        """Documents in the split."""
        return len(self.document_offsets) - 1

    @property
    def num_sentences(self) -> int:
        """Sentences in the split."""
        return len(self.sentence_lengths)

    def sentences(self, start: int, stop: int) -> np.ndarray:
        """Tokens of the sentences [start, stop), concatenated, int32 [sum of their lengths].

        Reads only the records that contain them.

        Raises:
          IndexError: the range is not within [0, num_sentences].
        """
        if not 0 <= start <= stop <= self.num_sentences:
            raise IndexError(f"sentences [{start}, {stop}) are not within [0, {self.num_sentences}]")
        if start == stop:
            return np.zeros(0, np.int32)
        first = int(np.searchsorted(self.record_offsets, start, "right")) - 1
        last = int(np.searchsorted(self.record_offsets, stop, "left"))
        pieces = []
        for index, record in enumerate(self.records(range(first, last)), first):
            offset = int(self.record_offsets[index])
            ends = record.sentence_ends
            low = ends[start - offset - 1] if start > offset else 0
            high = ends[min(stop - offset, len(ends)) - 1]
            pieces.append(record.tokens[low:high])
        return np.concatenate(pieces, dtype=np.int32)

    def records(self, indices: Sequence[int]) -> "list[Record]":
        """Records by index, in the given order; one call for many records is faster than many calls.

        Raises:
          UserError: a record cannot be read or contradicts the arrays; the message names the shard and the document.
        """
        try:
            records = self._records.read(indices)
            for index, record in zip(indices, records, strict=True):
                self._check(index, record)
        except DamagedRecordError as damage:
            sentence = self.record_offsets[damage.index]
            document = int(np.searchsorted(self.document_offsets, sentence, "right")) - 1
            raise UserError(
                f"{self._records.path(damage.index)}: damaged at record {damage.index}, document {document} of split "
                f"'{self.split}' ({damage.reason}); copy the corpus again or rebuild it"
            ) from damage
        return records

    def _check(self, index: int, record: "Record") -> None:
        lengths = self.sentence_lengths[self.record_offsets[index] : self.record_offsets[index + 1]]
        if len(record.sentence_ends) != len(lengths) or len(record.tokens) != lengths.sum(dtype=np.int64):
            raise DamagedRecordError(index, f"it contradicts {array_file(self.split, 'sentence_lengths')}")


def _reopen(directory: str, split: str) -> Corpus:
    return Corpus.open(directory, split)


class DamagedRecordError(Exception):
    """A record that cannot be used; `Corpus.records` turns it into a UserError."""

    def __init__(self, index: int, reason: str):
        super().__init__(index, reason)
        self.index, self.reason = index, reason


class RecordReader:
    """Reads the records of one split by index, over all its shards."""

    def __init__(self, directory: os.PathLike | str, manifest: dict, split: str):
        """Opens no file yet; `manifest` is the content of corpus.json."""
        shards = manifest["splits"][split]["shards"]
        self._directory, self._manifest = epath.Path(directory), manifest
        self._paths = [epath.Path(directory) / shard["file"] for shard in shards]
        self._counts = [shard["records"] for shard in shards]
        self._starts = list(itertools.accumulate(self._counts, initial=0))
        self._dtype = token_dtype(manifest["vocab_size"])
        self._readers: dict[tuple[int, int], array_record_module.ArrayRecordReader] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Records by index, in the given order.

        Raises:
          DamagedRecordError: a record cannot be read.
          UserError: a shard cannot be opened.
        """
        records: dict[int, Record] = {}
        for shard, group in itertools.groupby(sorted(set(indices)), self._shard):
            shard_indices, start = list(group), self._starts[shard]
            try:
                raws = self._reader(shard).read([index - start for index in shard_indices])
            except (RuntimeError, ValueError):  # the error does not name the record
                raws = [self._read_one(shard, index) for index in shard_indices]
            for index, raw in zip(shard_indices, raws, strict=True):
                try:
                    records[index] = parse_record(raw, self._dtype)
                except ValueError as error:
                    raise DamagedRecordError(index, str(error)) from error
        return [records[index] for index in indices]

    def _read_one(self, shard: int, index: int) -> bytes:
        try:
            return self._reader(shard).read([index - self._starts[shard]])[0]
        except (RuntimeError, ValueError) as error:
            raise DamagedRecordError(index, str(error).splitlines()[0][:120]) from error

    def path(self, index: int) -> epath.Path:
        """The shard that contains a record."""
        return self._paths[self._shard(index)]

    def _shard(self, index: int) -> int:
        return bisect.bisect_right(self._starts, index) - 1

    def _reader(self, shard: int) -> array_record_module.ArrayRecordReader:
        # Keyed by process: a reader's threads do not survive a fork.
        key = (os.getpid(), shard)
        if key in self._readers:
            return self._readers[key]
        with self._lock:
            if key not in self._readers:
                self._readers[key] = self._open(shard)
            return self._readers[key]

    def _open(self, shard: int) -> array_record_module.ArrayRecordReader:
        path = self._paths[shard]
        if not path.exists():
            raise UserError(f"{path}: this shard is missing; copy the corpus again or rebuild it")
        try:
            reader = array_record_module.ArrayRecordReader(
                _local_path(self._directory, path.name, self._manifest),
                options="readahead_buffer_size:0",
                file_reader_buffer_size=1 << 15,
            )
        except (ValueError, RuntimeError, IndexError) as error:
            raise UserError(f"{path}: cannot be read as ArrayRecord ({error}); rebuild the corpus") from error
        if reader.num_records() != self._counts[shard]:
            raise UserError(
                f"{path}: holds {reader.num_records()} records where {MANIFEST} lists {self._counts[shard]};"
                " copy the corpus again or rebuild it"
            )
        return reader


def _map_array(
    directory: epath.Path, name: str, manifest: dict, dtype: np.dtype, length: int, last: int | None
) -> np.ndarray:
    path = directory / name
    try:
        array = np.load(_local_path(directory, name, manifest), mmap_mode="r")
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; copy the corpus again or rebuild it") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: damaged, not a .npy array; copy the corpus again or rebuild it") from error
    if array.dtype != dtype or array.shape != (length,) or (last is not None and array[-1] != last):
        raise UserError(f"{path}: contradicts {MANIFEST}; copy the corpus again or rebuild it")
    return array


def _local_path(directory: epath.Path, name: str, manifest: dict) -> str:
    """A local path of a file of a corpus: objects of a store can be neither memory-mapped nor read by ArrayRecord."""
    path = directory / name
    if not is_remote(path):
        return os.fspath(path)
    try:
        sha256 = manifest["files"][name]["sha256"]
    except KeyError as error:
        raise UserError(f"{directory / MANIFEST}: damaged, it lacks {error}; rebuild the corpus") from error
    return local_path(path, sha256)
