"""Words, signatures, keys, and duplicates, against sets and brute force."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.duplicates import minhash, near_duplicates
from data_prep.duplicates import text_keys as keys_module
from data_prep.duplicates.ngram_index import NgramIndex, count_hits
from data_prep.duplicates.word_hashes import ngram_hashes, word_hashes

ROOT = Path(__file__).resolve().parents[2]
PRIME = 2**61 - 1
SMALL = 20_000
"""bytes: an index or a table of a few dozen rows"""

pieces = st.sampled_from(
    ["a", "B", "b", "ab", "é", "中", "文", "ß", "Σς", "д", " ", "\n", ", ", "-", "\u00ad", "€", "7"]
)
mixed_text = st.one_of(st.text(), st.lists(pieces).map("".join))


def is_cjk(character):
    ranges = [(0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2CEAF)]
    return any(low <= ord(character) <= high for low, high in [*ranges, (0x2F800, 0x2FA1F)])


def split_words(text):
    """Reference implementation."""
    spaced = ""
    for character in text:
        category = unicodedata.category(character)
        if category == "Cf" and ord(character) < 0x30000:
            continue
        folded = character.casefold()
        folded = folded if len(folded) == 1 else character.lower()[0]
        if is_cjk(character):
            spaced += f" {character} "
        elif category[0] in "PSZ" or category in ("Cc", "Cs"):
            spaced += " "
        else:
            spaced += folded
    return spaced.split(" ")


@given(mixed_text)
@settings(deadline=None)  # the first call compiles
def test_words_are_hashed_as_words(text):
    expected = [word for word in split_words(text) if word]
    hashes = word_hashes(text).tolist()
    assert len(hashes) == len(expected)
    assert len(set(hashes)) == len(set(expected))
    assert len(set(zip(hashes, expected, strict=True))) == len(set(expected))


def test_hashes_never_change():
    """They determine the content of a corpus, and the split of each document."""
    assert word_hashes("Hello, WORLD! 你").tolist() == [16619132720648206044, 2627781577688125054, 3806957458172581314]
    assert minhash.signature(word_hashes("one two three four"), 3, 4).tolist() == [
        592564553,
        1930859959,
        189128133,
        1632744062,
    ]
    key = keys_module.text_key(b"Hello")
    assert key[:2].tolist() == [1654207957928075145, 589852600003294365]
    assert keys_module.unit_interval_hash(key[None, :2]).tolist() == [0.5711591025990429]


def test_cjk_characters_are_words_of_their_own():
    edges = [0x3400, 0x4DBF, 0x4E00, 0x9FFF, 0xF900, 0xFAFF, 0x20000, 0x2A6DF, 0x2A700, 0x2CEAF, 0x2F800, 0x2FA1F]
    assert [len(word_hashes("x" + 2 * chr(code) + "y")) for code in edges] == [4] * len(edges)
    outside = [0x33FF, 0x4DC0, 0xA000, 0xFB00, 0x2A6E0, 0x2CEB0, 0x2FA20]
    assert max(len(word_hashes("x" + 2 * chr(code) + "y")) for code in outside) <= 2


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
@settings(deadline=None)  # the first call compiles
def test_ngrams_are_equal_where_their_words_are(numbers, size):
    words = np.array(numbers, np.uint64)
    hashes = ngram_hashes(words, size).tolist()
    runs = [tuple(numbers[i : i + size]) for i in range(len(numbers) - size + 1)]
    assert len(hashes) == len(runs)
    assert len(set(zip(hashes, runs, strict=True))) == len(set(runs)) == len(set(hashes))


short_texts = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=20).map(" ".join)


def tuples(text, size):
    words = text.split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


@given(st.lists(short_texts, max_size=6), short_texts, st.integers(1, 5))
@settings(deadline=None)  # the first call compiles
def test_hits_are_those_of_sets(evaluation, document, size):
    index = NgramIndex.build(iter(evaluation), size)
    known = {ngram for text in evaluation for ngram in tuples(text, size)}
    hits = count_hits(word_hashes(document), index.ngram_words, index.slots)
    assert hits == sum(ngram in known for ngram in tuples(document, size))
    assert index.num_ngrams == len(known)
    assert index.num_texts == len(evaluation)
    assert index.too_short == sum(len(text.split()) < size for text in evaluation)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=2500), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_signature_is_the_smallest_of_each_function(numbers, shingle_words):
    words = np.array(numbers, np.uint64)
    factors, terms = minhash._functions(8)
    shingles = [int(h) >> 32 for h in ngram_hashes(words, min(shingle_words, len(words)))]
    expected = [min((int(a) * x + int(b)) % 2**64 >> 32 for x in shingles) for a, b in zip(factors, terms, strict=True)]
    assert minhash.signature(words, shingle_words, 8).tolist() == expected
    assert minhash.signature(words, shingle_words, 4).tolist() == expected[:4]


@given(st.lists(st.integers(0, 50), max_size=60), st.lists(st.integers(0, 50), max_size=60))
@settings(deadline=None)  # the first call compiles
def test_signature_of_parts(left, right):
    """With shingles of one word, none extends over two parts."""
    left, right = np.array(left, np.uint64), np.array(right, np.uint64)
    whole = minhash.signature(np.concatenate([left, right]), 1)
    assert np.array_equal(whole, np.minimum(minhash.signature(left, 1), minhash.signature(right, 1)))


def polynomial(data):
    kept = [byte + 1 for byte in data if byte not in b" \t\n\r\v\f"]
    values = []
    for base in map(int, keys_module._BASES):
        value = 0
        for digit in kept:
            value = (value * base + digit) % PRIME
        values.append(value)
    return values


@given(st.lists(st.one_of(st.binary(max_size=30), st.text(" \n\tab").map(str.encode)), max_size=5))
@settings(deadline=None)  # the first call compiles
def test_key_of_a_text_is_that_of_its_parts(parts):
    whole = keys_module.text_key(b"".join(parts))
    combined = keys_module.text_key(b"")
    for part in parts:
        combined = keys_module.combine_keys(combined, keys_module.text_key(part))
    assert combined.tolist() == whole.tolist()
    assert whole[:2].tolist() == polynomial(b"".join(parts))
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    keys = keys_module.paragraph_keys(b"".join(parts), ends)
    assert keys.tolist() == [polynomial(part) for part in parts]


def brute_repeats(keys, active):
    seen, repeated = set(), []
    for key, on in zip(map(tuple, keys.tolist()), active.tolist(), strict=True):
        repeated.append(on and key in seen)
        if on:
            seen.add(key)
    return repeated


@given(st.integers(0, 2**32), st.integers(0, 600), st.sampled_from([1, 5, 300, 2**61]), st.integers(1, 30_000))
@settings(deadline=None)  # the first call compiles
def test_repeats_do_not_depend_on_memory(seed, rows, highest, memory_bytes):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, highest, (rows, 2)).astype(np.uint64)
    active = rng.random(rows) < 0.8
    assert near_duplicates.find_duplicates(keys, active, memory_bytes).tolist() == brute_repeats(keys, active)


def test_repeats_are_read_in_ranges(tmp_path, monkeypatch):
    """The small memory of the test above divides the keys into ranges; a memmap works like an array."""
    keys = np.random.default_rng(0).integers(0, 400, (3000, 2)).astype(np.uint64)
    np.save(tmp_path / "keys.npy", keys)
    active = np.ones(3000, bool)
    passes = []
    blocks = near_duplicates._blocks
    monkeypatch.setattr(near_duplicates, "_blocks", lambda *arguments: passes.append(0) or blocks(*arguments))
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="r")
    assert near_duplicates.find_duplicates(mapped, active, SMALL).tolist() == brute_repeats(keys, active)
    assert len(passes) > 3
    assert np.array_equal(mapped, keys)


def words_of(rng, count):
    return [f"w{number}" for number in np.minimum(rng.zipf(1.2, count), 5000)]


def signatures_of(texts):
    return np.array([minhash.signature(word_hashes(text)) for text in texts])


def brute_near_duplicates(texts, threshold):
    size = minhash.DEFAULT_SHINGLE_WORDS
    kept, removed = [], []
    for text in texts:
        shingles = set(tuples(text, size))
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
    expected = brute_near_duplicates(texts, 0.5)
    assert sum(expected) == 60
    signatures, active = signatures_of(texts), np.ones(len(texts), bool)
    for memory_bytes in (near_duplicates.DEFAULT_MEMORY_BYTES, 300_000):
        removed = near_duplicates.find_near_duplicates(signatures, active, 0.5, memory_bytes)
        assert removed.tolist() == expected


@pytest.mark.parametrize("memory_bytes", [near_duplicates.DEFAULT_MEMORY_BYTES, SMALL, 1])
def test_many_identical_and_many_empty(memory_bytes, tmp_path):
    signatures = np.repeat(signatures_of(["one two three four five six", ""]), 5000, axis=0)
    np.save(tmp_path / "signatures.npy", signatures)
    mapped = np.load(tmp_path / "signatures.npy", mmap_mode="r")
    active = np.ones(10_000, bool)
    active[:2] = False
    removed = near_duplicates.find_near_duplicates(mapped, active, 0.5, memory_bytes)
    assert np.flatnonzero(~removed).tolist() == [0, 1, 2, *range(5000, 10_000)]
    empty = np.zeros((0, 128), np.uint32)
    assert len(near_duplicates.find_near_duplicates(empty, np.zeros(0, bool), 0.5, memory_bytes)) == 0


def random_signatures(count):
    return np.random.default_rng(3).integers(0, 2**32 - 1, (count, 128), dtype=np.uint32)


@pytest.mark.parametrize("memory_bytes", [near_duplicates.DEFAULT_MEMORY_BYTES, 1])
def test_documents_similar_only_to_removed_ones_are_kept(memory_bytes):
    a, b, c, other = random_signatures(4)
    b[:78] = a[:78]
    c[50:] = b[50:]
    assert (np.sum(a == b), np.sum(b == c), np.sum(a == c)) == (78, 78, 28)
    near = near_duplicates.find_near_duplicates
    assert near(np.array([a, b, c]), np.ones(3, bool), 0.5, memory_bytes).tolist() == [False, True, False]
    assert near(np.array([a, b, c]), np.array([False, True, True]), 0.5, memory_bytes).tolist() == [False, False, True]
    # If the index has room for one document, the second one starts the next index.
    assert near(np.array([a, other, b, c]), np.ones(4, bool), 0.5, memory_bytes).tolist() == [False, False, True, False]


def test_threshold_is_inclusive():
    a, b, c = random_signatures(3)
    b[:64], c[:63] = a[:64], a[:63]
    assert near_duplicates.find_near_duplicates(np.array([a, b, c]), np.ones(3, bool), 0.5).tolist() == [
        False,
        True,
        False,
    ]


def test_crowded_bands_lead_to_the_first_documents_only():
    """60 values of boilerplate in 20 bands; a document similar to a late one is kept if they share no other band."""
    signatures = random_signatures(62)
    signatures[:, :60] = signatures[0, :60]
    early, late, easy = signatures[59:]
    scattered = [61, 62, 64, 65]  # two of three values of bands 20 and 21
    early[scattered], late[scattered] = signatures[5, scattered], signatures[50, scattered]
    easy[60:66] = signatures[50, 60:66]
    removed = near_duplicates.find_near_duplicates(signatures, np.ones(62, bool), 0.5)
    assert np.flatnonzero(removed).tolist() == [59, 61]


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
    removed = near_duplicates.find_near_duplicates(np.concatenate([left, right]), np.ones(4000, bool), 0.7)
    assert removed[2000:].tolist() == (same & similar).tolist()
