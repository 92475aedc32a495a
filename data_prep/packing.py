"""How full the rows of training will be: examples of whole sentences, then several examples in a row.

Computed from length arrays alone. An example is what RoBERTa calls doc-sentences (Liu et al. 2019, 4.2):
consecutive whole sentences of one document, as many as fit into a row. Rows are then packed from the
histogram of example lengths, longest example first, each into the row with the least room that still
holds it: the histogram packing of Krell et al. 2021 (arXiv:2107.02027) with best fit, their LPFHP. Their
SPFHP takes the row with the most room; on books and Wikipedia both fill the same number of rows.

What it assumes: one [CLS] and one [SEP] per example, no shorter examples on purpose, and an epoch that is
packed as a whole. A stream that packs a window at a time comes close to it; other kinds of examples (BERT's
pairs of segments, say) fill other rows.
"""

import dataclasses

import numba
import numpy as np

SPECIALS = 2
"""Special tokens of an example: one [CLS] and one [SEP]."""


@dataclasses.dataclass(frozen=True)
class Fill:
    """What an epoch looks like in rows of one length, if all of it is packed at once."""

    seq_len: int
    """slots of a row"""
    examples: int
    """examples of the epoch; also its rows where each example has a row of its own"""
    tokens: int
    """real tokens of all examples, [CLS] and [SEP] included"""
    rows: int
    """rows when examples share them"""

    @property
    def padded(self) -> float:
        """Share of slots that hold a real token with one example in a row."""
        return self.tokens / (self.examples * self.seq_len)

    @property
    def packed(self) -> float:
        """The same with packed rows."""
        return self.tokens / (self.rows * self.seq_len)


def example_counts(seq_len: int) -> np.ndarray:
    """An empty histogram for `add_examples`: int64 [seq_len + 1], by length with special tokens.

    Raises:
      ValueError: no token fits between the special ones.
    """
    if seq_len <= SPECIALS:
        raise ValueError(f"a row of {seq_len} slots has no room beside {SPECIALS} special tokens")
    return np.zeros(seq_len + 1, np.int64)


def add_examples(counts: np.ndarray, sentence_lengths: np.ndarray, document_offsets: np.ndarray) -> None:
    """Counts the examples of some documents by their length.

    A sentence longer than a row is cut into whole rows, and what is left of it begins the next example.

    Args:
      counts: histogram to add to, from `example_counts`.
      sentence_lengths: tokens of sentences, uint16, of the whole split.
      document_offsets: int64 [documents + 1], first sentence of each document and the end of the last;
        ascending and within `sentence_lengths`, which is not checked here.
    """
    _add_examples(counts, np.asarray(sentence_lengths), np.asarray(document_offsets))


def fill(counts: np.ndarray) -> Fill:
    """Packs the examples of a histogram made by `add_examples`; the same histogram gives the same rows."""
    lengths = np.arange(len(counts))
    return Fill(
        seq_len=len(counts) - 1,
        examples=int(counts.sum()),
        tokens=int(lengths @ counts),
        rows=int(_best_fit_rows(counts)),
    )


@numba.njit(cache=True)
def _add_examples(counts, sentence_lengths, document_offsets):
    budget = len(counts) - 1 - SPECIALS
    for document in range(len(document_offsets) - 1):
        size = 0
        for sentence in range(document_offsets[document], document_offsets[document + 1]):
            length = np.int64(sentence_lengths[sentence])
            if size + length > budget:
                if size:
                    counts[size + SPECIALS] += 1
                counts[budget + SPECIALS] += length // budget
                size = length % budget
            else:
                size += length
        if size:
            counts[size + SPECIALS] += 1


@numba.njit(cache=True)
def _best_fit_rows(counts):
    seq_len = len(counts) - 1
    rows_with_room = np.zeros(seq_len + 1, np.int64)
    rows = 0
    for length in range(seq_len, 0, -1):
        left = counts[length]
        for room in range(length, seq_len):
            left -= _put(rows_with_room, room, length, left)
            if not left:
                break
        new = -(-left // (seq_len // length))
        rows += new
        rows_with_room[seq_len] = new
        _put(rows_with_room, seq_len, length, left)
    return rows


@numba.njit(cache=True)
def _put(rows_with_room, room, length, left):
    """Puts up to `left` examples of a length into the rows that have this room; returns how many."""
    # A row that took one example and has room for another is now the best fit, so it is filled up first.
    each = room // length
    full = min(left // each, rows_with_room[room])
    rows_with_room[room] -= full
    rows_with_room[room - each * length] += full
    rest = left - full * each
    if rest == 0 or rows_with_room[room] == 0:
        return full * each
    rows_with_room[room] -= 1
    rows_with_room[room - rest * length] += 1
    return left
