"""`mediawiki:GLOB`: the articles of XML dumps of MediaWiki (`pages-articles`), as plain text.

Articles are the pages of namespace 0 that are not redirects; of several revisions the last one is used. Each page is
parsed separately, with expat of Python's standard library, so that a damaged page does not affect others.
"""

import dataclasses
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from data_prep.sources import file_ranges, files, mediawiki_markup
from data_prep.sources.base import Document, Skipped
from data_prep.sources.text_chunks import TextChunk
from data_prep.sources.text_files import RecordSource

_BEGIN = b"<page>"
_HEAD_BYTES = 1 << 14
_MAX_HEAD_BYTES = 1 << 20
# Namespaces of files and categories.
_HIDDEN_NAMESPACE = re.compile(rb'<namespace key="(?:6|14)"[^>]*>([^<]+)</namespace>')
# Pages whose dump does not mark them as redirects, as in exports of old software.
_REDIRECT = re.compile(
    r"\s*#(?:redirect(?:ion|ección)?|weiterleitung|doorverwijzing|rinvia|redirecionamento|перенаправление|重定向|転送)"
    r"\s*:?\s*\[\[",
    re.IGNORECASE,
)


class MediaWikiSource(RecordSource):
    """`mediawiki:GLOB`."""

    end_marker = b"</page>"

    def _chunks(self, file: files.TextReader) -> Iterator[TextChunk | Skipped]:
        hidden = _hidden_namespaces(file) if file.start else None
        for chunk in super()._chunks(file):
            if isinstance(chunk, Skipped):
                yield chunk
                continue
            if hidden is None:
                hidden = _names(chunk.data[: chunk.data.find(_BEGIN)])
            yield dataclasses.replace(chunk, file_properties=hidden)

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        data, line, counted, end = chunk.data, chunk.line, 0, 0
        while (begin := data.find(_BEGIN, end)) >= 0:
            line += data.count(b"\n", counted, begin)
            counted = begin
            origin = chunk.origin_at(line)
            end = data.find(self.end_marker, begin)
            if end < 0:
                detail = "<page> without </page>; is the dump complete?"
                yield Skipped("malformed_xml", origin, detail, len(data) - begin)
                return
            end += len(self.end_marker)
            try:
                page = ElementTree.fromstring(memoryview(data)[begin:end])
            except ElementTree.ParseError as error:
                yield Skipped("malformed_xml", origin, f"in the page that begins here: {error}", end - begin)
                continue
            yield from _article(page, chunk, origin)


def _hidden_namespaces(ranged: files.TextReader) -> tuple[str, ...]:
    """Of a dump; its head, some 10 kB, is before the first page."""
    with files.DecompressingReader(ranged.path, file_ranges.ignore, ranged.encoding) as file:
        head = b""
        while _BEGIN not in head and len(head) < _MAX_HEAD_BYTES and (more := file.read(_HEAD_BYTES)):
            head += more
    return _names(head[: head.find(_BEGIN)])


def _names(head: bytes) -> tuple[str, ...]:
    return tuple(name.decode(errors="replace") for name in _HIDDEN_NAMESPACE.findall(head))


def _article(page: ElementTree.Element, chunk: TextChunk, origin: str) -> Iterator[Document | Skipped]:
    if page.findtext("ns", "0").strip() != "0" or page.find("redirect") is not None:
        return
    title = page.findtext("title")
    if title:
        origin = f"{chunk.path}#{title}"
    revision = page.find("revision[last()]")
    text = None if revision is None else revision.findtext("text")
    if text is None:
        yield Skipped("missing_text", origin, "the page has no revision with text")
    elif (model := revision.findtext("model", "wikitext")) != "wikitext":
        yield Skipped("not_wikitext", origin, f"the page's content model is {model}")
    elif _REDIRECT.match(text):
        return
    elif plain := mediawiki_markup.plain_text(text, frozenset(chunk.file_properties)):
        yield Document(origin, plain)
    else:
        yield Skipped("empty_document", origin, "the page has no text besides templates, tables and links")
