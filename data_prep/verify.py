"""Reads all files of a corpus and compares them with corpus.json."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping

import numpy as np
from array_record.python import array_record_module
from etils import epath

from bert_jax.data.corpus import (
    MANIFEST,
    MAX_RECORD_TOKENS,
    SPLITS,
    TOKENIZER,
    Corpus,
    array_file,
    read_manifest,
    token_dtype,
)
from bert_jax.data.integrity import (
    DATASET_INFO,
    check_checksums,
    check_file_sizes,
    complete_files,
)
from bert_jax.data.record import Record, StoredFile, open_shard, parse_record
from bert_jax.errors import UserError
from bert_jax.progress import progress
from bert_jax.storage import local_path
from bert_jax.tokenizers.tokenizer import Tokenizer

_BATCH_RECORDS = 256
_BEYOND_ANY_DOCUMENT = 1 << 62


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """What was checked of an intact corpus."""

    files: int
    """files compared with their checksums"""
    size: int
    """of these files, in bytes"""
    records: int
    """records read and compared with the arrays"""
    extra: tuple[str, ...]
    """other files and directories, which do not belong to the corpus"""

    def __str__(self):
        intact = (
            f"intact; {self.files} files ({self.size / 1e6:,.1f} MB) and all {self.records:,} records agree"
            f" with {MANIFEST}"
        )
        if not self.extra:
            return intact
        first, more = ", ".join(self.extra[:10]), len(self.extra) - 10
        return f"{intact}\nnot of this corpus: {first}" + f" and {more} more" * (more > 0)


def verify_corpus(directory: os.PathLike | str) -> VerificationReport:
    """Checks every file's SHA-256, every record, the arrays, the tokenizer, and that all ids are in the vocabulary.

    Raises:
      UserError: the first damage found, with its file.
    """
    directory = epath.Path(directory)
    manifest = read_manifest(directory)
    files = complete_files(directory, manifest)
    check_file_sizes(files.values())
    check_checksums(files.values(), "comparing checksums")
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if tokenizer.fingerprint != manifest["tokenizer"]["fingerprint"]:
        raise UserError(f"{directory / TOKENIZER}: not the tokenizer this corpus was built with; rebuild the corpus")
    _verify_dataset_info(directory / DATASET_INFO, manifest)
    records = sum(_verify_split(directory, manifest, files, split, tokenizer.unk_id) for split in SPLITS)
    extra = sorted({path.name for path in directory.iterdir()} - {*files, MANIFEST})
    return VerificationReport(len(files), sum(file.size for file in files.values()), records, tuple(extra))


def _verify_dataset_info(path: epath.Path, manifest: Mapping) -> None:
    """Checks that TFDS finds the same records in the same shards."""
    info = {split["name"]: [int(n) for n in split["shardLengths"]] for split in json.loads(path.read_text())["splits"]}
    if info != {split: [shard["records"] for shard in manifest["splits"][split]["shards"]] for split in SPLITS}:
        raise UserError(f"{path}: has other counts than {MANIFEST}; rebuild the corpus")


def _verify_split(
    directory: epath.Path, manifest: Mapping, files: Mapping[str, StoredFile], split: str, unk_id: int
) -> int:
    """Reads every record of a split; returns their number."""
    corpus = Corpus.open(directory, split)
    shards = manifest["splits"][split]["shards"]
    token_counts = np.zeros(corpus.vocab_size, np.int64)
    check = _SplitCheck(corpus)
    with progress(f"reading {split}", sum(shard["records"] for shard in shards), "record") as bar:
        for shard in shards:
            for records in _batches(files[shard["file"]], token_dtype(corpus.vocab_size)):
                bad = check.first_invalid(records)
                if bad is not None:
                    raise UserError(
                        f"{directory / shard['file']}: record {check.records + bad} of {split} contradicts the"
                        " arrays or the vocabulary; rebuild the corpus"
                    )
                check.advance(records, token_counts)
                bar.update(len(records))
    counts = manifest["splits"][split]
    if (check.document + 1, token_counts.sum()) != (counts["documents"], counts["tokens"]):
        raise UserError(f"{directory}: {split} has other counts than {MANIFEST}; rebuild the corpus")
    if not np.array_equal(token_counts, corpus.token_counts):
        raise UserError(f"{directory / array_file(split, 'token_counts')}: contradicts the records; rebuild the corpus")
    unknown = int(token_counts[unk_id])
    if unknown != counts["unknown_tokens"]:
        raise UserError(
            f"{directory / MANIFEST}: counts {counts['unknown_tokens']} unknown tokens in {split}, but the records"
            f" hold {unknown}; rebuild the corpus"
        )
    return check.records


def _batches(file: StoredFile, dtype: np.dtype) -> Iterator[list[Record]]:
    """The records of a shard in order, 256 at a time: about 12 MB at most."""
    open_shard(file).close()
    try:
        local = local_path(file.path, file.sha256)
        reader = array_record_module.ArrayRecordReader(local, options="readahead_buffer_size:0")
        for start in range(0, file.records, _BATCH_RECORDS):
            raw = reader.read(start, min(start + _BATCH_RECORDS, file.records))
            yield [parse_record(one, dtype) for one in raw]
        reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        # Checksums agree, so copying again would not help.
        raise UserError(f"{file.path}: damaged ({str(error).splitlines()[0][:120]}); rebuild the corpus") from error


class _SplitCheck:
    """Checks the records of a split in order, against the arrays and against each other."""

    def __init__(self, corpus: Corpus):
        self._corpus = corpus
        self._part = self.document = -1
        self._sentences = 0
        self.records = 0

    def first_invalid(self, records: list[Record]) -> int | None:
        """Index of the first record that is invalid or does not continue the previous one, or None."""
        for check in (self._sizes, self._contents):
            valid = check(records)
            if not valid.all():
                return int(np.argmin(valid))
        return None

    def advance(self, records: list[Record], token_counts: np.ndarray) -> None:
        """Advances past valid records and counts their ids."""
        token_counts += np.bincount(np.concatenate([r.tokens for r in records]), minlength=len(token_counts))
        self.document, self._part = records[-1].document, records[-1].part
        self._sentences += sum(len(record.sentence_ends) for record in records)
        self.records += len(records)

    def _sizes(self, records: list[Record]) -> np.ndarray:
        """bool [records]: has tokens and sentences, and the number of sentences in record_offsets."""
        tokens = np.array([len(record.tokens) for record in records])
        starts = self._starts(records)
        expected = self._corpus.record_offsets[self.records : self.records + len(records) + 1]
        return (tokens > 0) & (tokens <= MAX_RECORD_TOKENS) & (np.diff(starts) > 0) & (starts[1:] == expected[1:])

    def _contents(self, records: list[Record]) -> np.ndarray:
        """bool [records]: lengths, place and ids are valid; the sizes must be."""
        starts = self._starts(records)
        first = starts[:-1] - starts[0]
        ends = np.concatenate([record.sentence_ends for record in records]).astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        lengths[first] = ends[first]
        expected = self._corpus.sentence_lengths[starts[0] : starts[-1]]
        tokens = np.concatenate([record.tokens for record in records])
        sizes = np.array([len(record.tokens) for record in records])
        return (
            np.logical_and.reduceat((lengths == expected) & (lengths > 0), first)
            & (np.add.reduceat(lengths, first) == sizes)
            & (np.maximum.reduceat(tokens, np.cumsum(sizes) - sizes) < self._corpus.vocab_size)
            & self._in_place(records, starts[:-1])
        )

    def _in_place(self, records: list[Record], starts: np.ndarray) -> np.ndarray:
        """bool [records]: continues a document, or begins the next one at its document_offsets."""
        places = [(self.document, self._part), *((record.document, record.part) for record in records)]
        document, part = np.minimum(np.array(places, object), _BEYOND_ANY_DOCUMENT).astype(np.int64).T
        continues = (np.diff(document) == 0) & (np.diff(part) == 1)
        begins = (np.diff(document) == 1) & (part[1:] == 0)
        offsets = self._corpus.document_offsets
        known = np.minimum(document[1:], self._corpus.num_documents)
        return continues | begins & (starts == offsets[known])

    def _starts(self, records: list[Record]) -> np.ndarray:
        """int64 [records + 1]: the first sentence of each record, and the end of the last."""
        counts = [len(record.sentence_ends) for record in records]
        return self._sentences + np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
