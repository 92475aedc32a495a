"""`reference`: always the same text, of the form that its docstring says."""

import hashlib
import itertools

import pytest

from data_prep.sources import synthetic_language
from data_prep.sources.synthetic_language import NUM_DOCUMENTS, HashRandom, document
from tests.data_prep.test_sources_reading import read

# A change of the text makes all shipped curves worthless: raise VERSION and make them again.
SHA256 = "d4a9e0238bafc1fa8920042f39b0ada66a282902a5074ef4789e26d76835c3e2"


@pytest.fixture(scope="module")
def documents():
    return [document(index) for index in range(NUM_DOCUMENTS)]


def test_the_text_is_this_one(documents):
    text = "\n\n".join("\n".join(sentences) for sentences in documents)
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256
    assert 1_000_000 < len(text) < 2_000_000 and len(set(map(tuple, documents))) == NUM_DOCUMENTS


def test_draws_are_those_of_splitmix():
    """The values that others publish for the seed 1234567."""
    draws = HashRandom()
    draws._state = 1234567
    assert [draws.uniform_int(1 << 64) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_documents_and_sentences(documents):
    counts = [len(sentences) for sentences in documents]
    lengths = [len(sentence.split()) for sentences in documents for sentence in sentences]
    assert (min(counts), max(counts)) == (3, 30)
    assert min(lengths) == 4 and 12 < max(lengths) <= 14
    assert all(s[0].isupper() and s.endswith(".") for sentences in documents for s in sentences)


def test_words_agree(documents):
    """Every article is followed by a word with its ending; the verb agrees with its subject in number."""
    endings = {
        article: (ending, number)
        for articles, kinds in zip(synthetic_language._ARTICLES, synthetic_language._NOUN_ENDINGS, strict=True)
        for number, (article, ending) in enumerate(zip(articles, kinds, strict=True))
    }
    verbs = {
        stem + ending: number
        for lexicon in (synthetic_language.language().common, *synthetic_language.language().topics)
        for stem in lexicon.verbs
        for number, ending in enumerate(synthetic_language._VERB_ENDINGS)
    }
    for sentence in (sentence.lower().rstrip(".").split() for sentences in documents[:100] for sentence in sentences):
        articles = [word for word in sentence if word in endings]
        assert articles and [verbs[w] for w in sentence if w in verbs] == [endings[articles[0]][1]]
        for before, word in itertools.pairwise(sentence):
            assert before not in endings or word.endswith(endings[before][0])


def test_the_source(documents):
    block_documents = 300
    reading = read("reference", block_documents=block_documents)
    assert [text.split("\n") for text in reading.texts] == documents
    assert all(one.sentence_per_line for one in reading.documents)
    assert reading.documents[3].origin == "reference document 3"
    assert reading.file_entries == [{"name": "reference", "version": "1"}]
    assert reading.blocks == -(-NUM_DOCUMENTS // block_documents)
