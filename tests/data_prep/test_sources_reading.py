"""How the tests read a source, with what must hold for every one: pickling, progress, parts that fit together."""

import dataclasses
import pickle
from collections import Counter

import pytest

from bert_jax.errors import UserError
from data_prep import sources
from data_prep.sources import Document, InputRecord, Skipped
from data_prep.sources.text_chunks import places_in_file


@dataclasses.dataclass
class Reading:
    documents: list[Document]
    """whole ones, put together of their parts"""
    skipped: list[Skipped]
    file_entries: list[dict]
    damaged: list[str]
    parts: list[Document]
    blocks: int
    documents_by_input: list[int]

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.documents]

    @property
    def places(self) -> list[tuple[str, str]]:
        return [(skipped.reason, skipped.origin) for skipped in self.skipped]


def read(spec: str, **settings) -> Reading:
    """Reads all a source has; `settings` such as `block_bytes` replace its own."""
    source = dataclasses.replace(sources.parse(spec), **settings)
    source = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 2000
    reading = Reading([], [], [], [], [], 0, [])
    open_document: Document | None = None
    lines = text_bytes = 0
    for part in source.inputs():
        read_bytes, record, before = 0, InputRecord(), len(reading.documents)
        for block in source.read_blocks(pickle.loads(pickle.dumps(part)), record):
            reading.blocks += 1
            read_bytes += block.size
            assert block.size >= 0 and block.origin
            for item in list(source.documents(pickle.loads(pickle.dumps(block)))):
                item = in_file(item, part.start, lines, text_bytes)
                if isinstance(item, Skipped):
                    reading.skipped.append(item)
                    assert item.origin and item.detail and item.reason
                    continue
                reading.parts.append(item)
                assert item.begins == (open_document is None), item
                text = item.text if item.begins else open_document.text + item.text
                whole = item if item.begins else dataclasses.replace(open_document, text=text)
                open_document = None if item.ends else whole
                if item.ends:
                    reading.documents.append(dataclasses.replace(whole, begins=True, ends=True))
        assert read_bytes == part.size
        reading.file_entries += record.files
        reading.documents_by_input.append(len(reading.documents) - before)
        lines = record.lines + (lines if part.start else 0)
        text_bytes = record.text_bytes + (text_bytes if part.start else 0)
        reading.damaged += record.damaged
    assert open_document is None
    reasons = Counter(skipped.reason for skipped in reading.skipped)
    source.check_not_empty(len(reading.documents), reasons, reading.skipped[0] if reading.skipped else None)
    return reading


def in_file(item: Document | Skipped, start: int, lines: int, text_bytes: int) -> Document | Skipped:
    """With places of the file instead of those of its range."""
    if not start:
        return item
    values = {name: getattr(item, name) for name in ("origin", "detail") if hasattr(item, name)}
    return dataclasses.replace(
        item, **{name: places_in_file(value, start, lines, text_bytes) for name, value in values.items()}
    )


def test_a_source_without_documents_is_a_mistake(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\t\n")
    with pytest.raises(UserError, match=r"nothing could be used.*\(1 x empty_file\).*a\.txt: contains no text"):
        read(f"text:{tmp_path}/a.txt")
    (tmp_path / "talk.xml").write_text("<mediawiki>\n<page><title>Talk:A</title><ns>1</ns></page>\n</mediawiki>\n")
    with pytest.raises(UserError, match="contains no document; is this the right kind"):
        read(f"mediawiki:{tmp_path}/talk.xml")
