"""Splits a stream of bytes into chunks of at most a block, at ends of documents if possible.

A document longer than a block is split at the end of a paragraph, else of a line, else after a space, else between
characters. The places depend on the document alone, not on the text before it, so equal documents are split equally.
"""

import codecs
import dataclasses
import re
from collections.abc import Iterator

from data_prep.sources import encodings
from data_prep.sources.base import MAX_RECORD_BYTES, Skipped
from data_prep.sources.files import TextReader

# Possessive, so that no run of white space is matched twice.
_BLANK_LINE = re.compile(rb"[ \t\r\f\v]*+\n")
_BLANK_LINES = re.compile(rb"(?:[ \t\r\f\v]*+\n)*+")
_LAST_BLANK_LINE = re.compile(rb"(?s:.*)\n[ \t\r\f\v]*+\n")


@dataclasses.dataclass(frozen=True, slots=True)
class TextChunk:
    """Consecutive bytes of a file: whole documents, a part of one, or the rest of one and further ones."""

    path: str
    offset: int
    """of the first byte, in the decompressed text of the file or of its range"""
    line: int
    """line of the first byte, from 1"""
    data: bytes
    """empty if the file contains only white space"""
    begins: bool = True
    """the first document begins in this chunk"""
    ends: bool = True
    """the last document ends in this chunk"""
    line_start: bool = True
    """only white space precedes the first byte on its line"""
    file_properties: tuple[str, ...] = ()
    """what the source needs from the start of the file; for dumps of MediaWiki, namespaces whose links show no text"""
    range_start: int = 0
    """byte on disk at which the range of the file begins"""
    encoding: str = encodings.UTF_8
    """of the file; `data` is UTF-8 in any case"""

    @property
    def origin(self) -> str:
        """Start of the chunk, for messages."""
        return self.origin_at(self.line)

    def origin_at(self, line: int) -> str:
        """A line for messages: "path:line", or "path@byte:line" in a later range, which begins at that byte on disk.

        There, lines are counted from the first document of the range, because those before it are in other ranges;
        `places_in_file` converts such places.
        """
        return f"{self.path}@{self.range_start}:{line}" if self.range_start else f"{self.path}:{line}"

    def byte_at(self, place: int) -> str:
        """A byte of the chunk for messages: "byte", or "@range+byte" in a later range."""
        byte = self.offset + place
        return f"@{self.range_start}+{byte}" if self.range_start else f"{byte}"


def places_in_file(message: str, range_start: int, lines: int, text_bytes: int) -> str:
    """A message with places of a range as places of the file.

    Args:
      message: with places of `TextChunk`.
      range_start: byte on disk at which the range begins.
      lines: line ends in the text before the range.
      text_bytes: bytes of text before it.
    """
    message = re.sub(rf"@{range_start}:(\d+)", lambda match: f":{int(match[1]) + lines}", message)
    return re.sub(rf"@{range_start}\+(\d+)", lambda match: f"{int(match[1]) + text_bytes}", message)


class BoundaryRule:
    """Finds ends of documents in a window of bytes, and places to split long documents; here, a file is a document."""

    def leading_blank_bytes(self, window: bytes) -> int:
        """Number of bytes at the start of the window that belong to no document."""
        return 0

    def last_document_end(self, window: bytes, stop: int, line_start: bool) -> int:
        """The last place in [0, stop] where a document ends, except the end of the file; 0 for none.

        Args:
          window: bytes from the start of a document or of a part of one.
          stop: length of the part of the window to search.
          line_start: only white space precedes the window on its first line.
        """
        return 0

    def last_paragraph_end(self, window: bytes, stop: int) -> int:
        """The last place in [0, stop] where a paragraph ends; 0 for none."""
        match = _LAST_BLANK_LINE.match(window, 0, stop)
        return match.end() if match else 0


class BlankLineRule(BoundaryRule):
    """Documents are separated by blank lines, which may contain spaces and tabs."""

    def leading_blank_bytes(self, window: bytes) -> int:
        """Blank lines."""
        return _BLANK_LINES.match(window).end()

    def last_document_end(self, window: bytes, stop: int, line_start: bool) -> int:
        """After the last blank line."""
        match = _LAST_BLANK_LINE.match(window, 0, stop)
        if not match and line_start:
            match = _BLANK_LINE.match(window, 0, stop)
        return match.end() if match else 0

    def last_paragraph_end(self, window: bytes, stop: int) -> int:
        """None: the end of a paragraph is the end of the document."""
        return 0


