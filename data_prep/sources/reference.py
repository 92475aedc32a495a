"""`reference`: the generated text of reference_text.py, to compare a set-up with the shipped curves."""

import dataclasses
from collections.abc import Iterator

from data_prep.sources.base import Block, Document, Input, Source
from data_prep.sources.reference_text import NUM_DOCUMENTS, VERSION, document

_DOCUMENT_BYTES = 900
"""Approximate size of a document, for progress."""


@dataclasses.dataclass(frozen=True)
class ReferenceSource(Source):
    """Nothing is read; the payload of a block is a range of documents."""

    block_documents: int = 200

    def inputs(self) -> list[Input]:
        """All of it at once."""
        return [Input((), NUM_DOCUMENTS * _DOCUMENT_BYTES, 0, NUM_DOCUMENTS)]

    def blocks(self, part: Input, file_entries: list[dict]) -> Iterator[Block]:
        """Ranges of documents."""
        for start in range(part.start, part.stop, self.block_documents):
            stop = min(start + self.block_documents, part.stop)
            yield Block(_origin(start), range(start, stop), (stop - start) * _DOCUMENT_BYTES)
        file_entries.append({"name": "reference", "version": VERSION})

    def documents(self, block: Block) -> Iterator[Document]:
        """Generates the documents, one sentence per line."""
        for index in block.payload:
            yield Document(_origin(index), "\n".join(document(index)), sentence_per_line=True)


def _origin(index: int) -> str:
    return f"reference document {index}"
