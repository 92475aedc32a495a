"""`mediawiki:GLOB`: the articles of XML dumps of MediaWiki (`pages-articles`), as plain text.

Articles are the pages of namespace 0 that are not redirects; of several revisions the last one is used. Each page is
parsed separately, with expat of Python's standard library, so that a damaged page does not affect others.
"""

import dataclasses
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from data_prep.sources import files, mediawiki_markup
from data_prep.sources.base import Document, Skipped
from data_prep.sources.text_chunks import TextChunk
from data_prep.sources.text_files import RecordSource

_BEGIN = b"<page>"
# Namespaces of files and categories.
_HIDDEN_NAMESPACE = re.compile(rb'<namespace key="(?:6|14)"[^>]*>([^<]+)</namespace>')


class MediaWikiSource(RecordSource):
    """`mediawiki:GLOB`."""

    end_marker = b"</page>"

    def _chunks(self, file: files.DecompressingReader) -> Iterator[TextChunk | Skipped]:
        hidden: tuple[str, ...] | None = None
        for chunk in super()._chunks(file):
            if isinstance(chunk, Skipped):
                yield chunk
                continue
            if hidden is None:
                head = chunk.data[: chunk.data.find(_BEGIN)]
                hidden = tuple(name.decode(errors="replace") for name in _HIDDEN_NAMESPACE.findall(head))
            yield dataclasses.replace(chunk, file_properties=hidden)

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        data, line, counted, end = chunk.data, chunk.line, 0, 0
        while (begin := data.find(_BEGIN, end)) >= 0:
            line += data.count(b"\n", counted, begin)
            counted = begin
            origin = f"{chunk.path}:{line}"
            end = data.find(self.end_marker, begin)
            if end < 0:
                yield Skipped("malformed_xml", origin, "<page> without </page>; is the dump complete?")
                return
            end += len(self.end_marker)
            try:
                page = ElementTree.fromstring(memoryview(data)[begin:end])
            except ElementTree.ParseError as error:
                yield Skipped("malformed_xml", origin, f"in the page that begins here: {error}")
                continue
            yield from _article(page, chunk, origin)


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
    elif plain := mediawiki_markup.plain_text(text, frozenset(chunk.file_properties)):
        yield Document(origin, plain)
    else:
        yield Skipped("empty_document", origin, "the page has no text besides templates, tables and links")