class _Window:
    """The next bytes of a file; bytes are appended at its end and removed from its start."""

    def __init__(self, file: TextReader, size: int):
        self._file = file
        self.data = file.read(size)
        self.complete = len(self.data) < size
        """nothing follows in the file"""
        self.offset, self.line, self.line_start = 0, 1, True
        if not file.start and self.data.startswith(codecs.BOM_UTF8):
            self.data, self.offset = self.data.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        self.read_up_to(size)

    def read_up_to(self, size: int) -> None:
        """Reads until there are `size` bytes, or the file ends."""
        missing = size - len(self.data)
        if missing > 0 and not self.complete:
            more = self._file.read(missing)
            self.complete = len(more) < missing
            self.data += more

    def take(self, size: int, begins: bool = True, ends: bool = True) -> TextChunk:
        """Removes bytes from the start and returns them."""
        data = self.data[:size]
        path, start = self._file.path, self._file.start
        place = (path, self.offset, self.line, data, begins, ends, self.line_start)
        chunk = TextChunk(*place, range_start=start, encoding=self._file.encoding)
        self.data = self.data[size:]
        self.offset += size
        self.line += data.count(b"\n")
        line = data[data.rfind(b"\n") + 1 :]
        self.line_start = (not line or line.isspace()) and (self.line_start or len(line) < size)
        return chunk


def document_aligned_chunks(file: TextReader, rule: BoundaryRule, block_bytes: int) -> Iterator[TextChunk]:
    """Chunks of at most `block_bytes` (at least 4) bytes; one empty chunk for a file of white space."""
    window = _Window(file, block_bytes + 1)
    begins, any_yet = True, False
    while True:
        if begins:
            while blank := rule.leading_blank_bytes(window.data):
                window.take(blank)
                window.read_up_to(block_bytes + 1)
        if window.complete and len(window.data) <= block_bytes:
            break
        end = rule.last_document_end(window.data, block_bytes, window.line_start)
        chunk = window.take(end or _split_place(window.data, rule, block_bytes), begins, ends=end > 0)
        begins, any_yet = chunk.ends, True
        yield chunk
        window.read_up_to(block_bytes + 1)
    if begins and not window.data.strip():
        if not any_yet:
            yield window.take(0)
    else:
        yield window.take(len(window.data), begins)


def _split_place(window: bytes, rule: BoundaryRule, stop: int) -> int:
    """Where to split a document that is longer than a block."""
    place = rule.last_paragraph_end(window, stop) or window.rfind(b"\n", 0, stop) + 1 or window.rfind(b" ", 0, stop) + 1
    if place:
        return place
    # In UTF-8 a character has at most 4 bytes; those after the first start with the bits 10.
    return next((end for end in range(stop, stop - 4, -1) if window[end] & 0xC0 != 0x80), stop)


def record_aligned_chunks(
    file: TextReader, end_marker: bytes, block_bytes: int, max_bytes: int = MAX_RECORD_BYTES
) -> Iterator[TextChunk | Skipped]:
    """Chunks of about `block_bytes` bytes that end after an `end_marker`, or at the end of the file.

    A record longer than a block is a chunk of its own; one longer than `max_bytes` is skipped.
    """
    window = _Window(file, block_bytes + 1)
    any_yet = False
    while not window.complete or len(window.data) > block_bytes:
        end = window.data.rfind(end_marker, 0, block_bytes) + len(end_marker)
        if end < len(end_marker):
            end = _first_end(window, end_marker, max_bytes)
        if end:
            yield window.take(end)
        else:
            yield _skip_record(window, end_marker, max_bytes)
        any_yet = True
        window.read_up_to(block_bytes + 1)
    if window.data.strip():
        yield window.take(len(window.data))
    elif not any_yet:
        yield window.take(0)


def _first_end(window: _Window, end_marker: bytes, max_bytes: int) -> int:
    """Reads to the end of the first record and returns its place; 0 if the record is too long."""
    searched = 0
    while (place := window.data.find(end_marker, searched)) < 0 and len(window.data) <= max_bytes:
        size = len(window.data)
        if window.complete:
            return size
        searched = max(0, size - len(end_marker) + 1)
        window.read_up_to(min(2 * size, max_bytes + len(end_marker)))
    return place + len(end_marker) if 0 <= place <= max_bytes else 0


def _skip_record(window: _Window, end_marker: bytes, max_bytes: int) -> Skipped:
    """Removes bytes up to the end of the record."""
    begin, origin = window.offset, window.take(0).origin
    while (position := window.data.find(end_marker)) < 0 and not window.complete:
        size = len(window.data)
        window.take(size - len(end_marker) + 1)
        window.read_up_to(size)
    window.take(position + len(end_marker) if position >= 0 else len(window.data))
    return Skipped("record_too_long", origin, f"is longer than {max_bytes} bytes", window.offset - begin)
