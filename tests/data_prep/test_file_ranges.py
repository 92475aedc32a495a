"""Large files are read by ranges: the documents, their places and the damage found do not depend on it."""

import bz2
import gzip
import hashlib
import itertools
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.sources import files
from data_prep.sources.file_ranges import BlankLineSeparator, Separator, documents_of_range
from tests.building import make_documents
from tests.data_prep.test_sources_reading import read

DOCUMENTS = make_documents(5, 1500, paragraphs=2)


def zstd_compress(data):
    return pytest.importorskip("backports.zstd").compress(data, 3)


def in_parts(compress, data, size):
    """A stream, frame or member for each `size` bytes."""
    return b"".join(compress(data[begin : begin + size]) for begin in range(0, len(data), size))


def padded_stream(data):
    """With zeros after it, and a stream without text."""
    return bz2.compress(data) + b"\0" * 9 + bz2.compress(b"")


def bgzf_block(data):
    """A member with its size in the header, as bgzip writes (SAM specification, section 4.1)."""
    member = gzip.compress(data, mtime=0)
    extra = b"\6\0BC\2\0" + (len(member) + 7).to_bytes(2, "little")
    return member[:3] + b"\4" + member[4:10] + extra + member[10:]


FORMS = {
    "": lambda data: data,
    ".bz2": lambda data: bz2.compress(data, 1),
    ".multistream.bz2": lambda data: in_parts(bz2.compress, data, 7000),
    ".padded.bz2": lambda data: in_parts(padded_stream, data, 9000),
    ".zst": lambda data: in_parts(zstd_compress, data, 7000),
    ".one_frame.zst": zstd_compress,
    ".members.gz": lambda data: in_parts(gzip.compress, data, 7000),
    ".bgzf.gz": lambda data: in_parts(bgzf_block, data, 7000) + bgzf_block(b""),
    ".one_member.gz": gzip.compress,
}
PAGE = "<page><title>A{}</title><ns>0</ns><revision><text>[[Bilderey:x|hidden]]{}</text></revision></page>\n"
HEAD = '<mediawiki><namespace key="6">Bilderey</namespace>\n'
CONTENTS = {
    # Some documents in Latin-1.
    "text:{}": "\n \n".join(text + " caf\udce9" * (i % 300 == 9) for i, text in enumerate(DOCUMENTS)),
    "lines:{}": "\n\n".join(document.replace(". ", ".\n") for document in DOCUMENTS),
    "jsonl:{}@text": "\n".join([*(json.dumps({"text": text}) for text in DOCUMENTS), "{broken", "{}"]),
    "wikiextractor:{}": "\n".join(
        f'<doc id="{i}" title="A{i}">\nA{i}\n{text}\n</doc>' for i, text in enumerate(DOCUMENTS)
    ),
    "mediawiki:{}": HEAD + "".join(PAGE.format(i, text) for i, text in enumerate(DOCUMENTS)) + "</mediawiki>",
}


def written(tmp_path, kind, form, content=None):
    """A file, and the SPEC to read it."""
    path = tmp_path / f"a{form}"
    path.write_bytes(FORMS[form]((content or CONTENTS[kind]).encode("utf-8", "surrogateescape")))
    return path, kind.format(path)


@pytest.mark.parametrize(
    ("kind", "form"),
    [*(("text:{}", form) for form in FORMS), *itertools.product([*CONTENTS][1:], ["", ".multistream.bz2"])],
)
def test_ranges_make_no_difference(tmp_path, kind, form):
    path, spec = written(tmp_path, kind, form)
    whole = read(spec, block_bytes=5000)
    assert len(whole.documents) + len(whole.skipped) >= len(DOCUMENTS)
    size = path.stat().st_size
    for count in (3, 11):
        range_bytes = size // count * (2 if files.compression(str(path)) else 1)
        reading = read(spec, block_bytes=5000, range_bytes=range_bytes)
        assert reading.documents == whole.documents and reading.skipped == whole.skipped
        assert reading.file_entries == whole.file_entries
        assert reading.file_entries[0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        used = sum(number > 0 for number in reading.documents_by_input)
        assert used == 1 if ".one_" in form else used > 2, reading.documents_by_input


@settings(max_examples=400, deadline=None)
@given(
    words=st.lists(st.sampled_from(["a", "\n", "\n\n", " \n", "</x>", "</", "x>"]), max_size=40),
    borders=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    size=st.integers(1, 7),
    blank=st.booleans(),
)
@example(words=["a", "\n", "\n", "a"], borders=[2], size=1, blank=True)
@example(words=["a", "</x>", "a"], borders=[2, 3, 4], size=1, blank=False)
def test_each_document_is_in_the_range_in_which_the_separator_before_it_begins(words, borders, size, blank):
    """For any text, any borders, and pieces of any size."""
    text = "".join(words).encode()
    separator = BlankLineSeparator() if blank else Separator(b"</x>")
    pattern = re.compile(rb"\n[ \t\r\f\v]*\n" if blank else b"</x>")
    bounds = [0, *sorted({border for border in borders if 0 < border < len(text)}), len(text)]

    def begin(border):
        match = pattern.search(text, border) if 0 < border < len(text) else None
        return match.end() if match else border and len(text)

    for start, stop in itertools.pairwise(bounds):
        pieces = (
            (text[place : min(limit, place + size)], limit == stop)
            for low, limit in ((start, stop), (stop, len(text)))
            if low < limit
            for place in range(low, limit, size)
        )
        expected = text[begin(start) : begin(stop)]
        if start and not ((match := pattern.search(text, start)) and match.start() < stop):
            expected = b""
        assert b"".join(documents_of_range(pieces, separator, start == 0)) == expected
