"""Text to build corpora from."""

import pathlib

import pytest

from tests.building import make_documents


@pytest.fixture
def text(tmp_path, monkeypatch):
    """300 documents and two copies in text.txt, in the current directory."""
    monkeypatch.chdir(tmp_path)
    documents = make_documents(0, 300)
    documents += [documents[12], documents[200]]
    pathlib.Path("text.txt").write_text("\n\n".join(documents))
    return documents
