"""Sources that read files from begin to end, and the plainest of them: `text`, `text-files` and `lines`."""

import abc
import dataclasses
import re
from collections.abc import Iterator
from typing import ClassVar

from data_prep.sources import files
from data_prep.sources.base import BLOCK_BYTES, Block, Document, Input, Skipped, Source
from data_prep.sources.text_chunks import BlankLineRule, BoundaryRule, TextChunk, WholeFileRule, document_aligned_blocks

_BLANK_LINES = re.compile(rb"(?:[ \t\r\f\v]*+\n)++")
_BETWEEN_DOCUMENTS = re.compile(rb"\n((?:[ \t\r\f\v]*+\n)++)")


@dataclasses.dataclass(frozen=True)
class FileSource(Source):
    """Files that a glob matches, read as bytes; the payload of a block is a tuple of pieces."""

    pattern: str
    block_bytes: int = BLOCK_BYTES

    def inputs(self) -> list[Input]:
        """Files; small neighbours together."""
        return files.group_files(files.find_files(self.spec, self.pattern), self.block_bytes)

    def blocks(self, part: Input, file_entries: list[dict]) -> Iterator[Block]:
        """Pieces of files, those of small files together."""
        pieces: list[TextChunk | Skipped] = []
        gathered = read_before = reported = 0
        for path in part.paths:
            with files.DecompressingReader(path) as file:
                for piece in self._pieces(file):
                    size = len(piece.data) if isinstance(piece, TextChunk) else 0
                    if pieces and gathered + size > self.block_bytes:
                        read = min(part.size, read_before + file.raw_bytes)
                        yield Block(pieces[0].origin, tuple(pieces), read - reported)
                        pieces, gathered, reported = [], 0, read
                    pieces.append(piece)
                    gathered += size
                file_entries.append(file.file_entry())
                read_before += file.raw_bytes
        yield Block(pieces[0].origin, tuple(pieces), part.size - reported)

    def documents(self, block: Block) -> Iterator[Document | Skipped]:
        """The documents of the pieces."""
        for piece in block.payload:
            if isinstance(piece, Skipped):
                yield piece
            elif not piece.data:
                yield Skipped("empty_file", piece.path, "holds no text")
            else:
                yield from self._documents(piece)

    @abc.abstractmethod
    def _pieces(self, file: files.DecompressingReader) -> Iterator[TextChunk | Skipped]:
        """Cuts a file; the last piece has been read to the end of the file."""

    @abc.abstractmethod
    def _documents(self, piece: TextChunk) -> Iterator[Document | Skipped]:
        """Reads a piece, which is not empty."""


def decode_utf8(piece: TextChunk, begin: int, end: int, origin: str) -> str | Skipped:
    """Bytes of a piece as text, or where they are not UTF-8.

    Where such bytes are a part of a document, an empty part takes their place: others may have been read already.
    """
    try:
        return piece.data[begin:end].decode()
    except UnicodeDecodeError as error:
        place = piece.offset + begin + error.start
        advice = "convert it, e.g. with `iconv -f WINDOWS-1252 -t UTF-8` if it is Western European"
        return Skipped("invalid_utf8", origin, f"not UTF-8 at byte {place}; {advice}")


@dataclasses.dataclass(frozen=True)
class TextSource(FileSource):
    """`text:GLOB` and `lines:GLOB`: a blank line divides documents."""

    sentence_per_line: bool = False
    rule: ClassVar[BoundaryRule] = BlankLineRule()

    def _pieces(self, file: files.DecompressingReader) -> Iterator[TextChunk]:
        return document_aligned_blocks(file, self.rule, self.block_bytes)

    def _documents(self, piece: TextChunk) -> Iterator[Document | Skipped]:
        spans = list(_spans(piece))
        line, counted = piece.line, 0
        for index, (begin, end) in enumerate(spans):
            line += piece.data.count(b"\n", counted, begin)
            counted = begin
            begins, ends = piece.begins or index > 0, piece.ends or index < len(spans) - 1
            origin = f"{piece.path}:{line}"
            text = decode_utf8(piece, begin, end, origin)
            if isinstance(text, Skipped):
                yield text
                if begins and ends:
                    continue
                text = ""
            yield Document(origin, text, self.sentence_per_line, begins, ends)


def _spans(piece: TextChunk) -> Iterator[tuple[int, int]]:
    """Where the documents of a piece begin and end, the last line end included."""
    data, begin = piece.data, 0
    if not piece.begins and piece.line_start and (blank := _BLANK_LINES.match(data)):
        yield 0, 0  # the document before was cut just where it ends
        begin = blank.end()
    for found in _BETWEEN_DOCUMENTS.finditer(data, begin):
        yield begin, found.start(1)
        begin = found.end()
    if data[begin:].strip() or not piece.ends or (begin == 0 and not piece.begins):
        yield begin, len(data)


@dataclasses.dataclass(frozen=True)
class TextFileSource(FileSource):
    """`text-files:GLOB`: a file is a document."""

    rule: ClassVar[BoundaryRule] = WholeFileRule()

    def _pieces(self, file: files.DecompressingReader) -> Iterator[TextChunk]:
        return document_aligned_blocks(file, self.rule, self.block_bytes)

    def _documents(self, piece: TextChunk) -> Iterator[Document | Skipped]:
        origin = piece.path if piece.begins else piece.origin
        text = decode_utf8(piece, 0, len(piece.data), origin)
        if isinstance(text, Skipped):
            yield text
            if piece.begins and piece.ends:
                return
            text = ""
        yield Document(origin, text, begins=piece.begins, ends=piece.ends)
