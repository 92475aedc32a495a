"""Packing against a slow reference implementation, and invariants of every packing."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.hash_random import make_key, permute
from bert_jax.data.packing import pack


def slow_best_fit(lengths: list[int], seq_len: int, slots: int, key) -> list[list[int]]:
    """Longest first; into the fullest row that has room and a slot, the newest of equals."""
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
    return rows


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


def test_the_key_decides_among_equals():
    lengths = np.full(100, 10, np.int32)
    one, two = (rows_of(pack(lengths, 30, 3, make_key(key))) for key in (1, 2))
    assert one != two and one == rows_of(pack(lengths, 30, 3, make_key(1)))
    assert all(len(row) == 3 for row in one[:-1])


@pytest.mark.parametrize(("seq_len", "goal"), [(128, 0.995), (512, 0.998)])
def test_mixed_lengths_fill_their_rows(seq_len, goal):
    """What short and long examples together can do; 10,000 gamma lengths of mean seq_len / 3."""
    lengths = np.random.default_rng(0).gamma(2.0, seq_len / 6, 10_000).clip(5, seq_len).astype(np.int32)
    packed = pack(lengths, seq_len, 16, make_key(0))
    assert lengths.sum() / (len(packed[0]) - 1) / seq_len > goal
