"""Statistics of a corpus from its arrays and corpus.json; records are read for the sample documents only."""

import dataclasses
import os
from collections.abc import Iterator
from typing import TypedDict

import numba
import numpy as np
from etils import epath

from bert_jax.data.corpus import MANIFEST, REBUILD, SPLITS, TOKENIZER, Corpus, StoredCount, read_manifest
from bert_jax.errors import UserError
from bert_jax.field_validation import from_json
from bert_jax.progress import progress
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.inspection import packing
from data_prep.inspection.lengths import LengthHistogram

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
ROW_LENGTHS = (128, 512)
FREQUENT_PIECES = 40

_SAMPLES_AT = (0.0, 0.25, 0.5, 0.75, 1.0)
_SAMPLE_TOKENS = 96
_BLOCK_DOCUMENTS = 1 << 16


class _Skipped(TypedDict):
    count: StoredCount
    first: list[str]


class _Source(TypedDict):
    spec: str
    documents: StoredCount
    text_bytes: StoredCount
    files: list


class _Report(TypedDict):
    """The part of corpus.json that is shown, besides what is needed to open the corpus."""

    dropped: dict[str, dict[str, StoredCount]]
    cleaned: dict[str, StoredCount]
    skipped: dict[str, _Skipped]
    settings: dict
    sources: list[_Source]


