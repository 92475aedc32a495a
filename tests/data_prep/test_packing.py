"""The estimate of packing efficiency against slow reference implementations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import DataConfig
from bert_jax.data.epoch_plan import EpochPlanner
from data_prep.inspection import packing
from tests.data.memory import make_corpus

documents = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=12)


def histogram(seq_len, some_documents):
    counts = np.zeros(seq_len + 1, np.int64)
    lengths = np.concatenate([np.array(d, np.uint16) for d in some_documents])
    offsets = np.cumsum([0, *map(len, some_documents)])
    packing.add_example_lengths(counts, lengths, offsets)
    return counts


def slow_examples(seq_len, some_documents):
    budget = seq_len - 2
    for sentences in some_documents:
        example = []
        for length in sentences:
            if sum(example) + length > budget:
                if example:
                    yield sum(example) + 2
                while length > budget:
                    yield seq_len
                    length -= budget
                example = []
            example.append(length)
        yield sum(example) + 2


def slow_best_fit(seq_len, lengths):
    room = []
    for length in sorted(lengths, reverse=True):
        best = min((i for i in range(len(room)) if room[i] >= length), key=lambda i: room[i], default=None)
        if best is None:
            room.append(seq_len)
            best = -1
        room[best] -= length
    return len(room)


@settings(deadline=None)  # the first call compiles
@given(documents, st.integers(3, 50))
def test_examples_equal_the_reference(some_documents, seq_len):
    counts = histogram(seq_len, some_documents)
    expected = np.bincount(list(slow_examples(seq_len, some_documents)), minlength=seq_len + 1)
    np.testing.assert_array_equal(counts, expected)
    tokens = sum(map(sum, some_documents)) + 2 * counts.sum()
    estimate = packing.estimate_packing(counts)
    assert estimate["unpacked_efficiency"] == tokens / (counts.sum() * seq_len)


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(1, 30), min_size=1, max_size=80))
def test_rows_are_those_of_best_fit(lengths):
    counts = np.bincount(lengths, minlength=31)
    estimate = packing.estimate_packing(counts)
    assert estimate["rows"] == slow_best_fit(30, lengths)
    assert 0 < estimate["unpacked_efficiency"] <= estimate["packing_efficiency"] <= 1


def test_expected_pairs_of_short_documents():
    """One sentence: a random pair. Two, half the time: one pair; else two random ones, A of each alone."""
    lengths = np.full(3, 5, np.uint16)
    for offsets, expected in (([0, 1, 2, 3], [3, 3]), ([0, 2], [1.5, 1]), ([0, 1, 3], [2.5, 2])):
        np.testing.assert_allclose(packing.expected_pairs(lengths, np.array(offsets), 128), expected)
    # A sentence as long as the row is a pair of its own.
    np.testing.assert_allclose(packing.expected_pairs(lengths, np.array([0, 3]), 8), [3, 3])


def test_expected_pairs_are_those_of_the_stream():
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 40, rng.integers(1, 25)).tolist() for _ in range(400)]
    corpus = make_corpus(documents, per_record=25)
    for seq_len in (32, 128):
        plan = EpochPlanner(corpus, DataConfig(short_example_rate=0.0), seq_len, 0)
        labels = [plan.window(epoch, i).examples["pair_label"] for epoch in range(8) for i in range(plan.windows)]
        labels = np.concatenate(labels)
        pairs, random = packing.expected_pairs(corpus.sentence_lengths, corpus.document_offsets, seq_len)
        assert labels.mean() > 0.52
        assert len(labels) / 8 == pytest.approx(pairs, rel=0.02)
        assert labels.mean() == pytest.approx(random / pairs, abs=0.01)
