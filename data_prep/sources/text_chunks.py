"""Cuts a stream of bytes into pieces of at most a block, at ends of documents wherever that is possible.

A document longer than a block is cut at the end of a paragraph, else of a line, else behind a space, else
between characters. Where it is cut depends on the document alone, not on what stands before it, so that
equal documents are cut equally.
"""

import abc
import codecs
import dataclasses
import re
from collections.abc import Iterator

from data_prep.sources.base import MAX_RECORD_BYTES, Skipped
from data_prep.sources.files import DecompressingReader

# Possessive, so that no run of white space is tried twice.
_BLANK_LINE = re.compile(rb"[ \t\r\f\v]*+\n")
_BLANK_LINES = re.compile(rb"(?:[ \t\r\f\v]*+\n)*+")
_LAST_BLANK_LINE = re.compile(rb"(?s:.*)\n[ \t\r\f\v]*+\n")


@dataclasses.dataclass(frozen=True, slots=True)
class TextChunk:
    """Consecutive bytes of a file: whole documents, or a part of one, or the rest of one and others."""

    path: str
    offset: int
    """of its first byte in the file, decompressed"""
    line: int
    """of its first byte, from 1"""
    data: bytes
    """empty where the file holds nothing but white space"""
    begins: bool = True
    """its first document begins here"""
    ends: bool = True
    """its last document ends here"""
    line_start: bool = True
    """nothing but white space stands before its first byte on that line"""

    @property
    def origin(self) -> str:
        """Where it begins."""
        return f"{self.path}:{self.line}"


class BoundaryRule(abc.ABC):
    """Where documents end in a window of bytes, and where a long one may be cut."""

    def blank(self, window: bytes) -> int:
        """How many bytes at the beginning of a document belong to none."""
        return 0

    @abc.abstractmethod
    def boundary(self, window: bytes, stop: int, line_start: bool) -> int:
        """The last place in [0, stop] where a document ends; 0 for none.

        Args:
          window: bytes from the beginning of a document or of a part of one.
          stop: length of the window that counts.
          line_start: nothing but white space stands before the window on its first line.
        """

    def paragraph(self, window: bytes, stop: int) -> int:
        """The last place in [0, stop] where a paragraph ends; 0 for none."""
        found = _LAST_BLANK_LINE.match(window, 0, stop)
        return found.end() if found else 0


class BlankLineRule(BoundaryRule):
    """A blank line (spaces and tabs count for nothing) divides documents."""

    def blank(self, window: bytes) -> int:
        """Blank lines."""
        return _BLANK_LINES.match(window).end()

    def boundary(self, window: bytes, stop: int, line_start: bool) -> int:
        """Behind the last blank line."""
        found = _LAST_BLANK_LINE.match(window, 0, stop)
        if not found and line_start:
            found = _BLANK_LINE.match(window, 0, stop)
        return found.end() if found else 0

    def paragraph(self, window: bytes, stop: int) -> int:
        """None: where a paragraph ends, so does the document."""
        return 0


class WholeFileRule(BoundaryRule):
    """A file is a document."""

    def boundary(self, window: bytes, stop: int, line_start: bool) -> int:
        """None but the end of the file."""
        return 0


class _Window:
    """The next bytes of a file, of which ever more is asked for and taken."""

    def __init__(self, file: DecompressingReader, size: int):
        self._file = file
        self._size = size
        self.data = file.read(size)
        self.complete = len(self.data) < size
        """nothing follows in the file"""
        self.offset, self.line, self.line_start = 0, 1, True
        if self.data.startswith(codecs.BOM_UTF8):
            self.data, self.offset = self.data.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        self.fill(size)

    def fill(self, size: int) -> None:
        """Reads on until there are `size` bytes, or the file ends."""
        missing = size - len(self.data)
        if missing > 0 and not self.complete:
            more = self._file.read(missing)
            self.complete = len(more) < missing
            self.data += more

    def read_on(self) -> bytes:
        """As much again as it began with, which the caller adds to the data; empty where the file ends."""
        more = b"" if self.complete else self._file.read(self._size)
        self.complete = len(more) < self._size
        return more

    def take(self, size: int, begins: bool = True, ends: bool = True) -> TextChunk:
        """Removes bytes from the beginning."""
        data = self.data[:size]
        piece = TextChunk(self._file.path, self.offset, self.line, data, begins, ends, self.line_start)
        self.data = self.data[size:]
        self.offset += size
        self.line += data.count(b"\n")
        line = data[data.rfind(b"\n") + 1 :]
        self.line_start = (not line or line.isspace()) and (self.line_start or len(line) < size)
        return piece


