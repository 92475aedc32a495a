"""Splitting into blocks: documents do not depend on the block size, and long ones are split at the right places."""

import pathlib
import re
import tempfile
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.sources import InputRecord, files, parse
from data_prep.sources.text_chunks import BlankLineRule, BoundaryRule, document_aligned_chunks, record_aligned_chunks
from tests.data_prep.test_sources_reading import read

SPACES = [" ", "\t", "\x0b", "\r", "\n", "\n", "\n\n", "\r\n", "\r\n\r\n"]
PIECES = ["a", "bc ", "é", "中文", "😀", "long-word-of-text", *SPACES]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
BLOCKS = st.sampled_from([4, 5, 7, 10, 16, 33, 64, 1000])


def documents_of(text):
    """Reference implementation: blank lines separate documents."""
    found, current = [], []
    for line in text.split("\n"):
        if line.strip(" \t\r\f\v"):
            current.append(line + "\n")
        elif current:
            found.append("".join(current))
            current = []
    return [*found, "".join(current)] if current else found


def stripped(texts):
    """Without trailing and empty white space: a part of a blank line longer than a block remains."""
    return [text.rstrip() for text in texts if text.strip()]


@pytest.fixture(scope="module")
def file():
    with tempfile.TemporaryDirectory() as directory:
        yield pathlib.Path(directory) / "a.txt"


def pieces(path, rule, block_bytes):
    with files.DecompressingReader(str(path)) as reader:
        return list(document_aligned_chunks(reader, rule, block_bytes))


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, block_bytes=BLOCKS)
@example(text="word \nnext line", block_bytes=5)
@example(text="word\n\nnext", block_bytes=5)
@example(text="abcd\n \nnext", block_bytes=5)
@example(text="a\n" + " " * 40 + "\nb", block_bytes=8)
@example(text="word" + " " * 40 + "\nsame document", block_bytes=5)
def test_blocks_make_no_difference_to_documents(file, text, block_bytes):
    file.write_text(f"x{text}", newline="")
    reading = read(f"text:{file}", block_bytes=block_bytes)
    assert stripped(reading.texts) == stripped(documents_of(f"x{text}"))
    whole = read(f"text:{file}")
    if not re.search(f"[ \t\r\v]{{{block_bytes}}}", text):
        assert reading.texts == whole.texts
    assert [d.origin for d in reading.documents if d.text.strip()] == [d.origin for d in whole.documents]
    assert read(f"text-files:{file}", block_bytes=block_bytes).texts == [f"x{text}"]
    for rule in (BlankLineRule(), BoundaryRule()):
        assert all(len(piece.data) <= block_bytes for piece in pieces(file, rule, block_bytes))


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, before=TEXTS, block_bytes=BLOCKS)
def test_equal_documents_are_cut_equally(file, text, before, block_bytes):
    document = "x" + "".join(line for line in documents_of(f"x{text}"))

    def parts(content):
        file.write_text(content, newline="")
        found, current = [], []
        for part in read(f"text:{file}", block_bytes=block_bytes).parts:
            current.append(part.text)
            if part.ends:
                found.append(current)
                current = []
        return found[-1]

    document = document.rstrip()
    assert parts(document) == parts(f"{before}\n\n{document}")


def test_where_long_documents_are_cut(tmp_path):
    path = tmp_path / "a.txt"

    def parts(text, kind="text-files", block_bytes=20):
        path.write_text(text)
        return [part.text for part in read(f"{kind}:{path}", block_bytes=block_bytes).parts]

    assert parts("A paragraph.\n\nOf two\nlines and more.") == ["A paragraph.\n\n", "Of two\n", "lines and more."]
    assert parts("A line.\nAnother of words that do not end") == ["A line.\n", "Another of words ", "that do not end"]
    assert parts("A line.\nAnother of words that do not end", "lines") == [
        "A line.\n",
        "Another of words ",
        "that do not end",
    ]
    assert parts("x" * 45) == ["x" * 20, "x" * 20, "x" * 5]
    assert parts("é" * 15) == ["é" * 10, "é" * 5]
    assert parts("中" * 15) == ["中" * 6, "中" * 6, "中" * 3], "18 of 20 bytes: not inside a character"
    assert parts("😀" * 6) == ["😀" * 5, "😀"]


def test_a_document_that_fits_is_not_cut(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join("w" * 19 for _ in range(50)))
    reading = read(f"text:{path}", block_bytes=40)
    assert all(part.begins and part.ends for part in reading.parts)
    assert reading.blocks == 49, "two need 42 bytes, but the last two only 40"
    assert read(f"text:{path}", block_bytes=42).blocks == 25


def test_long_documents_need_little_memory(tmp_path):
    path, size, block_bytes = tmp_path / "a.txt", 12 << 20, 1 << 19
    with path.open("w") as file:
        for _ in range(size >> 20):
            file.write("word " * ((1 << 20) // 5))
    for kind in ("text", "text-files", "lines", "markdown"):
        source = parse(f"{kind}:{path}")
        source = type(source)(**{**source.__dict__, "block_bytes": block_bytes})
        (part,) = source.inputs()
        tracemalloc.start()
        total = 0
        for block in source.read_blocks(part, InputRecord()):
            for document in source.documents(block):
                total += len(document.text)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0 <= path.stat().st_size - total <= 1, kind
        assert peak < 16 * block_bytes, kind


def records(path, end_marker, block_bytes, **settings):
    with files.DecompressingReader(str(path)) as reader:
        return list(record_aligned_chunks(reader, end_marker, block_bytes, **settings))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=30),
    block_bytes=BLOCKS,
    ends=st.booleans(),
    end_marker=st.sampled_from([b"\n", b"</x>\n", b"</record>\n"]),
)
def test_records_are_never_cut(file, lengths, block_bytes, ends, end_marker):
    data = b"x" + b"".join(b"a" * length + end_marker for length in lengths) + (b"" if ends else b"rest")
    file.write_bytes(data)
    found = records(file, end_marker, block_bytes)
    # Blank lines at the end of the file may be missing.
    read = b"".join(piece.data for piece in found)
    assert data.startswith(read) and not data[len(read) :].strip()
    assert all(piece.data.endswith(end_marker) for piece in found[: None if ends and lengths else -1])
    for piece in found:
        assert len(piece.data) <= block_bytes or piece.data.count(end_marker) <= 1
        assert piece.line == 1 + data[: piece.offset].count(b"\n")


def test_records_that_are_too_long_are_left_out(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one\n" + b"x" * 50 + b"\ntwo\n" + b"y" * 31 + b"\nthree\n" + b"z" * 70)
    for block_bytes in (4, 8, 16, 30):
        found = records(path, b"\n", block_bytes, max_bytes=30)
        assert [f.origin for f in found if hasattr(f, "reason")] == [f"{path}:{line}" for line in (2, 4, 6)]
        assert b"".join(f.data for f in found if hasattr(f, "data")).split() == [b"one", b"two", b"three"]
    assert len(records(path, b"\n", 16, max_bytes=70)) == 6
