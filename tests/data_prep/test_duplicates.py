"""Words, signatures and keys, against sets and brute force."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.duplicates import minhash
from data_prep.duplicates import text_keys as keys_module
from data_prep.duplicates.ngram_index import NgramIndex, count_hits
from data_prep.word_hashes import ngram_hashes, word_hashes

PRIME = 2**61 - 1

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
    signature = minhash.signature(word_hashes("one two three four"), 3, 4)
    assert signature.tolist() == [592564553, 1930859959, 189128133, 1632744062]
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


@given(st.lists(short_texts, max_size=6), short_texts, st.integers(1, 5), st.integers(0, 6))
@settings(deadline=None)  # the first call compiles
def test_hits_are_those_of_sets(evaluation, document, size, first):
    index = NgramIndex.build(iter(evaluation), size)
    merged = NgramIndex.merge([NgramIndex.build(part, size) for part in (evaluation[:first], evaluation[first:])], size)
    assert np.array_equal(merged.slots(), index.slots())
    assert (merged.num_texts, merged.too_short) == (index.num_texts, index.too_short)
    known = {ngram for text in evaluation for ngram in tuples(text, size)}
    hits = count_hits(word_hashes(document), index.ngram_words, index.slots())
    assert hits == sum(ngram in known for ngram in tuples(document, size))
    assert len(index.ngrams) == len(known)
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


@pytest.mark.parametrize("pattern", [b"\xff", b"\x00", b"\xff ", b"word and \x80\xfe"])
def test_key_of_a_long_text(pattern):
    for length in (4_096, 20_003):
        data = (pattern * length)[:length]
        assert keys_module.text_key(data)[:2].tolist() == polynomial(data)


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
