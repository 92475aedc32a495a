"""Estimates packing efficiency and the share of random sentence pairs of training rows, from length arrays alone.

An example is RoBERTa's doc-sentences (Liu et al. 2019, 4.2): as many consecutive whole sentences of one document as fit
into a row. Rows are then packed from the histogram of example lengths, longest example first, each into the row with
the least room that is sufficient: the histogram packing of Krell et al. 2021 (arXiv:2107.02027) with best fit, their
LPFHP. Their SPFHP takes the row with the most room; on books and Wikipedia both need the same number of rows.

Assumptions: one [CLS] and one [SEP] per example, no intentionally shorter examples, and an epoch that is packed as a
whole. A stream that packs one window at a time comes close to it; other formats (such as BERT's segment pairs) give
other rows.

Of BERT's pairs (`bert_jax.data.examples`, format segment_pair), half have a random second segment if the pair has two
sentences or more, and all if it has one: short documents give more than half.
"""

import numba
import numpy as np

SPECIALS = 2
"""Special tokens of an example: one [CLS] and one [SEP]."""
PAIR_SPECIALS = 3
"""Special tokens of a pair: one [CLS] and two [SEP]."""


def estimate_packing(counts: np.ndarray) -> dict:
    """Rows of an epoch that is packed as a whole; the same histogram gives the same rows.

    Args:
      counts: number of examples by length with special tokens, int64 [seq_len + 1], see `add_example_lengths`.

    Returns:
      tokens of a row; examples of the epoch, which are also its rows without packing; packed rows; and the share of
      tokens that are not padding in packed rows and in rows with one example each ([CLS] and [SEP] count as tokens).
    """
    seq_len, examples, rows = len(counts) - 1, int(counts.sum()), int(_best_fit_rows(counts))
    tokens = int(np.arange(len(counts)) @ counts)
    return {
        "seq_len": seq_len,
        "examples": examples,
        "rows": rows,
        "packing_efficiency": tokens / (rows * seq_len),
        "unpacked_efficiency": tokens / (examples * seq_len),
    }


@numba.njit(cache=True)
def add_example_lengths(counts: np.ndarray, sentence_lengths: np.ndarray, document_offsets: np.ndarray) -> None:
    """Counts the examples of some documents by length.

    A sentence longer than a row is split into full rows, and its remainder begins the next example.

    Args:
      counts: histogram to add to, int64 [seq_len + 1].
      sentence_lengths: tokens of sentences, uint16, of the whole split.
      document_offsets: int64 [documents + 1], first sentence of each document and the end of the last;
        must be ascending and within `sentence_lengths`; this is not checked.
    """
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
def expected_pairs(sentence_lengths: np.ndarray, document_offsets: np.ndarray, seq_len: int) -> np.ndarray:
    """Expected number of pairs of some documents, and of pairs with a random B, float64 [2].

    The exact expectation for pairs with the length of a full row, each within one document; shorter target lengths
    (data.short_example_rate) give slightly more random ones.

    Args:
      sentence_lengths, document_offsets: see `add_example_lengths`.
      seq_len: tokens of a row.
    """
    target = seq_len - PAIR_SPECIALS
    totals = np.zeros(2)
    for document in range(len(document_offsets) - 1):
        first, end = document_offsets[document], document_offsets[document + 1]
        # Expected pairs from each sentence on, of both kinds, and their sums over all later sentences.
        pairs, sums = np.zeros((end - first + 1, 2)), np.zeros((end - first + 2, 2))
        stop, tokens = end - first, np.int64(0)
        for start in range(end - first - 1, -1, -1):
            tokens += np.int64(sentence_lengths[first + start])
            while tokens - np.int64(sentence_lengths[first + stop - 1]) >= target and stop > start + 1:
                stop -= 1
                tokens -= np.int64(sentence_lengths[first + stop])
            for kind in range(2):
                if stop == start + 1:
                    pairs[start, kind] = 1 + pairs[stop, kind]
                else:
                    # A random B: the next pair begins at the end of A, at any sentence within this pair.
                    repeated = (sums[start + 1, kind] - sums[stop, kind]) / (stop - start - 1)
                    pairs[start, kind] = (1 if kind == 0 else 0.5) + (pairs[stop, kind] + repeated) / 2
                sums[start, kind] = sums[start + 1, kind] + pairs[start, kind]
        totals += pairs[0]
    return totals


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
    """Puts up to `left` examples of a length into the rows that have this room; returns their number."""
    # A row that got one example and has room for another is now the best fit, so it gets the next ones.
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
