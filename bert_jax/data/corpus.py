"""Prepared corpora on disk: documents and sentences by index. Needs no jax and no TensorFlow.

A corpus is a TFDS dataset directory (ArrayRecord shards, one record for at most 8,192 tokens of one document) with
arrays of each split, so that planning reads no record, and `corpus.json`, written last. docs/corpus.md specifies it.
"""

import dataclasses
import os
import tokenize
from collections.abc import Sequence

import numpy as np
from etils import epath

from bert_jax.data.manifest import (
    GROUPS,
    MANIFEST,
    REBUILD,
    GroupEntry,
    SplitEntry,
    array_file,
    array_names,
    identity_of,
    read_manifest,
    stored_files,
    token_dtype,
)
from bert_jax.data.record import Record
from bert_jax.data.shards import REMEDY, DamagedRecordError, RecordReader, StoredFile
from bert_jax.errors import UserError, require
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.paths import is_remote

_OFFSETS_AT_ONCE = 1 << 20
"""Offsets that are compared at once, so that a large array is not copied."""


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
      word_starts: which tokens of long sentences begin a word, see `WordStarts.bits`.
      num_tokens: tokens in the split.
      groups: of documents with one source, language and score; empty in corpora that were built before them.
      document_groups: index in `groups` of each document, uint16 [num_documents]; empty with fewer than two.
      cache: copies of files from a store.
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
    word_starts: np.ndarray
    num_tokens: int
    groups: list[GroupEntry]
    document_groups: np.ndarray
    cache: LocalCache
    _records: RecordReader

    @classmethod
    def open(
        cls,
        directory: os.PathLike | str,
        split: str = "train",
        cache: LocalCache | None = None,
        manifest: dict | None = None,
    ) -> "Corpus":
        """Opens a split; the time does not depend on the size of the corpus, if it is on a disk.

        Args:
          directory: of the corpus; the length arrays of one in a store are copied to this host.
          split: "train" or "validation".
          cache: where such copies are kept; None: the default one.
          manifest: the content of corpus.json that is not written yet; None: it is read.

        Raises:
          UserError: not a finished corpus of this format, no such split, arrays or shards that contradict
            corpus.json, or no room for the arrays.
          OutageError: the store of the corpus does not answer.
        """
        directory, cache = epath.Path(directory), cache or LocalCache()
        manifest = manifest or read_manifest(directory)
        known = ", ".join(sorted(manifest["splits"]))
        require(split in manifest["splits"], f"{directory}: no split {split!r}; it has {known}")
        counts, identity = manifest["splits"][split], identity_of(directory, manifest)
        files = stored_files(directory, manifest)
        if is_remote(directory):
            for file in files.values():  # copies of an earlier run are kept for this one
                cache.use_existing(file.sha256)
        properties, arrays = _array_properties(counts, manifest["vocab_size"]), {GROUPS: np.zeros(0, np.uint16)}
        for array in array_names(counts):
            arrays[array] = _map_array(files[array_file(split, array)], cache, *properties[array])
        if arrays["token_counts"].sum() != counts["tokens"]:
            counted = f"{counts['tokens']} tokens in {split}, but {array_file(split, 'token_counts')} holds"
            raise UserError(f"{directory / MANIFEST}: counts {counted} {arrays['token_counts'].sum()}; {REMEDY}")
        groups = counts.get("groups", [])
        tokens = [group["tokens"] for group in groups]
        if groups and (sum(tokens) != counts["tokens"] or 0 in tokens):
            raise UserError(f"{directory / MANIFEST}: splits.{split}.groups contradicts its other counts; {REBUILD}")
        shards = [files[shard["file"]] for shard in counts["shards"]]
        records = RecordReader(shards, token_dtype(manifest["vocab_size"]), cache)
        if len(records) != counts["records"]:
            counted = f"{len(records)} records, but it counts {counts['records']}; build the corpus again"
            raise UserError(f"{directory / MANIFEST}: its {split} shards hold {counted}")
        return cls(
            directory=directory,
            split=split,
            name=manifest["name"],
            identity=identity,
            vocab_size=manifest["vocab_size"],
            tokenizer_fingerprint=manifest["tokenizer"]["fingerprint"],
            num_tokens=counts["tokens"],
            groups=groups,
            cache=cache,
            _records=records,
            **arrays,
        )

    def __reduce__(self):
        # Memory-mapped arrays would be pickled with their whole content. Not `Corpus.open` itself: cloudpickle, which
        # Grain uses for reader processes, pickles the code and globals of a class method by value.
        return _open_corpus, (os.fspath(self.directory), self.split, self.cache)

    @property
    def num_documents(self) -> int:
        """Documents in the split."""
        return len(self.document_offsets) - 1

    @property
    def num_sentences(self) -> int:
        """Sentences in the split."""
        return len(self.sentence_lengths)

    def check_offsets(self) -> None:
        """Check that documents and records are not empty and follow each other; compiled code does not check bounds.

        Raises:
          UserError: a file of offsets is damaged.
        """
        for array in ("document_offsets", "record_offsets"):
            offsets = np.asarray(getattr(self, array))
            starts = range(0, len(offsets) - 1, _OFFSETS_AT_ONCE)
            blocks = (offsets[start : start + _OFFSETS_AT_ONCE + 1] for start in starts)
            if offsets[0] != 0 or any((block[1:] <= block[:-1]).any() for block in blocks):
                raise UserError(f"corpus {self.directory}: {array_file(self.split, array)} does not ascend; {REMEDY}")

    def open_shard(self, shard: StoredFile) -> None:
        """Opens a shard of this split for `records`, or checks that one of another can be opened; see `open_shard`."""
        self._records.open(shard)

    def read_sentences(self, start: int, stop: int) -> np.ndarray:
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

    def records(self, indices: Sequence[int]) -> list[Record]:
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
            what = f"record {damage.index}, document {document} of split '{self.split}' ({damage.reason})"
            raise UserError(f"{self._records.path(damage.index)}: damaged at {what}; {REMEDY}") from damage
        return records

    def _check(self, index: int, record: Record) -> None:
        lengths = self.sentence_lengths[self.record_offsets[index] : self.record_offsets[index + 1]]
        if len(record.sentence_ends) != len(lengths) or len(record.tokens) != lengths.sum(dtype=np.int64):
            raise DamagedRecordError(index, f"it contradicts {array_file(self.split, 'sentence_lengths')}")


