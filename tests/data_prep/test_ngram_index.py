"""The n-gram index against sets of tuples."""

import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.duplicates.ngram_index import NgramIndex
from data_prep.duplicates.word_hashes import word_hashes

texts = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=20).map(" ".join)


def ngrams(text, size):
    words = text.split()
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


@given(st.lists(texts, max_size=6), texts, st.integers(1, 5))
@settings(deadline=None)  # the first call compiles
def test_hits_are_those_of_sets(evaluation, document, size):
    index = NgramIndex.build(iter(evaluation), size)
    known = {ngram for text in evaluation for ngram in ngrams(text, size)}
    assert index.hits(word_hashes(document)) == sum(ngram in known for ngram in ngrams(document, size))
    assert index.num_ngrams == len(known)
    assert index.num_texts == len(evaluation)
    assert index.too_short == sum(len(text.split()) < size for text in evaluation)


def test_a_quotation_is_found_whatever_its_punctuation():
    sentence = "The quick brown fox, which was hungry, jumps over a very lazy old dog"
    index = NgramIndex.build(["too short", sentence, "今天天气很好我们一起去公园散步吧"])
    assert (index.num_ngrams, index.too_short) == (2 + 4, 1)
    quoting = "he wrote: “the QUICK brown fox - which was hungry - jumps over a very lazy old dog”, then slept"
    assert index.hits(word_hashes(quoting)) == 2
    assert index.hits(word_hashes(sentence.replace("hungry", "thirsty"))) == 0
    assert index.hits(word_hashes("他说今天天气很好,我们一起去公园散步吧。")) == 4
    assert index.hits(word_hashes("")) == 0


def test_pickles_and_does_not_depend_on_order():
    evaluation = [f"{i} " * 7 + f"{i + 1} " * 7 for i in range(500)]
    index, other = NgramIndex.build(evaluation), NgramIndex.build(evaluation[::-1])
    assert np.array_equal(index.slots, other.slots)
    again = pickle.loads(pickle.dumps(index))
    assert (again.ngram_words, again.num_ngrams) == (13, index.num_ngrams)
    assert all(again.hits(word_hashes(text)) == 2 for text in evaluation)
