"""`warc:GLOB`: web archives. Pages of HTTP responses and of resources, and the text of WET files.

Records are found here and not by a library: fastwarc 2.0 and warcio 1.8 take a truncated file for its end. ISO 28500
defines the format; Common Crawl's pages have status 200, decoded and without chunks, other crawlers' need not.
"""

import re
import zlib
from collections.abc import Iterator

from data_prep.sources import files
from data_prep.sources.base import DamagedFileError, Document, Input, Skipped, import_optional
from data_prep.sources.html import page_documents, paragraphs
from data_prep.sources.text_chunks import TextChunk
from data_prep.sources.text_files import FileSource, decode

_READ_BYTES = 1 << 18
_HEADER_BYTES = 1 << 20
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_LENGTH = re.compile(rb"^content-length[ \t]*:[ \t]*(\d{1,18})[ \t]*\r?$", re.I | re.M)
_TYPE = re.compile(rb"^warc-type[ \t]*:[ \t]*(\w+)", re.I | re.M)
_READ_TYPES = {b"response", b"resource", b"conversion"}
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})\b")
_HTML = ("text/html", "application/xhtml+xml")
_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CUT_OFF_BYTES = 64
"""Of a chunk's size with its extensions, if the body is cut off inside them"""


class WarcSource(FileSource):
    """`warc:GLOB`; a chunk is a record. `@FIELD` is a field of the record's or of HTTP's header."""

    has_encodings = False
    has_fields = True

    def _open(
        self, path: str, part: Input, on_damage: files.OnDamage, content: bytes | None
    ) -> files.DecompressingReader:
        return files.DecompressingReader(path, on_damage, None, content)

    def _chunks(self, file: files.TextReader) -> Iterator[TextChunk | Skipped]:
        window = _Window(file)
        while window.skip_line_ends():
            begin, where = window.offset, f"record at byte {window.offset} of its content"
            if not window.starts_with(b"WARC/"):
                what = f"no WARC record begins at byte {begin} of its content" if begin else "is not a WARC file"
                file.end_at(DamagedFileError(f"{file.path}: {what}; leave it out of the source"))
                return
            header = window.take_header()
            length = _LENGTH.search(header) if header else None
            if header and not length:
                file.end_at(
                    DamagedFileError(f"{file.path}: the {where} has no Content-Length; leave it out of the source")
                )
                return
            size = int(length[1]) if length else 0
            kind = _TYPE.search(header) if header else None
            is_read = kind and kind[1].lower() in _READ_TYPES
            if is_read and size <= self.max_record_bytes:
                body = window.take(size)
                if len(body) == size:
                    yield TextChunk(file.path, begin, 1, header + body)
                    continue
            elif header and window.drop(size):
                if is_read:
                    detail = f"the {where} is longer than {self.max_record_bytes} bytes"
                    yield Skipped("record_too_long", file.path, detail, size)
                continue
            if not file.is_damaged:
                file.end_at(DamagedFileError(f"{file.path}: truncated, the {where} has no end; download it again"))
            return
        if not window.offset:
            yield TextChunk(file.path, 0, 1, b"")

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        begin = _HEADER_END.search(chunk.data).end()
        fields = _fields(chunk.data[:begin])
        name = fields.get("warc-target-uri", "").strip("<>") or fields.get("warc-record-id")
        origin = f"{chunk.path}#{name or f'byte {chunk.offset}'}"
        kind = _media_type(fields)
        if fields["warc-type"].lower() == "conversion":
            if kind != "text/plain":
                yield Skipped("not_text", origin, f"is {kind or 'of no type'}, not text/plain")
                return
            text, lost = decode(chunk, begin, len(chunk.data), origin)
            yield from lost
            if text is not None:
                text = paragraphs(text)
                others = self._others(fields)
                yield Document(origin, text, fields=others) if text else Skipped("empty_document", origin, "no text")
            return
        body = chunk.data[begin:]
        if kind == "application/http":
            status = _STATUS.match(body)
            end = _HEADER_END.search(body)
            if not status or not end:
                yield Skipped("malformed_http", origin, "has no header of HTTP", len(body))
                return
            if status[1] != b"200":
                yield Skipped("http_status", origin, f"has the status {status[1].decode()}")
                return
            http = _fields(body[: end.end()])
            body, fields, kind = body[end.end() :], {**http, **_without_type(fields)}, _media_type(http)
        if kind not in _HTML:
            yield Skipped("not_html", origin, f"is {kind or 'of no type'}, not HTML")
            return
        try:
            page = _payload(body, fields, self.max_record_bytes)
        except (ValueError, zlib.error) as error:
            yield Skipped("malformed_http", origin, f"cannot be decoded ({error})", len(body))
            return
        yield from page_documents(page, origin, _charset(fields), self._others(fields))

    def _others(self, fields: dict[str, str]) -> dict[str, str]:
        """Values of `Source.fields`, of a list such as "eng,fra" the first."""
        return {name: fields[name.lower()].split(",")[0] for name in self.fields if name.lower() in fields}


