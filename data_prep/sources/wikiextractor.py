"""`wikiextractor:GLOB`: output of WikiExtractor, articles between `<doc id="" url="" title="">` and `</doc>`.

Each line is a paragraph. The first line of an article, which repeats its title, is removed: it is not a sentence
(NVIDIA's preparation of Wikipedia for BERT removes it too).
"""

import html
import re
from collections.abc import Iterator

from data_prep.sources.base import Document, Skipped
from data_prep.sources.text_chunks import TextChunk
from data_prep.sources.text_files import RecordSource, decode

_BEGIN = re.compile(rb"<doc[ \t][^\n]*>[ \t]*\r?(?:\n|\Z)")
_TITLE = re.compile(rb'\btitle="([^\n]*)"')


class WikiExtractorSource(RecordSource):
    """`wikiextractor:GLOB`."""

    end_marker = b"</doc>"

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        data, place, line, counted = chunk.data, 0, chunk.line, 0
        end = data.find(self.end_marker)
        while place < len(data):
            begin = _find_begin(data, place)
            outside = data[place:begin].lstrip()
            if outside:
                stray = line + data.count(b"\n", counted, begin - len(outside))
                detail = f"text outside of <doc> and </doc>: {outside[:40]!r}"
                yield Skipped("outside_document", chunk.origin_at(stray), detail, len(outside))
            line += data.count(b"\n", counted, begin)
            counted = begin
            origin = chunk.origin_at(line)
            if begin == len(data):
                return
            if 0 <= end < begin:
                end = data.find(self.end_marker, begin)
            next_begin = _find_begin(data, begin + 1)
            if end < 0 or end > next_begin:
                detail = "<doc> without </doc>; is the file complete?"
                yield Skipped("malformed_document", origin, detail, next_begin - begin)
                place = next_begin
            else:
                yield from _article(chunk, begin, end, origin)
                place = end + len(self.end_marker)


def _find_begin(data: bytes, place: int) -> int:
    """Start of the next article, at the start of a line; the end of the data if there is none."""
    while (place := data.find(b"<doc", place)) >= 0:
        if (place == 0 or data[place - 1] == ord("\n")) and _BEGIN.match(data, place):
            return place
        place += 1
    return len(data)


def _article(chunk: TextChunk, begin: int, end: int, origin: str) -> Iterator[Document | Skipped]:
    head = _BEGIN.match(chunk.data, begin)
    body, lost = decode(chunk, head.end(), end, origin)
    yield from lost
    if body is None:
        return
    title = _TITLE.search(head[0])
    name = title[1].decode(errors="replace") if title else ""
    if name:
        origin = f"{chunk.path}#{html.unescape(name)}"
    lines = [line for line in body.split("\n") if line and not line.isspace()]
    if lines and lines[0].strip() in (name, html.unescape(name)):
        del lines[0]
    if not lines:
        yield Skipped("empty_document", origin, "the article has no text")
        return
    text = "\n\n".join(lines)
    if "&" in text:  # WikiExtractor's --html-safe writes these three
        text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    yield Document(origin, text)
