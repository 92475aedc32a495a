"""`html:GLOB`: web pages, each a document: the main text without navigation, cookie banners, comments and footers.

resiliparse extracts it. On 1,534 pages that were made of real paragraphs it has ten times the speed of trafilatura, and
keeps as much text (docs/log/corpora.md, 2026-11-29).
"""

import codecs
import re
from collections.abc import Iterator, Mapping

from data_prep.sources import encodings, files
from data_prep.sources.base import Document, Input, Skipped, import_optional
from data_prep.sources.text_chunks import TextChunk
from data_prep.sources.text_files import FileSource

MAX_NESTING = 512
"""Pages with more open elements are skipped: Blink's parser ends there, and the time of resiliparse is proportional to
the square of the depth (10^5 levels of <div>: more than two minutes)."""
_MAX_ATTRIBUTES_BYTES = 1 << 16
"""Of tags of this size, attributes are counted, because the time is proportional to the square of them."""
_MAX_ATTRIBUTES = 5_000
_MAX_LOST_SHARE = 0.01
_HEAD_BYTES = 8192
_CHARSET = re.compile(
    rb"<meta[^>]*?charset\s*=\s*[\"']?\s*([\w.:-]{2,40})|<\?xml[^>]*?encoding\s*=\s*[\"']([\w.:-]{2,40})", re.I
)
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_NESTED = re.compile(
    r"<(/?)(?:div|article|section|main|aside|nav|header|footer|center|form|ul|ol|dl|menu|blockquote|figure|fieldset"
    r"|details|table|span|font|b|i|u|s|em|strong|small|big|tt|code|strike|nobr)(?=[\s/>])",
    re.I,
)
"""Tags of elements that end at their end tag only."""
_ATTRIBUTE = r"(?:[^\s/>=]++|=[^\s/>=]*+)(?:\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s>\"'][^\s>]*+)?+)?+"
_TAG = re.compile(rf"<[a-z][^\s/>]*+((?:[\s/]++|{_ATTRIBUTE})*+)", re.I)
_BULLETED_LIST = re.compile(r"(<\s*/?)ul\b", re.I)


class HtmlSource(FileSource):
    """`html:GLOB`; the payload of a block is a tuple of whole files."""

    has_encodings = False

    def _open(
        self, path: str, part: Input, on_damage: files.OnDamage, content: bytes | None
    ) -> files.DecompressingReader:
        return files.DecompressingReader(path, on_damage, None, content)

    def _chunks(self, file: files.TextReader) -> Iterator[TextChunk | Skipped]:
        data = file.read(self.max_record_bytes + 1)
        if len(data) <= self.max_record_bytes:
            yield TextChunk(file.path, 0, 1, data)
            return
        size = len(data)
        while more := file.read(1 << 20):
            size += len(more)
        yield Skipped("record_too_long", file.path, f"is longer than {self.max_record_bytes} bytes", size)

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        return page_documents(chunk.data, chunk.path)


def page_documents(
    data: bytes, origin: str, charset: str | None = None, fields: Mapping[str, str] | None = None
) -> Iterator[Document | Skipped]:
    """The document of a page, or what is skipped of it.

    Args:
      data: the page.
      origin: of the document, for messages.
      charset: that HTTP names, if any.
      fields: of the document.
    """
    is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if data.startswith(b"%PDF-") or (b"\0" in data[:_HEAD_BYTES] and not is_utf_16):
        yield Skipped("not_html", origin, "is binary, not a page", len(data))
        return
    page, lost, name = _decode(data, charset)
    if lost > _MAX_LOST_SHARE * len(data):
        yield Skipped("undecodable", origin, f"{lost:,} of {len(data):,} bytes are not {name}", len(data))
        return
    if lost:
        yield Skipped("undecodable_bytes", origin, f"{lost:,} bytes are not {name}; the rest is used", lost)
    if reason := _unreasonable(page):
        yield Skipped("unreasonable_html", origin, reason, len(data))
        return
    text = _text(page)
    yield Document(origin, text, fields=fields or {}) if text else Skipped("empty_document", origin, "has no text")


def paragraphs(text: str) -> str:
    """Text of which each line is a paragraph: a block of a page."""
    return "\n\n".join(line for line in (line.strip() for line in text.split("\n")) if line)


def _text(page: str) -> str:
    extract = import_optional("resiliparse.extract.html2text", "reading web pages", "web").extract_plain_text
    # resiliparse drops all bulleted lists from what it takes for main content, and no numbered ones.
    page = _BULLETED_LIST.sub(r"\1ol", page)
    options = {"alt_texts": False, "comments": False, "list_bullets": False}
    return paragraphs(extract(page, preserve_formatting=True, main_content=True, **options))


def _decode(data: bytes, charset: str | None) -> tuple[str, int, str]:
    """Text, number of bytes that are not in the encoding, and the encoding.

    The encoding is that of the byte order mark; UTF-8 if more characters are UTF-8 than bytes are not, whatever is
    declared; else the first of HTTP's, the page's own and uchardet's in which all bytes are text.
    """
    library = import_optional("resiliparse.parse.encoding", "reading web pages", "web")
    for mark, name in _BOMS:
        if data.startswith(mark):
            return _lossy(data[len(mark) :], name)
    match = _CHARSET.search(data[:_HEAD_BYTES])
    own = (match[1] or match[2]).decode() if match else None
    declared = [library.map_encoding_to_html5(name, False) for name in (charset, own) if name]
    declared = [name for name in declared if name and not name.startswith("utf-16")]
    if b"\x1b" not in data or not any(name.startswith("iso2022") for name in map(_python_name, declared)):
        bad, characters = encodings.counts(data.decode("utf-8", "surrogateescape"))
        if bad < max(1, characters):
            return _lossy(data, "utf-8")
    names = [name for name in declared if name != "utf-8"]
    names.append(library.detect_encoding(data))
    for name in names:
        try:
            return data.decode(name), 0, name
        except UnicodeDecodeError:
            continue
    return _lossy(data, names[0])


def _python_name(name: str) -> str:
    return codecs.lookup(name).name


def _lossy(data: bytes, name: str) -> tuple[str, int, str]:
    try:
        return data.decode(name), 0, name
    except UnicodeDecodeError:
        text = data.decode(name, "replace")
        return text, text.count("\ufffd"), name


def _unreasonable(page: str) -> str | None:
    """Why the time to read a page is not proportional to its size, if so."""
    if page.count("<") > MAX_NESTING:
        depth = 0
        for match in _NESTED.finditer(page):
            depth = max(0, depth - 1) if match[1] else depth + 1
            if depth > MAX_NESTING:
                return f"has more than {MAX_NESTING} elements inside each other"
    if len(page) > _MAX_ATTRIBUTES_BYTES:
        for match in _TAG.finditer(page):
            inside = match[1]
            if len(inside) > _MAX_ATTRIBUTES_BYTES and len(re.findall(_ATTRIBUTE, inside)) > _MAX_ATTRIBUTES:
                return f"has a tag of more than {_MAX_ATTRIBUTES:,} attributes"
    return None