class _Window:
    """The next bytes of a file, of which bytes are taken without a copy of the rest."""

    def __init__(self, file: files.TextReader):
        self._file = file
        self._data = b""
        self._place = 0
        self.offset = 0
        """bytes taken"""

    def _fill(self, size: int) -> int:
        """Reads until there are `size` bytes, or the file ends; how many there are."""
        have = len(self._data) - self._place
        if have < size:
            self._data = self._data[self._place :] + self._file.read(max(size - have, _READ_BYTES))
            self._place, have = 0, len(self._data)
        return have

    def starts_with(self, prefix: bytes) -> bool:
        self._fill(len(prefix))
        return self._data.startswith(prefix, self._place)

    def skip_line_ends(self) -> bool:
        """Removes line ends; whether anything follows."""
        while self._fill(1):
            if self._data[self._place] not in b"\r\n":
                return True
            self.take(1)
        return False

    def take(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        self._fill(size)
        data = self._data[self._place : self._place + size]
        self._place += len(data)
        self.offset += len(data)
        return data

    def drop(self, size: int) -> bool:
        """Removes `size` bytes; whether there were so many."""
        while size:
            taken = len(self.take(min(size, _READ_BYTES)))
            if not taken:
                return False
            size -= taken
        return True

    def take_header(self) -> bytes | None:
        """Bytes up to the end of an empty line; None if there is none."""
        size = 4096
        while True:
            have = self._fill(size)
            if match := _HEADER_END.search(self._data, self._place):
                return self.take(match.end() - self._place)
            if have < size or size > _HEADER_BYTES:
                return None
            size *= 4


def _fields(header: bytes) -> dict[str, str]:
    """Lower-case names and values; of equal names the first counts."""
    fields: dict[str, str] = {}
    for line in header.decode(errors="replace").split("\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip().lower(), value.strip())
    return fields


def _without_type(fields: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if name not in ("content-type", "content-length")}


def _media_type(fields: dict[str, str]) -> str:
    return fields.get("content-type", "").partition(";")[0].strip().lower()


def _charset(fields: dict[str, str]) -> str | None:
    match = re.search(r"charset\s*=\s*[\"']?\s*([\w.:-]{2,40})", fields.get("content-type", ""), re.I | re.A)
    return match[1] if match else None


def _payload(body: bytes, fields: dict[str, str], max_bytes: int) -> bytes:
    """A page without the encodings of HTTP; some crawlers keep their names, but not the encodings.

    Raises:
      ValueError, zlib.error: it cannot be decoded.
    """
    if "chunked" in fields.get("transfer-encoding", "").lower() and _CHUNK_SIZE.match(body):
        body = _without_chunks(body)
    for coding in reversed(fields.get("content-encoding", "").lower().split(",")):
        match coding.strip():
            case "gzip" | "x-gzip" if body.startswith(_GZIP):
                body = _inflate(body, 31, max_bytes)
            case "deflate" if not body.lstrip().startswith(b"<"):
                body = _inflate(body, 15 if body[:1] == b"\x78" else -15, max_bytes)
            case "zstd" if body.startswith(_ZSTD):
                raise ValueError("zstd is not read")
            case "br" if not body.lstrip().startswith(b"<"):
                body = _unbrotli(body, max_bytes)
    return body


def _without_chunks(body: bytes) -> bytes:
    chunks, place = [], 0
    while (match := _CHUNK_SIZE.match(body, place)) and (size := int(match[1], 16)):
        chunks.append(body[match.end() : match.end() + size])
        place = match.end() + size
        place += 2 if body.startswith(b"\r\n", place) else body.startswith(b"\n", place)
    if not match and len(body) - place > _CUT_OFF_BYTES:
        raise ValueError("a chunk has no size")
    return b"".join(chunks)


def _inflate(body: bytes, window: int, max_bytes: int) -> bytes:
    """Decompressed data, of all members of gzip; of data that was cut off, as crawlers do at a size, the start."""
    view, place, parts, total = memoryview(body), 0, [], 0
    decompressor = zlib.decompressobj(wbits=window)
    while place < len(body):
        if decompressor.eof:
            if window != 31 or not body.startswith(_GZIP, place):
                break
            decompressor = zlib.decompressobj(wbits=window)
        piece = view[place : place + _READ_BYTES]  # of which zlib copies what follows a member
        parts.append(decompressor.decompress(piece, max_bytes + 1 - total))
        total += len(parts[-1])
        if total > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
        place += len(piece) - len(decompressor.unused_data)
    return b"".join(parts)


def _unbrotli(body: bytes, max_bytes: int) -> bytes:
    brotli = import_optional("brotli", "reading web pages", "web")
    decompressor, parts, total = brotli.Decompressor(), [], 0
    try:
        part = decompressor.process(body, output_buffer_limit=1 << 20)
        while part:
            parts.append(part)
            total += len(part)
            if total > max_bytes:
                raise ValueError(f"more than {max_bytes} bytes")
            part = decompressor.process(b"", output_buffer_limit=1 << 20)
    except brotli.error as error:
        raise ValueError(f"damaged brotli data: {error}") from error
    return b"".join(parts)
