"""Repeated keys and near-duplicates, against their definitions in quadratic time, for any memory and any ranges."""

import collections
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.builder.engines import sorted_runs
from data_prep.builder.engines.local import LocalEngine
from data_prep.duplicates import minhash, near_duplicates
from data_prep.duplicates.repeated_keys import find_repeats
from data_prep.word_hashes import word_hashes
from tests.data_prep.grouped import (
    clusters,
    decide,
    expected_of_clusters,
    random_signatures,
    reader_of,
    run_in_memory,
    slow_repeats,
)

MEMORY = [256 << 20, 20_000, 1]
"""bytes: one group; a few; one for each row"""


@given(st.integers(0, 2**32), st.integers(0, 600), st.sampled_from([1, 5, 300, 2**61]), st.integers(1, 30_000))
@settings(deadline=None, max_examples=30)  # the first call compiles
def test_repeated_keys(seed, rows, highest, memory_bytes):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, highest, (rows, 2)).astype(np.uint64)
    active = rng.random(rows) < 0.8
    reader = reader_of(keys, active, int(rng.integers(1, 300)))
    assert np.array_equal(find_repeats(reader, run_in_memory, memory_bytes), slow_repeats(keys, active))


def test_tables_of_keys_grow():
    """One group has more distinct keys than a table has slots at first."""
    keys = np.random.default_rng(0).integers(0, 30_000, (40_000, 2)).astype(np.uint64)
    keys[:, 1] = 0
    active = np.ones(len(keys), bool)
    assert 10_000 < len(np.unique(keys)) < 30_000
    found = find_repeats(reader_of(keys, active, 1000), run_in_memory, MEMORY[0])
    assert np.array_equal(found, slow_repeats(keys, active))


def test_a_key_that_most_rows_share_makes_no_large_group():
    """A range sends it once, and which of its rows repeat it to groups that take turns."""
    keys, active = np.ones((50_000, 2), np.uint64), np.arange(50_000) % 7 != 0
    keys[::10] = np.arange(10_000).reshape(-1, 2)
    sizes = collections.Counter()

    def run(steps):
        for key in steps.passes[0]:
            sizes.update({group: sum(one.nbytes for one in chunk) for group, chunk in steps.steps[0](key, iter(()))})
        yield from run_in_memory(steps)

    found = find_repeats(reader_of(keys, active, 1000), run, MEMORY[1])
    assert np.array_equal(found, slow_repeats(keys, active)) and found.sum() > 30_000
    assert len(sizes) > 200 and max(sizes.values()) < 6_000 < 16 * found.sum() // 50


@pytest.mark.parametrize(
    ("memory_bytes", "threshold", "per_range"), [(MEMORY[0], 0.5, 2000), (MEMORY[1], 0.5, 100), (MEMORY[1], 0.6, 150)]
)
def test_the_decision_is_that_of_the_definition(memory_bytes, threshold, per_range, monkeypatch):
    """Clusters are larger than a bucket, so what is compared depends on the order of documents."""
    if per_range == 150:
        monkeypatch.setattr(near_duplicates, "_PAIRS_PER_CHUNK", 100)
    signatures, active = clusters()
    expected = expected_of_clusters(threshold)
    assert 20 < expected.sum() < active.sum() - 20
    assert np.array_equal(decide(signatures, threshold, memory_bytes, active, per_range), expected)


def decide_in_files(directory, workers):
    with LocalEngine(workers, memory_bytes=20_000 * workers) as engine:
        run = functools.partial(engine.run_steps, scratch="none", local=directory)
        removed = decide(clusters()[0], 0.5, engine.memory_bytes, clusters()[1], 100, run)
    assert np.array_equal(removed, expected_of_clusters(0.5))
    assert not list(directory.iterdir())


@pytest.mark.slow
def test_files_between_steps(tmp_path, monkeypatch):
    """The memory of a worker is so small that a call writes several runs."""
    runs, flush = [], sorted_runs._RunWriter.flush
    monkeypatch.setattr(sorted_runs._RunWriter, "flush", lambda self: flush(self) or runs.append(self._runs))
    decide_in_files(tmp_path, 1)
    assert max(runs) > 1


@pytest.mark.slow
def test_two_processes(tmp_path):
    decide_in_files(tmp_path, 2)


def test_the_bucket_matters_above():
    """With larger buckets, the definition gives another result."""
    assert not np.array_equal(expected_of_clusters(0.5), expected_of_clusters(0.5, 100))


def words_of(rng, count):
    return [f"w{number}" for number in np.minimum(rng.zipf(1.2, count), 5000)]


def signatures_of(texts):
    return np.array([minhash.signature(word_hashes(text)) for text in texts])


