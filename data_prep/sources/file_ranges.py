"""Reads the documents of a range of a large file, without the text before it.

A range of bytes on disk begins at a multiple of a fixed size. Its text is that of the units that begin in it: bytes of
a plain file, blocks of bzip2, frames of zstd, members of gzip. Its documents are those after the first separator that
begins in its text, up to the end of the first separator that begins in the text of a later range. So each document is
in one range, however long it is, and the documents are those of the file read as a whole.
"""

import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from etils import epath

from data_prep.sources import bzip2_blocks, encodings, files
from data_prep.sources.base import DamagedFileError
from data_prep.sources.frame_ranges import read_frames
from data_prep.sources.gzip_members import GZIP
from data_prep.sources.zstd_frames import ZSTD

_RAW_BYTES = 1 << 20


class Separator:
    """What ends a document wherever it occurs in a file; here, a byte sequence that ends a record."""

    def __init__(self, end_marker: bytes):
        self._pattern = re.compile(re.escape(end_marker))
        self._longest_part = len(end_marker) - 1

    def find(self, text: bytes, start: int) -> tuple[int, int] | None:
        """Begin and end of the first separator that begins at `start` or later."""
        match = self._pattern.search(text, start)
        return match.span() if match else None

    def undecided(self, text: bytes) -> int:
        """The place from which on a separator may begin that more text completes."""
        return max(0, len(text) - self._longest_part)


class BlankLineSeparator(Separator):
    """A blank line, which may contain spaces and tabs; the line end before it belongs to the separator."""

    def __init__(self):
        self._pattern = re.compile(rb"\n[ \t\r\f\v]*+\n")

    def undecided(self, text: bytes) -> int:
        """The last line end, if only white space follows it."""
        place = text.rfind(b"\n")
        return place if place >= 0 and not text[place:].strip() else len(text)


def ignore(error: DamagedFileError) -> None:
    """For the start of a file whose damage another reader reports."""


class RangeReader(files.TextReader):
    """Reads the documents of a range of a file; counts their bytes and line ends."""

    def __init__(
        self,
        path: str,
        start: int,
        stop: int,
        separator: Separator,
        on_damage: files.OnDamage,
        encoding: str = encodings.UTF_8,
    ):
        """Opens a file.

        Raises:
          DamagedFileError: it cannot be opened or is not text; the same for every range of the file.
        """
        self.text_bytes = 0
        self.lines = 0
        # Checks that it is text; the first range reports damage at the start.
        with files.DecompressingReader(path, ignore, encoding) as whole:
            super().__init__(path, on_damage, start, whole.encoding)
        with files.readable(path):
            self._file: BinaryIO = epath.Path(path).open("rb")
        pieces = _pieces(path, self._read_at, start, stop)
        documents = documents_of_range(pieces, separator, start == 0)
        self._text = encodings.to_utf_8(lambda size: next(documents, b""), self.encoding)
        self._next = self._count

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(self, *_):
        self._file.close()

    def _count(self, size: int) -> bytes:
        text = self._text(size)
        self.text_bytes += len(text)
        self.lines += text.count(b"\n")
        return text

    def _read_at(self, offset: int, size: int) -> bytes:
        with files.readable(self.path):
            if self._file.tell() != offset:
                self._file.seek(offset)
            data = self._file.read(size)
        self.raw_bytes = max(self.raw_bytes, offset + len(data) - self.start)
        return data


def documents_of_range(pieces: Iterator[tuple[bytes, bool]], separator: Separator, is_first: bool) -> Iterator[bytes]:
    """The text of the documents of a range.

    Args:
      pieces: of text, and whether a piece belongs to the range; those of the range first, then those after it.
      separator: between documents.
      is_first: the range begins a file, so that no document of another range extends into it.
    """
    text, begin, after = b"", 0, None  # `after`: where the text after the range begins in `text`
    if not is_first:
        place = None
        for data, belongs in pieces:
            text = text[separator.undecided(text) :] if after is None else text
            if not belongs and after is None:
                after = len(text)
            text += data
            place = separator.find(text, 0)
            if place and (after is None or place[0] < after):
                break
            place = None
            if after is not None and separator.undecided(text) >= after:
                return
        if place is None:
            return
        begin = place[1]
    if after is None:
        if begin < len(text):
            yield text[begin:]
        text, begin = b"", 0
        for data, belongs in pieces:
            if not belongs:
                text, after = data, 0
                break
            yield data
        if after is None:
            return
    while not (place := separator.find(text, after)):
        known = max(separator.undecided(text), after)
        if begin < known:
            yield text[begin:known]
        text, begin, after = text[known:], max(0, begin - known), 0
        data, _ = next(pieces, (b"", False))
        if not data:
            place = 0, len(text)
            break
        text += data
    if begin < place[1]:
        yield text[begin : place[1]]


def _pieces(path: str, read_at: Callable[[int, int], bytes], start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
    match files.compression(path):
        case ".bz2":
            return bzip2_blocks.decompress_range(path, read_at, start, stop)
        case ".zst":
            return read_frames(path, ZSTD, read_at, start, stop)
        case ".gz":
            return read_frames(path, GZIP, read_at, start, stop)
    return _plain(read_at, start, stop)


def _plain(read_at: Callable[[int, int], bytes], start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
    position = start
    while data := read_at(position, min(_RAW_BYTES, stop - position) if position < stop else _RAW_BYTES):
        yield data, position < stop
        position += len(data)