def document_aligned_blocks(file: DecompressingReader, rule: BoundaryRule, block_bytes: int) -> Iterator[TextChunk]:
    """Pieces of at most `block_bytes` (at least 4) bytes; one, empty, of a file with nothing but white space."""
    window = _Window(file, block_bytes + 1)
    begins, any_yet = True, False
    while True:
        if begins:
            while blank := rule.blank(window.data):
                window.take(blank)
                window.fill(block_bytes + 1)
        if window.complete and len(window.data) <= block_bytes:
            break
        end = rule.boundary(window.data, block_bytes, window.line_start)
        piece = window.take(end or _inside(window.data, rule, block_bytes), begins, ends=end > 0)
        begins, any_yet = piece.ends, True
        yield piece
        window.fill(block_bytes + 1)
    if begins and not window.data.strip():
        if not any_yet:
            yield window.take(0)
    else:
        yield window.take(len(window.data), begins)


def _inside(window: bytes, rule: BoundaryRule, stop: int) -> int:
    """Where to cut a document that is longer than a block."""
    place = rule.paragraph(window, stop) or window.rfind(b"\n", 0, stop) + 1 or window.rfind(b" ", 0, stop) + 1
    if place:
        return place
    # In UTF-8 a character has at most 4 bytes, and those after its first begin with the bits 10.
    return next((end for end in range(stop, stop - 4, -1) if window[end] & 0xC0 != 0x80), stop)


def record_aligned_blocks(
    file: DecompressingReader, mark: bytes, block_bytes: int, max_bytes: int = MAX_RECORD_BYTES
) -> Iterator[TextChunk | Skipped]:
    """Pieces of about `block_bytes` bytes that end behind a mark, or where the file ends.

    A record longer than a block is a piece of its own; one longer than `max_bytes` is left out.
    """
    window = _Window(file, block_bytes + 1)
    any_yet = False
    while not window.complete or len(window.data) > block_bytes:
        end = window.data.rfind(mark, 0, block_bytes) + len(mark)
        if end < len(mark):
            end = _first(window, mark, max_bytes)
        if end:
            yield window.take(end)
        else:
            yield _leave_out(window, mark, max_bytes)
        any_yet = True
        window.fill(block_bytes + 1)
    if window.data.strip():
        yield window.take(len(window.data))
    elif not any_yet:
        yield window.take(0)


def _first(window: _Window, mark: bytes, max_bytes: int) -> int:
    """Reads on up to the end of the first record and says where that is; 0 if it is too long."""
    overlap = len(mark) - 1
    parts, size = [window.data], len(window.data)
    found, end = window.data.find(mark), window.data[-overlap:] if overlap else b""
    while found < 0 and size <= max_bytes and (more := window.read_on()):
        place = (end + more).find(mark)
        found = place if place < 0 else size - len(end) + place
        end = (end + more)[-overlap:] if overlap else b""
        parts.append(more)
        size += len(more)
    window.data = b"".join(parts)
    if found > max_bytes or (found < 0 and size > max_bytes):
        return 0
    return found + len(mark) if found >= 0 else size


def _leave_out(window: _Window, mark: bytes, max_bytes: int) -> Skipped:
    """Drops bytes up to the next mark."""
    skipped = Skipped("record_too_long", window.take(0).origin, f"is longer than {max_bytes} bytes")
    while (found := window.data.find(mark)) < 0 and not window.complete:
        size = len(window.data)
        window.take(size - len(mark) + 1)
        window.fill(size)
    window.take(found + len(mark) if found >= 0 else len(window.data))
    return skipped
