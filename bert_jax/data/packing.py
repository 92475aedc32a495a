"""Packs several examples into one row: best fit, longest first.

Histogram packing (Krell et al. 2021, arXiv:2107.02027) uses lengths alone; so does this module, but it tracks
individual examples and limits how many share a row.
"""

import numpy as np

from bert_jax.data.hash_random import permute
from bert_jax.numba_cache import cached_njit


def pack(lengths: np.ndarray, seq_len: int, slots: int, key: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """Assigns every example to a row.

    An example goes into the row with the least room that is sufficient; examples of one length are placed in a keyed
    order. The same arguments give the same rows.

    Args:
      lengths: tokens of each example, special ones included, int32 [n], none above `seq_len`.
      seq_len: tokens of a row.
      slots: maximum examples per row; with 1, every example gets its own row.
      key: determines which of the examples of one length share a row.

    Returns:
      first member of each row, int64 [rows + 1]; rows are in the order of their smallest members; and
      the members, indices of examples, int64 [n].
    """
    if slots == 1:
        return np.arange(len(lengths) + 1), np.arange(len(lengths))
    return _pack(lengths, seq_len, slots, permute(np.arange(len(lengths)), len(lengths), key))


@cached_njit
def _pack(lengths, seq_len, slots, order):
    count = len(lengths)
    row_of = np.empty(count, np.int64)
    rows_with_room = np.full(seq_len + 1, -1)  # the newest row that has exactly this much left
    previous = np.empty(count, np.int64)  # the row that was the newest before
    taken = np.zeros(count, np.int64)  # slots of each row
    rows = 0
    by_length = _longest_first(lengths, seq_len, order)
    for place in range(count):
        example = by_length[place]
        length = lengths[example]
        room = length
        while room <= seq_len and rows_with_room[room] < 0:
            room += 1
        if room <= seq_len:
            row = rows_with_room[room]
            rows_with_room[room] = previous[row]
        else:
            row, room = rows, seq_len
            rows += 1
        row_of[example] = row
        taken[row] += 1
        if taken[row] < slots and room > length:
            previous[row] = rows_with_room[room - length]
            rows_with_room[room - length] = row
    _number_rows_by_first_example(row_of, taken[:rows])
    first = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        first[row + 1] = first[row] + taken[row]
    members = np.empty(count, np.int64)
    next_place = first[:-1].copy()
    for place in range(count):
        example = by_length[place]
        members[next_place[row_of[example]]] = example
        next_place[row_of[example]] += 1
    return first, members


@cached_njit
def _number_rows_by_first_example(row_of, taken):
    """Renumbers the rows in `row_of` and `taken`, in place."""
    number = np.full(len(taken), -1)
    by_old_number = taken.copy()
    rows = 0
    for example in range(len(row_of)):
        old = row_of[example]
        if number[old] < 0:
            number[old] = rows
            taken[rows] = by_old_number[old]
            rows += 1
        row_of[example] = number[old]


@cached_njit
def _longest_first(lengths, seq_len, order):
    """Counting sort, stable for examples of equal length."""
    place = np.zeros(seq_len + 2, np.int64)
    for length in lengths:
        place[seq_len - length + 1] += 1
    for i in range(seq_len + 1):
        place[i + 1] += place[i]
    out = np.empty(len(lengths), np.int64)
    for example in order:
        slot = seq_len - lengths[example]
        out[place[slot]] = example
        place[slot] += 1
    return out
