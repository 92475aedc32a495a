"""Sources that read files sequentially, and the kinds `text`, `text-files` and `lines`."""

import abc
import dataclasses
import re
from collections.abc import Iterator
from typing import ClassVar

from bert_jax.storage.listing import file_version
from data_prep.sources import encodings, files
from data_prep.sources.base import DamagedFileError, Document, FileSet, Input, InputRecord, Skipped, Source, SourceBlock
from data_prep.sources.file_inputs import divide_files
from data_prep.sources.file_ranges import BlankLineSeparator, RangeReader, Separator
from data_prep.sources.text_chunks import (
    BlankLineRule,
    BoundaryRule,
    TextChunk,
    document_aligned_chunks,
    record_aligned_chunks,
)

_ADVICE = "set --encoding to the one of the file, e.g. windows-1252, or to auto"
_BLANK_LINES = re.compile(rb"(?:[ \t\r\f\v]*+\n)++")
_OTHER_LINE_ENDS = re.compile("\r(?!\n)|[\x0b\x0c\x85\u2028\u2029]")
_BETWEEN_DOCUMENTS = re.compile(rb"\n((?:[ \t\r\f\v]*+\n)++)")


@dataclasses.dataclass(frozen=True)
class FileSource(Source):
    """Files that match a glob, read as bytes; the payload of a block is a tuple of chunks."""

    pattern: str | FileSet
    has_encodings = True
    rule: ClassVar[BoundaryRule] = BoundaryRule()
    """where documents end"""

    @property
    def separator(self) -> Separator | None:
        """What ends a document in any context; None: files cannot be read by ranges."""
        return None

    def inputs(self) -> list[Input]:
        """The files and ranges of large ones; small consecutive files are one input."""
        found = files.find_files(self.spec, self.pattern)
        return divide_files(found, self.block_bytes, self.range_bytes if self.separator else None, self.encoding)

    def read_blocks(self, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        """Chunks of files; those of small files are one block."""

        def on_damage(error: DamagedFileError) -> None:
            if not self.skip_damaged:
                raise error
            record.damaged.append(str(error))

        if part.hash_only:
            try:
                record.files.append({"path": part.paths[0], **files.file_entry(part.paths[0])})
            except DamagedFileError as error:
                on_damage(error)
            return
        chunks: list[TextChunk | Skipped] = []
        gathered = read_before = reported = 0
        contents = files.request_together(part)
        for path in part.paths:
            file = None
            try:
                with self._open(path, part, on_damage, contents.get(path)) as file:
                    for chunk in self._used_chunks(file):
                        size = len(chunk.data) if isinstance(chunk, TextChunk) else 0
                        if chunks and gathered + size > self.block_bytes:
                            read = min(part.size, read_before + file.raw_bytes)
                            yield SourceBlock(chunks[0].origin, tuple(chunks), read - reported)
                            chunks, gathered, reported = [], 0, read
                        chunks.append(chunk)
                        gathered += size
                    if isinstance(file, RangeReader):
                        record.lines, record.text_bytes = file.lines, file.text_bytes
                    else:
                        record.files.append(file.file_entry())
                    read_before += file.raw_bytes
                    if not part.start and file.encoding:
                        record.encodings[file.encoding] = record.encodings.get(file.encoding, 0) + 1
            except DamagedFileError as error:
                on_damage(error)
            if file is None or file.is_damaged:
                size = part.size if part.stop else _size_on_disk(path)
                record.damaged_bytes += max(0, size - (file.used_bytes if file else 0))
        yield SourceBlock(chunks[0].origin if chunks else part.origin, tuple(chunks), part.size - reported)

    def _open(
        self, path: str, part: Input, on_damage: files.OnDamage, content: bytes | None
    ) -> files.DecompressingReader | RangeReader:
        if part.stop:
            return RangeReader(path, part.start, part.stop, self.separator, on_damage, self.encoding)
        return files.DecompressingReader(path, on_damage, self.encoding, content)

    def _used_chunks(self, file: files.TextReader) -> Iterator[TextChunk | Skipped]:
        """Chunks, without the one that reports an empty file if text of the file is elsewhere or was not read."""
        for chunk in self._chunks(file):
            is_empty = isinstance(chunk, TextChunk) and not chunk.data and chunk.begins
            if not is_empty or not (file.is_damaged or isinstance(file, RangeReader)):
                yield chunk

    def documents(self, block: SourceBlock) -> Iterator[Document | Skipped]:
        """The documents of the chunks."""
        for chunk in block.payload:
            if isinstance(chunk, Skipped):
                yield chunk
            elif not chunk.data and chunk.begins:
                yield Skipped("empty_file", chunk.path, "contains no text")
            else:
                yield from self._documents(chunk)

    def _chunks(self, file: files.TextReader) -> Iterator[TextChunk | Skipped]:
        """Splits a file into chunks; reads it to its end."""
        return document_aligned_chunks(file, self.rule, self.block_bytes)

    @abc.abstractmethod
    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        """The documents of a chunk that is not empty."""


def _size_on_disk(path: str) -> int:
    """Bytes of a file; 0 if it cannot be looked up."""
    try:
        return file_version(path).size
    except OSError:
        return 0


def decode(chunk: TextChunk, begin: int, end: int, origin: str) -> tuple[str | None, list[Skipped]]:
    """Bytes of a chunk as text, or None if they are not text in the encoding of the file; and what is lost.

    If such bytes are a part of a document, the caller yields an empty part, because other parts may have been read.
    """
    data = chunk.data[begin:end]
    text, lost = encodings.decode(data)
    if not lost:
        return text, []
    place = chunk.byte_at(begin + encodings.first_lost(data))
    name = "UTF-8" if chunk.encoding == encodings.UTF_8 else chunk.encoding
    what = f"{lost:,} of {len(data):,} bytes are not {name}, the first at byte {place}"
    if text is None:
        return None, [Skipped("undecodable", origin, f"{what}; {_ADVICE}", len(data))]
    return text, [Skipped("undecodable_bytes", origin, f"{what}; the rest is used", lost)]


class RecordSource(FileSource):
    """Files of records, which are never split; `end_marker` ends a record."""

    end_marker: ClassVar[bytes]

    @property
    def separator(self) -> Separator:
        """The end of a record."""
        return Separator(self.end_marker)

    def _chunks(self, file: files.TextReader) -> Iterator[TextChunk | Skipped]:
        return record_aligned_chunks(file, self.end_marker, self.block_bytes, self.max_record_bytes)


class TextSource(FileSource):
    """`text:GLOB`: blank lines separate documents."""

    rule = BlankLineRule()
    sentence_per_line: ClassVar[bool] = False

    @property
    def separator(self) -> Separator:
        """A blank line."""
        return BlankLineSeparator()

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        spans = list(_spans(chunk))
        line, counted = chunk.line, 0
        for index, (begin, end) in enumerate(spans):
            line += chunk.data.count(b"\n", counted, begin)
            counted = begin
            begins, ends = chunk.begins or index > 0, chunk.ends or index < len(spans) - 1
            origin = chunk.origin_at(line)
            text, lost = decode(chunk, begin, end, origin)
            yield from lost
            if text is None:
                if begins and ends:
                    continue
                text = ""
            yield Document(origin, text, self.sentence_per_line, begins, ends)


def _spans(chunk: TextChunk) -> Iterator[tuple[int, int]]:
    """Start and end of the documents of a chunk, including the last line end."""
    data, begin = chunk.data, 0
    if not chunk.begins and chunk.line_start and (blank := _BLANK_LINES.match(data)):
        yield 0, 0  # the previous document was split exactly at its end
        begin = blank.end()
    for match in _BETWEEN_DOCUMENTS.finditer(data, begin):
        yield begin, match.start(1)
        begin = match.end()
    if data[begin:].strip() or not chunk.ends or (begin == 0 and not chunk.begins):
        yield begin, len(data)


class SentencePerLineSource(TextSource):
    """`lines:GLOB`: one sentence on each line, and blank lines separate documents.

    As in google-research/bert create_pretraining_data.py, only LF and CR LF end a line: what cleaning takes for the end
    of a line elsewhere is a space here.
    """

    sentence_per_line = True

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        for item in super()._documents(chunk):
            is_document = isinstance(item, Document)
            yield dataclasses.replace(item, text=_OTHER_LINE_ENDS.sub(" ", item.text)) if is_document else item


class WholeFileSource(FileSource):
    """`text-files:GLOB`: a file is a document."""

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        origin = chunk.path if chunk.begins else chunk.origin
        text, lost = decode(chunk, 0, len(chunk.data), origin)
        yield from lost
        if text is None:
            if chunk.begins and chunk.ends:
                return
            text = ""
        yield Document(origin, text, begins=chunk.begins, ends=chunk.ends)