def _open_corpus(directory: str, split: str, cache: LocalCache) -> Corpus:
    return Corpus.open(directory, split, cache)


def _array_properties(counts: SplitEntry, vocab_size: int) -> dict[str, tuple[np.dtype, int, int | None]]:
    """Type, length, and last value if it is known, of each of `array_names`."""
    return {
        "sentence_lengths": (np.dtype("<u2"), counts["sentences"], None),
        "document_offsets": (np.dtype("<i8"), counts["documents"] + 1, counts["sentences"]),
        "record_offsets": (np.dtype("<i8"), counts["records"] + 1, counts["sentences"]),
        "token_counts": (np.dtype("<i8"), vocab_size, None),
        "word_starts": (np.dtype(np.uint8), counts["word_start_bytes"], None),
        GROUPS: (np.dtype("<u2"), counts["documents"], None),
    }


def _map_array(file: StoredFile, cache: LocalCache, dtype: np.dtype, length: int, last: int | None) -> np.ndarray:
    path = file.path
    try:
        array = np.load(cache.local_path(path, file.sha256, file.size), mmap_mode="r")
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; {REMEDY}") from error
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError, RecursionError, TypeError) as error:
        # NumPy parses the header as Python.
        raise UserError(f"{path}: damaged, not a .npy array; {REMEDY}") from error
    if array.dtype != dtype or array.shape != (length,) or (last is not None and array[-1] != last):
        raise UserError(f"{path}: contradicts {MANIFEST}; {REMEDY}")
    return array
