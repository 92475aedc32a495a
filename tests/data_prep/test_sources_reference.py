"""`reference`: always the same text, of the form that its docstring says."""

import hashlib

import pytest

from data_prep.sources.synthetic_language import NUM_DOCUMENTS, document
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


def test_the_source(documents):
    block_documents = 300
    reading = read("reference", block_documents=block_documents)
    assert [text.split("\n") for text in reading.texts] == documents
    assert all(one.sentence_per_line for one in reading.documents)
    assert reading.documents[3].origin == "reference document 3"
    assert reading.file_entries == [{"name": "reference", "version": "1"}]
    assert reading.blocks == -(-NUM_DOCUMENTS // block_documents)
