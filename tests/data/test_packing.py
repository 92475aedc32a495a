"""Packing against a slow reference implementation, and invariants of every packing."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.hash_random import make_key, permute
from bert_jax.data.packing import pack


def slow_best_fit(lengths: list[int], seq_len: int, slots: int, key) -> list[list[int]]:
    """Longest first; into the fullest row that has room and a slot, the newest of equals. Rows in order of the text."""
    order = permute(np.arange(len(lengths)), len(lengths), key).tolist()
    rows: list[list[int]] = []
    touched: list[int] = []  # when each row last changed
    for clock, example in enumerate(sorted(order, key=lambda i: -lengths[i])):
        left = [seq_len - sum(lengths[i] for i in row) for row in rows]
        fits = [r for r, row in enumerate(rows) if left[r] >= lengths[example] and len(row) < slots]
        if fits:
            row = min(fits, key=lambda r: (left[r], -touched[r]))
        else:
            row = len(rows)
            rows.append([])
            touched.append(0)
        rows[row].append(example)
        touched[row] = clock
    return sorted(rows, key=min)


def rows_of(packed) -> list[list[int]]:
    starts, members = packed
    return [members[a:b].tolist() for a, b in itertools.pairwise(starts)]


@settings(max_examples=300, deadline=None)
@given(st.integers(3, 40), st.data())
def test_packing_equals_the_reference(seq_len, data):
    lengths = data.draw(st.lists(st.integers(1, seq_len), max_size=60))
    slots = data.draw(st.integers(1, 6))
    key = make_key(data.draw(st.integers(0, 99)))
    rows = rows_of(pack(np.array(lengths, np.int32), seq_len, slots, key))
    assert Counter(i for row in rows for i in row) == Counter(range(len(lengths)))
    assert all(1 <= len(row) <= slots and sum(lengths[i] for i in row) <= seq_len for row in rows)
    if slots == 1:
        assert rows == [[i] for i in range(len(lengths))]
    else:
        assert rows == slow_best_fit(lengths, seq_len, slots, key)
