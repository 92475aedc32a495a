"""Which examples make which rows: a pure function of (corpus lengths, data settings, seq_len, seed, epoch).

An epoch is cut into windows that are planned one at a time, so that neither the first batch nor a resume
waits for the length of the corpus:

    corpus    = stretches of whole records, STRETCH_TOKENS or little more each
    epoch     = the stretches, permuted; hash of (seed, epoch)
    window    = WINDOW_STRETCHES of them: their examples, packed into rows
    its order = the rows, permuted; hash of (seed, epoch, window)

No record is read here.
"""

import hashlib
from dataclasses import dataclass

import numba
import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.examples import Layout, make_examples
from bert_jax.data.hash_random import key_of, permuted
from bert_jax.data.packing import pack
from bert_jax.errors import UserError

STREAM_VERSION = 1
"""To be raised with every change of what a seed makes of a corpus: a run goes on with the version it began with."""
STRETCH_TOKENS = 16_384
"""Long enough that few examples end at a stretch's end, short enough that a row's neighbours in the text are rare
in its batch."""
WINDOW_STRETCHES = 256
"""About 4 M tokens: 8,192 rows of 512 to mix and to pack."""
EXAMPLE_STREAM, ORDER_STREAM, PACKING_STREAM, ID_STREAM = 0xE4A, 0x04D, 0xFAC, 0x1D


@dataclass(frozen=True)
class Window:
    """The rows of one window, in the order of training."""

    examples: np.ndarray
    """structured array of `examples.EXAMPLE`, in the order of their text"""
    row_starts: np.ndarray
    """first member of each row, int64 [rows + 1]"""
    members: np.ndarray
    """examples of all rows, one row after the other, int64 [num_examples]"""
    order: np.ndarray
    """which row comes when, int64 [rows]"""
    stretches: np.ndarray
    """records [first, last) of each stretch, int64 [n, 2]"""
    truncated: int
    """tokens of the window that no example shows"""
    singles: int
    """pairs that had to have a random B"""

    def __len__(self) -> int:
        return len(self.order)


class Plan:
    """All windows of all epochs of one corpus, for rows of one length."""

    def __init__(self, corpus: Corpus, data: DataConfig, seq_len: int, seed: int):
        """Looks at every length once: two tenths of a second for 2 billion tokens (docs/LOG.md).

        Raises:
          UserError: an empty split, a pair format for fewer than two documents, lengths that no corpus has.
        """
        self.corpus, self.data, self.seq_len, self.seed = corpus, data, seq_len, seed
        more = "a larger --validation-fraction" if corpus.split == "validation" else "more text"
        if not corpus.num_tokens:
            raise UserError(f"corpus {corpus.directory}: split '{corpus.split}' is empty: build it again with {more}")
        if data.paired and corpus.num_documents < 2:
            raise UserError(
                f"corpus {corpus.directory}: split '{corpus.split}' has {corpus.num_documents} document(s), but "
                f"{data.format} needs at least 2, because random segments come from another document: build it again "
                f"with {more}, or set --data.format doc_sentences and --objective.pair none"
            )
        self._bounds = stretches(corpus)
        self.windows = max(1, round((len(self._bounds) - 1) / WINDOW_STRETCHES))
        self._layout = Layout(np.asarray(corpus.sentence_lengths), np.asarray(corpus.document_offsets))
        self.salt = np.uint64(int(hashlib.sha256(corpus.identity.encode()).hexdigest()[:16], 16))

    def example_epoch(self, epoch: int) -> int:
        """Which set of examples an epoch uses."""
        copies = self.data.example_copies
        return epoch if copies is None else epoch % copies

    def window(self, epoch: int, index: int) -> Window:
        """Plan one window; costs tens of milliseconds whatever the corpus."""
        count = len(self._bounds) - 1
        first, last = (count * i // self.windows for i in (index, index + 1))
        chosen = permuted(np.arange(first, last), count, key_of(self.seed, ORDER_STREAM, epoch))
        records = np.stack([self._bounds[chosen], self._bounds[chosen + 1]], axis=1)
        sentences = np.asarray(self.corpus.record_offsets)[records]
        key = key_of(self.seed, EXAMPLE_STREAM, self.example_epoch(epoch))
        starts, stops = np.ascontiguousarray(sentences.T)
        made = make_examples(self._layout, starts, stops, self.data, self.seq_len, key, self.salt)
        packing = key_of(self.seed, PACKING_STREAM, epoch, index)
        lengths = np.ascontiguousarray(made.examples["length"])
        row_starts, members = pack(lengths, self.seq_len, self.data.slots(self.seq_len), packing)
        rows = len(row_starts) - 1
        order = permuted(np.arange(rows), rows, key_of(self.seed, ORDER_STREAM, epoch, index))
        return Window(made.examples, row_starts, members, order, records, made.truncated, made.singles)


def stretches(corpus: Corpus) -> np.ndarray:
    """First record of each stretch, and the end of the last, int64 [n + 1].

    Raises:
      UserError: a document without a sentence, or a sentence without a token; `bert-data` writes neither.
    """
    lengths, documents = np.asarray(corpus.sentence_lengths), np.asarray(corpus.document_offsets)
    empty_sentence, empty_document = _find_empty(lengths, documents)
    if empty_sentence >= 0 or empty_document >= 0:
        what = f"document {empty_document} has no sentence"
        if empty_sentence >= 0:
            what = f"sentence {empty_sentence} has no token"
        raise UserError(f"corpus {corpus.directory}: {what} in split '{corpus.split}'; build the corpus again")
    return _stretches(lengths, np.asarray(corpus.record_offsets), STRETCH_TOKENS)


@numba.njit(cache=True, nogil=True)
def _find_empty(lengths, documents):
    """The first sentence without a token and the first document without a sentence; -1 where there is none."""
    for document in range(len(documents) - 1):
        if documents[document] >= documents[document + 1]:
            return -1, document
    for sentence in range(len(lengths)):
        if lengths[sentence] == 0:
            return sentence, -1
    return -1, -1


@numba.njit(cache=True, nogil=True)
def _stretches(lengths, records, wanted):
    bounds = np.zeros(len(records), np.int64)
    count, tokens = 0, 0
    for record in range(len(records) - 1):
        for sentence in range(records[record], records[record + 1]):
            tokens += lengths[sentence]
        if tokens >= wanted or record == len(records) - 2:
            count, tokens = count + 1, 0
            bounds[count] = record + 1
    return bounds[: count + 1].copy()
