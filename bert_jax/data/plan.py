"""Which examples make which rows: a pure function of (corpus lengths, data settings, seq_len, seed, epoch).

An epoch is cut into windows that are planned one at a time, so that neither the first batch nor a resume
waits for the length of the corpus:

    corpus    = stretches of whole records, about STRETCH_TOKENS each
    epoch     = the stretches, permuted; hash of (seed, epoch)
    window    = WINDOW_STRETCHES of them: their examples, packed into rows
    its order = the rows, permuted; hash of (seed, epoch, window)

No record is read here.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.config_sections import PAIR_FORMATS
from bert_jax.data.corpus import Corpus
from bert_jax.data.draws import key_of, permuted
from bert_jax.data.examples import Layout, make_examples
from bert_jax.data.packing import pack
from bert_jax.errors import UserError

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
        """Takes the same time for any size of corpus.

        Raises:
          UserError: an empty split, or pairs asked of fewer than two documents.
        """
        self.corpus, self.data, self.seq_len, self.seed = corpus, data, seq_len, seed
        if not corpus.num_tokens:
            raise UserError(f"corpus {corpus.directory}: split '{corpus.split}' is empty")
        pairs = {form for formats in PAIR_FORMATS.values() for form in formats}
        if data.format in pairs and corpus.num_documents < 2:
            raise UserError(
                f"corpus {corpus.directory}: split '{corpus.split}' has {corpus.num_documents} document(s), but "
                f"{data.format} needs at least 2, so that a random segment can come from another one: add text, "
                "separate documents by a blank line when building, or set --data.format doc_sentences"
            )
        records = len(corpus.record_offsets) - 1
        self._per_stretch = max(1, round(STRETCH_TOKENS * records / corpus.num_tokens))
        self._stretches = -(-records // self._per_stretch)
        self.windows = max(1, round(self._stretches / WINDOW_STRETCHES))
        self._layout = Layout(np.asarray(corpus.sentence_lengths), np.asarray(corpus.document_offsets))
        self.salt = np.uint64(int(hashlib.sha256(corpus.identity.encode()).hexdigest()[:16], 16))

    def example_epoch(self, epoch: int) -> int:
        """Which set of examples an epoch uses."""
        copies = self.data.example_copies
        return epoch if copies is None else epoch % copies

    def window(self, epoch: int, index: int) -> Window:
        """Plan one window; costs tens of milliseconds whatever the corpus."""
        first, last = (self._stretches * i // self.windows for i in (index, index + 1))
        chosen = permuted(np.arange(first, last), self._stretches, key_of(self.seed, ORDER_STREAM, epoch))
        records = np.stack([chosen, chosen + 1], axis=1) * self._per_stretch
        records = np.minimum(records, len(self.corpus.record_offsets) - 1)
        sentences = np.asarray(self.corpus.record_offsets)[records]
        key = key_of(self.seed, EXAMPLE_STREAM, self.example_epoch(epoch))
        starts, stops = np.ascontiguousarray(sentences.T)
        made = make_examples(self._layout, starts, stops, self.data, self.seq_len, key, self.salt)
        packing = key_of(self.seed, PACKING_STREAM, epoch, index)
        lengths = np.ascontiguousarray(made.examples["length"])
        row_starts, members = pack(lengths, self.seq_len, self.data.examples_per_row, packing)
        rows = len(row_starts) - 1
        order = permuted(np.arange(rows), rows, key_of(self.seed, ORDER_STREAM, epoch, index))
        return Window(made.examples, row_starts, members, order, records, made.truncated, made.singles)