@dataclasses.dataclass(frozen=True, eq=False)
class SplitLengthStatistics:
    """Measurements of one split; its counts are in corpus.json."""

    sentences: LengthHistogram
    """tokens in a sentence"""
    documents: LengthHistogram
    """tokens in a document"""
    packing_estimates: tuple[packing.PackingEstimate, ...]
    """for each of ROW_LENGTHS"""
    random_pairs: tuple[float, ...]
    """share of BERT's sentence pairs whose second segment is random, for each of ROW_LENGTHS"""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The beginning of a document of the train split."""

    document: int
    """index of the document"""
    tokens: int
    """of the whole document"""
    sentences: tuple[str, ...]
    """decoded ids, at most 96 of them; characters that the tokenizer does not represent are missing"""
    cut: bool
    """whether the document is longer"""


@dataclasses.dataclass(frozen=True)
class PieceUsage:
    """How the train split uses the vocabulary, without the five special tokens, which do not occur in text."""

    total: int
    """pieces of the vocabulary"""
    never: int
    """pieces that do not occur"""
    tokens: int
    """of the split, [UNK] included"""
    decades: tuple[tuple[str, int], ...]
    """pieces by how often they occur: ("1–9", 812), ("10–99", 3055), ..."""
    frequent: tuple[tuple[str, int], ...]
    """the most frequent pieces and how often they occur, [UNK] included"""


@dataclasses.dataclass(frozen=True, eq=False)
class CorpusStatistics:
    """All statistics of `bert-data inspect` about one corpus."""

    directory: str
    manifest: dict
    """content of corpus.json"""
    disk_bytes: int
    """all files of the corpus"""
    splits: dict[str, SplitLengthStatistics]
    pieces: PieceUsage
    samples: tuple[Sample, ...]

    @property
    def train_tokens(self) -> int:
        """Tokens of the train split."""
        return self.manifest["splits"]["train"]["tokens"]

    @property
    def disk_bytes_per_token(self) -> float:
        """Size of all files over the tokens of both splits."""
        return self.disk_bytes / sum(self.manifest["splits"][split]["tokens"] for split in SPLITS)


def measure_corpus(directory: os.PathLike | str) -> CorpusStatistics:
    """Measures a corpus. Memory does not depend on its size: arrays are memory-mapped and read in blocks.

    Raises:
      UserError: the directory holds no finished corpus, or its arrays are damaged.
    """
    manifest = read_manifest(directory)
    from_json(_Report, manifest, epath.Path(directory) / MANIFEST, REBUILD)
    corpora = {split: Corpus.open(directory, split) for split in SPLITS}
    splits = {split: measure_split(corpus) for split, corpus in corpora.items()}
    train = corpora["train"]
    tokenizer = Tokenizer.load(train.directory / TOKENIZER)
    return CorpusStatistics(
        directory=os.fspath(directory),
        manifest=manifest,
        disk_bytes=sum(entry["bytes"] for entry in manifest["files"].values())
        + (epath.Path(directory) / MANIFEST).stat().length,
        splits=splits,
        pieces=_pieces(train.token_counts, tokenizer),
        samples=tuple(_samples(train, tokenizer)),
    )


def measure_split(corpus: Corpus) -> SplitLengthStatistics:
    """Measures the lengths of a split.

    Raises:
      UserError: its arrays are damaged.
    """
    sentence_counts = np.zeros(1 << 16, np.int64)
    examples = [packing.example_counts(seq_len) for seq_len in ROW_LENGTHS]
    pairs = np.zeros((len(ROW_LENGTHS), 2))
    documents = []
    with progress(f"measuring {corpus.split}", corpus.num_sentences, "sentence") as bar:
        for offsets in _blocks(corpus):
            documents.append(
                LengthHistogram.from_lengths(
                    _block_lengths(sentence_counts, np.asarray(corpus.sentence_lengths), offsets)
                )
            )
            for index, counts in enumerate(examples):
                packing.count_example_lengths(counts, corpus.sentence_lengths, offsets)
                pairs[index] += packing.expected_pairs(corpus.sentence_lengths, offsets, ROW_LENGTHS[index])
            bar.update(int(offsets[-1] - offsets[0]))
    if sentence_counts[0]:
        raise _damaged(corpus)
    occurring = np.flatnonzero(sentence_counts)
    return SplitLengthStatistics(
        sentences=LengthHistogram(occurring, sentence_counts[occurring]),
        documents=LengthHistogram.merge(documents),
        packing_estimates=tuple(packing.estimate_packing(counts) for counts in examples),
        random_pairs=tuple((pairs[:, 1] / pairs[:, 0]).tolist()),
    )


def _blocks(corpus: Corpus) -> Iterator[np.ndarray]:
    """Document offsets of 65,536 documents at a time."""
    for start in range(0, corpus.num_documents, _BLOCK_DOCUMENTS):
        offsets = np.array(corpus.document_offsets[start : start + _BLOCK_DOCUMENTS + 1])
        # Compiled loops do not check bounds.
        if offsets[0] < 0 or offsets[-1] > corpus.num_sentences or (np.diff(offsets) < 1).any():
            raise _damaged(corpus)
        yield offsets


def _damaged(corpus: Corpus) -> UserError:
    return UserError(f"{corpus.directory}: the arrays of {corpus.split} are damaged; `bert-data verify` names the file")


@numba.njit(cache=True)
def _block_lengths(sentence_counts, sentence_lengths, document_offsets):
    """Counts the sentences of a block by length; returns the tokens of each document."""
    documents = np.zeros(len(document_offsets) - 1, np.int64)
    for document in range(len(documents)):
        for sentence in range(document_offsets[document], document_offsets[document + 1]):
            length = sentence_lengths[sentence]
            sentence_counts[length] += 1
            documents[document] += length
    return documents


def _pieces(token_counts: np.ndarray, tokenizer: Tokenizer) -> PieceUsage:
    ordinary = np.ones(len(token_counts), bool)
    ordinary[list(tokenizer.special_ids)] = False
    counts = np.asarray(token_counts)[ordinary]
    decades = []
    start = 1
    while start <= counts.max(initial=0):
        number = int(((counts >= start) & (counts < 10 * start)).sum())
        decades.append((f"{start:,}–{10 * start - 1:,}", number))
        start *= 10
    # Stable, so that pieces with the same count are in the order of their ids.
    order = np.argsort(-np.asarray(token_counts), kind="stable")[:FREQUENT_PIECES]
    return PieceUsage(
        total=len(counts),
        never=int((counts == 0).sum()),
        tokens=int(np.sum(token_counts)),
        decades=tuple(decades),
        frequent=tuple((tokenizer.id_to_token(i), int(token_counts[i])) for i in order if token_counts[i]),
    )


def _samples(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[Sample]:
    for document in sorted({round(share * (corpus.num_documents - 1)) for share in _SAMPLES_AT}):
        first, end = (int(i) for i in corpus.document_offsets[document : document + 2])
        sentences, left, sentence = [], _SAMPLE_TOKENS, first
        while left > 0 and sentence < end:
            ids = corpus.sentences(sentence, sentence + 1)
            sentences.append(tokenizer.decode(ids[:left]))
            left -= len(ids)
            sentence += 1
        tokens = int(np.sum(corpus.sentence_lengths[first:end], dtype=np.int64))
        yield Sample(document, tokens, tuple(sentences), cut=tokens > _SAMPLE_TOKENS)
