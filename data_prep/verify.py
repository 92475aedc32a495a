"""Reads all files of a corpus and compares them with corpus.json."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np
from etils import epath

from bert_jax.command.progress import progress_bar
from bert_jax.data.corpus import Corpus
from bert_jax.data.integrity import (
    DATASET_INFO,
    check_checksums,
    check_file_sizes,
    require_all_files,
)
from bert_jax.data.manifest import (
    DATASHEET,
    GROUPS,
    MANIFEST,
    MAX_RECORD_TOKENS,
    REBUILD,
    SPLITS,
    TOKENIZER,
    array_file,
    read_manifest,
    token_dtype,
)
from bert_jax.data.record import Record, parse_record
from bert_jax.data.shards import StoredFile, open_shard
from bert_jax.data.word_starts import pack_word_starts
from bert_jax.errors import UserError
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.json_files import read_json_as
from bert_jax.tokenizers.tokenizer import Tokenizer

_BATCH_RECORDS = 256


class _Split(TypedDict):
    name: str
    shardLengths: list[str]


class _DatasetInfo(TypedDict):
    splits: list[_Split]


def verify_corpus(directory: os.PathLike | str) -> str:
    """Checks every file's SHA-256, every record, the arrays, the tokenizer, and that all ids are in the vocabulary.

    Returns:
      what was checked, and the names of other files in the directory.

    Raises:
      UserError: the first damage found, with its file.
    """
    directory = epath.Path(directory)
    manifest = read_manifest(directory)
    files = require_all_files(directory, manifest)
    check_file_sizes(files.values())
    check_checksums(files.values(), [LocalCache()] * len(files), "comparing checksums")
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if tokenizer.fingerprint != manifest["tokenizer"]["fingerprint"]:
        raise UserError(f"{directory / TOKENIZER}: not the tokenizer this corpus was built with; rebuild the corpus")
    _verify_dataset_info(directory / DATASET_INFO, manifest)
    records = sum(_verify_split(directory, manifest, files, split, tokenizer) for split in SPLITS)
    extra = sorted({path.name for path in directory.iterdir()} - {*files, MANIFEST, DATASHEET})
    size = sum(file.size for file in files.values()) / 1e6
    intact = f"intact; {len(files)} files ({size:,.1f} MB) and all {records:,} records agree with {MANIFEST}"
    return f"{intact}\nnot of this corpus: {', '.join(extra)}" if extra else intact


def _verify_dataset_info(path: epath.Path, manifest: Mapping) -> None:
    """Checks that TFDS finds the same records in the same shards."""
    splits = read_json_as(path, _DatasetInfo, REBUILD)["splits"]
    found = {split["name"]: split["shardLengths"] for split in splits}
    if found != {split: [str(shard["records"]) for shard in manifest["splits"][split]["shards"]] for split in SPLITS}:
        raise UserError(f"{path}: has other counts than {MANIFEST}; rebuild the corpus")


def _verify_split(
    directory: epath.Path, manifest: Mapping, files: Mapping[str, StoredFile], split: str, tokenizer: Tokenizer
) -> int:
    """Reads every record of a split; returns their number."""
    corpus, counts = Corpus.open(directory, split), manifest["splits"][split]
    corpus.check_offsets()
    token_counts = np.zeros(corpus.vocab_size, np.int64)
    first = packed_bytes = 0  # record of the next batch, and its place in word_starts
    words_agree = True
    with progress_bar(f"reading {split}", counts["records"], "record") as bar:
        for shard in counts["shards"]:
            for records in _batches(files[shard["file"]], token_dtype(corpus.vocab_size)):
                if (invalid := _first_invalid(corpus, first, records)) is not None:
                    raise UserError(
                        f"{directory / shard['file']}: record {first + invalid} of {split} contradicts the arrays or"
                        " the vocabulary; rebuild the corpus"
                    )
                tokens = np.concatenate([record.tokens for record in records])
                lengths = corpus.sentence_lengths[slice(*corpus.record_offsets[[first, first + len(records)]])]
                packed = pack_word_starts(tokens, lengths, tokenizer.begins_word)
                words_agree &= np.array_equal(packed, corpus.word_starts[packed_bytes : packed_bytes + len(packed)])
                first, packed_bytes = first + len(records), packed_bytes + len(packed)
                token_counts += np.bincount(tokens, minlength=len(token_counts))
                bar.update(len(records))
    words_agree &= packed_bytes == len(corpus.word_starts)
    counts_agree = np.array_equal(token_counts, corpus.token_counts)
    groups = [group["documents"] for group in corpus.groups]
    found = np.bincount(corpus.document_groups, minlength=len(groups))
    groups_agree = len(groups) < 2 or found.tolist() == groups
    for array, agrees in (("token_counts", counts_agree), ("word_starts", words_agree), (GROUPS, groups_agree)):
        if not agrees:
            raise UserError(f"{directory / array_file(split, array)}: contradicts the records; rebuild the corpus")
    unknown = int(token_counts[tokenizer.unk_id])
    if unknown != counts["unknown_tokens"]:
        raise UserError(
            f"{directory / MANIFEST}: counts {counts['unknown_tokens']} unknown tokens in {split}, but the records"
            f" hold {unknown}; rebuild the corpus"
        )
    return first


def _batches(file: StoredFile, dtype: np.dtype) -> Iterator[list[Record]]:
    """The records of a shard in order, 256 at a time: about 12 MB at most."""
    reader = open_shard(file, LocalCache())
    try:
        for start in range(0, file.records, _BATCH_RECORDS):
            raw = reader.read(range(start, min(start + _BATCH_RECORDS, file.records)))
            yield [parse_record(one, dtype) for one in raw]
        reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        # Checksums agree, so copying again would not help.
        raise UserError(f"{file.path}: damaged ({str(error).splitlines()[0][:120]}); rebuild the corpus") from error


def _first_invalid(corpus: Corpus, first: int, records: Sequence[Record]) -> int | None:
    """Index of the first of consecutive records, from record `first` on, that contradicts the arrays; None: all agree.

    Document offsets are ascending; a record must lie within one document.
    """
    offsets = np.array(corpus.record_offsets[first : first + len(records) + 1])
    documents = np.searchsorted(corpus.document_offsets, offsets[:-1], "right") - 1
    last_documents = np.searchsorted(corpus.document_offsets, offsets[1:] - 1, "right") - 1
    first_records = np.searchsorted(corpus.record_offsets, corpus.document_offsets[documents], "left")
    sentence_lengths = np.asarray(corpus.sentence_lengths)  # slices of memory maps are slow
    for i, record in enumerate(records):
        lengths = sentence_lengths[offsets[i] : offsets[i + 1]]
        valid = (
            0 < len(record.tokens) <= MAX_RECORD_TOKENS
            and len(lengths)
            and lengths.all()
            and np.array_equal(np.cumsum(lengths, dtype=np.int64), record.sentence_ends)
            and record.sentence_ends[-1] == len(record.tokens)
            and record.tokens.max() < corpus.vocab_size
            and (record.document, record.part) == (documents[i], first + i - first_records[i])
            and documents[i] == last_documents[i]
        )
        if not valid:
            return i
    return None
