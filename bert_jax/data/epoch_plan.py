"""Which examples make which rows: a pure function of (corpus lengths, data settings, seq_len, seed, epoch).

An epoch is split into windows that are planned one at a time, so the time to the first batch and to resume does not
depend on the size of the corpus:

    corpus       = chunks of whole records, CHUNK_TOKENS or slightly more each
    epoch        = the chunks, permuted by a hash of (seed, epoch)
    window       = WINDOW_CHUNKS chunks: their examples, packed into rows
                   (with weights by source, language or score, those of the documents that are in the epoch)
    window order = the rows, permuted by a hash of (seed, epoch, window) so that each batch has rows of all its parts

No record is read here.
"""

import copy
import hashlib
from dataclasses import dataclass

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.examples import CorpusLayout, make_examples
from bert_jax.data.hash_random import bernoulli_threshold, make_key, permute, permute_evenly
from bert_jax.data.manifest import array_file
from bert_jax.data.packing import pack
from bert_jax.data.sampling import DocumentSampling, document_sampling
from bert_jax.data.shards import REMEDY
from bert_jax.data.word_starts import WordStarts, word_start_offsets
from bert_jax.errors import UserError
from bert_jax.numba_cache import cached_njit

STREAM_VERSION = 3
"""Raise it with every change of the rows that a seed gives: a run continues only with the version it started with."""
CHUNK_TOKENS = 16_384
"""Large enough that few examples end at the end of a chunk, small enough that neighbouring texts are rarely in the same
batch."""
WINDOW_CHUNKS = 256
"""About 4 M tokens: 8,192 rows of 512 to shuffle and to pack."""
MAX_WINDOW_CHUNKS = 32 * WINDOW_CHUNKS
"""If an epoch has few of the documents, a window has at most so many chunks, and fewer rows: the time to plan it is
bounded."""
EXAMPLE_STREAM, ORDER_STREAM, PACKING_STREAM, ID_STREAM = 0xE4A, 0x04D, 0xFAC, 0x1D


@dataclass(frozen=True)
class WindowPlan:
    """The rows of one window, in the order of training."""

    examples: np.ndarray
    """structured array of `examples.EXAMPLE_DTYPE`, in the order of the text"""
    row_starts: np.ndarray
    """first member of each row, in the order of the text, int64 [rows + 1]"""
    members: np.ndarray
    """indices of the examples of all rows, row by row, int64 [num_examples]"""
    order: np.ndarray
    """indices of the rows in the order of training, int64 [rows]"""
    chunks: np.ndarray
    """records [first, last) of each chunk, or of its parts between documents that are left out, int64 [n, 2]"""
    truncated_tokens: int
    """tokens of the window that are in no example"""
    forced_random_pairs: int
    """pairs of one sentence, whose segment B can only be random"""

    def __len__(self) -> int:
        return len(self.order)