def similar_by_shingles(texts, threshold):
    """Greedy, with the Jaccard similarity of the shingles of all pairs."""
    size = minhash.DEFAULT_SHINGLE_WORDS
    kept, removed = [], []
    for text in texts:
        words = text.split()
        shingles = {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
        similar = any(len(shingles & other) >= threshold * len(shingles | other) for other in kept)
        removed.append(similar)
        if not similar:
            kept.append(shingles)
    return removed


def test_planted_copies_are_found_and_nothing_else():
    """5 % of words changed are found, 30 % of the text shared is not; the truth is Jaccard over all pairs."""
    rng = np.random.default_rng(1)
    documents = [words_of(rng, rng.integers(100, 400)) for _ in range(300)]
    for source in range(0, 300, 5):
        copy = list(documents[source])
        for place in rng.choice(len(copy), len(copy) // 20, replace=False):
            copy[place] = "changed"
        shared = len(documents[source + 1]) * 3 // 10
        documents += [copy, documents[source + 1][:shared] + words_of(rng, len(documents[source + 1]) - shared)]
    texts = [" ".join(document) for document in documents]
    texts = [texts[i] for i in rng.permutation(len(texts))]
    expected = similar_by_shingles(texts, 0.5)
    assert sum(expected) == 60
    signatures = signatures_of(texts)
    for memory_bytes in MEMORY:
        assert decide(signatures, 0.5, memory_bytes).tolist() == expected


@pytest.mark.parametrize("memory_bytes", MEMORY)
def test_many_identical_and_many_empty(memory_bytes):
    signatures = np.repeat(signatures_of(["one two three four five six", ""]), 5000, axis=0)
    active = np.ones(10_000, bool)
    active[:2] = False
    removed = decide(signatures, 0.5, memory_bytes, active, 3000)
    assert np.flatnonzero(~removed).tolist() == [0, 1, 2, *range(5000, 10_000)]
    assert len(decide(np.zeros((0, 128), np.uint32), 0.5, memory_bytes)) == 0


def test_equal_signatures_do_not_fill_a_bucket():
    """60 equal documents, then two similar ones whose common bands are those of the equal ones."""
    equal, first, last = random_signatures(3)
    first[:60] = last[:60] = equal[:60]
    scattered = [61, 62, 64, 65]  # two of three values of bands 20 and 21
    last[scattered] = first[scattered]
    assert ((first == equal).sum(), (last == first).sum()) == (60, 64)
    assert np.flatnonzero(~decide(np.array([equal] * 60 + [first, last]))).tolist() == [0, 60]


def test_documents_similar_only_to_removed_ones_are_kept():
    a, b, c, other = random_signatures(4)
    b[:78] = a[:78]
    c[50:] = b[50:]
    assert (np.sum(a == b), np.sum(b == c), np.sum(a == c)) == (78, 78, 28)
    assert decide(np.array([a, b, c])).tolist() == [False, True, False]
    assert decide(np.array([a, b, c]), active=np.array([False, True, True])).tolist() == [False, False, True]
    assert decide(np.array([a, other, b, c]), per_range=1).tolist() == [False, False, True, False]


def test_threshold_is_inclusive():
    a, b, c = random_signatures(3)
    b[:64], c[:63] = a[:64], a[:63]
    assert decide(np.array([a, b, c])).tolist() == [False, True, False]


def test_crowded_bands_lead_to_the_first_documents_only():
    """60 values of boilerplate in 20 bands; a document similar to a late one is kept if they share no other band."""
    signatures = random_signatures(62)
    signatures[:, :60] = signatures[0, :60]
    early, late, easy = signatures[59:]
    scattered = [61, 62, 64, 65]  # two of three values of bands 20 and 21
    early[scattered], late[scattered] = signatures[5, scattered], signatures[50, scattered]
    easy[60:66] = signatures[50, 60:66]
    assert np.flatnonzero(decide(signatures)).tolist() == [59, 61]


@pytest.mark.parametrize(("threshold", "expected"), [(0.5, (42, 3)), (0.8, (21, 6)), (1.0, (1, 128)), (0.01, (128, 1))])
def test_bands(threshold, expected):
    assert near_duplicates.bands_and_rows(threshold, 128) == expected


def test_bands_find_what_is_at_the_threshold():
    """The derivation, measured: pairs whose signatures agree on each value with the threshold's probability."""
    rng = np.random.default_rng(4)
    left = random_signatures(2000)
    right = np.where(rng.random(left.shape) < 0.7, left, left + 1)
    bands, rows = near_duplicates.bands_and_rows(0.7, 128)
    same = (left == right)[:, : bands * rows].reshape(-1, bands, rows).all(axis=2).any(axis=1)
    assert same.mean() > 0.985
    similar = (left == right).mean(axis=1) >= 0.7
    removed = decide(np.concatenate([left, right]), 0.7, per_range=500)
    assert removed[2000:].tolist() == (same & similar).tolist()