class EpochPlanner:
    """All windows of all epochs of one corpus, for rows of one length."""

    def __init__(self, corpus: Corpus, data: DataConfig, seq_len: int, seed: int):
        """Reads every length twice and every offset: 0.5 s for 2 billion tokens (docs/log/stream.md, 2026-11-26).

        Raises:
          UserError: an empty split, a pair format for fewer than two documents, or arrays that contradict each other.
        """
        self.corpus, self.data, self.seq_len, self.seed = corpus, data, seq_len, seed
        if not corpus.num_tokens:
            raise UserError(
                f"corpus {corpus.directory}: split '{corpus.split}' is empty: build it again with more text"
            )
        if data.paired and corpus.num_documents < 2:
            raise UserError(
                f"corpus {corpus.directory}: split '{corpus.split}' has {corpus.num_documents} document(s), but "
                f"{data.format} needs at least 2, because random segments come from another document: build it again "
                "so that each split has 2 or more, or set --data.format doc_sentences and --objective.pair none"
            )
        corpus.check_offsets()
        lengths, records = np.asarray(corpus.sentence_lengths), np.asarray(corpus.record_offsets)
        self._bounds = chunk_bounds(lengths, records, CHUNK_TOKENS)
        self._sampling = sampling = document_sampling(corpus, data, seed)
        self.num_tokens = corpus.num_tokens if sampling is None else sampling.num_tokens
        """of the documents of an epoch, on average"""
        chunks = len(self._bounds) - 1
        wanted = round(chunks * self.num_tokens / corpus.num_tokens / WINDOW_CHUNKS)
        self.windows = max(1, wanted, chunks // MAX_WINDOW_CHUNKS)
        groups = records[self._bounds]
        words = WordStarts(np.asarray(corpus.word_starts), groups, word_start_offsets(lengths, groups))
        if words.offsets[-1] != len(words.bits):
            raise UserError(
                f"corpus {corpus.directory}: {array_file(corpus.split, 'word_starts')} contradicts "
                f"{array_file(corpus.split, 'sentence_lengths')}; {REMEDY}"
            )
        drawn = () if sampling is None else map(bernoulli_threshold, sampling.shares)
        self._layout = CorpusLayout(
            sentence_lengths=lengths,
            document_offsets=np.asarray(corpus.document_offsets),
            record_offsets=records,
            words=words,
            groups=np.zeros(0, np.uint16) if sampling is None else sampling.groups,
            group_thresholds=np.array([*drawn], np.uint64),
        )
        self.salt = np.uint64(int(hashlib.sha256(corpus.identity.encode()).hexdigest()[:16], 16))

    def with_seq_len(self, seq_len: int) -> "EpochPlanner":
        """The plan for rows of another length; reads nothing."""
        planner = copy.copy(self)
        planner.seq_len = seq_len
        return planner

    def window(self, epoch: int, index: int) -> WindowPlan:
        """Plans one window; the time does not depend on the size of the corpus."""
        count = len(self._bounds) - 1
        first, last = (count * i // self.windows for i in (index, index + 1))
        chosen = permute(np.arange(first, last), count, make_key(self.seed, ORDER_STREAM, epoch))
        records = np.stack([self._bounds[chosen], self._bounds[chosen + 1]], axis=1)
        copies = self.data.example_copies
        example_epoch = epoch if copies is None else epoch % copies
        if self._sampling is not None:
            records = self._chosen_records(self._sampling, records, example_epoch)
        sentences = np.asarray(self.corpus.record_offsets)[records]
        key = make_key(self.seed, EXAMPLE_STREAM, example_epoch)
        examples, truncated, forced_random = make_examples(
            self._layout, sentences, self.data, self.seq_len, key, self.salt
        )
        packing = make_key(self.seed, PACKING_STREAM, epoch, index)
        lengths = np.ascontiguousarray(examples["length"])
        row_starts, members = pack(lengths, self.seq_len, self.data.max_examples_per_row(self.seq_len), packing)
        rows = len(row_starts) - 1
        order = permute_evenly(np.arange(rows), rows, make_key(self.seed, ORDER_STREAM, epoch, index))
        return WindowPlan(examples, row_starts, members, order, records, truncated, forced_random)

    def _chosen_records(self, sampling: DocumentSampling, chunks: np.ndarray, epoch: int) -> np.ndarray:
        """The records of an epoch's documents among those of `chunks`, as chunks without gaps, int64 [n, 2]."""
        chunk = np.repeat(np.arange(len(chunks)), np.diff(chunks)[:, 0])
        records = expand_ranges(chunks)
        layout = self._layout
        documents = np.searchsorted(layout.document_offsets, layout.record_offsets[records], "right") - 1
        kept = sampling.is_chosen(documents, epoch)
        chunk, records = chunk[kept], records[kept]
        begins = np.diff(chunk, prepend=-1).astype(bool) | (np.diff(records, prepend=-2) != 1)
        ends = np.append(begins[1:], True)[: len(records)]
        return np.stack([records[begins], records[ends] + 1], axis=1)


def expand_ranges(ranges: np.ndarray) -> np.ndarray:
    """All integers of ranges [first, last), int64 [n, 2], one range after the other."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, last) for first, last in ranges)])


@cached_njit
def chunk_bounds(lengths, record_offsets, min_tokens):
    """First record of each chunk, and the end of the last, int64 [n + 1]."""
    bounds = np.zeros(1024, np.int64)
    count, tokens = 0, 0
    for record in range(len(record_offsets) - 1):
        for sentence in range(record_offsets[record], record_offsets[record + 1]):
            tokens += lengths[sentence]
        if tokens >= min_tokens or record == len(record_offsets) - 2:
            count, tokens = count + 1, 0
            if count == len(bounds):
                bounds = np.concatenate((bounds, bounds))
            bounds[count] = record + 1
    return bounds[: count + 1].copy()
