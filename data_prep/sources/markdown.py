"""`markdown:GLOB`: Markdown becomes plain text, paragraph by paragraph.

Kept: headings (paragraphs of their own), items of lists, quotations, the text of links, inline code, footnotes, rows of
tables (a line each), and indented blocks, which in books are verse and letters more often than code. Left out:
fenced code, images, HTML tags and comments, the names of footnotes, rulers, and metadata at the beginning of a file.

pyromark (Rust's pulldown-cmark) parses: of the parsers with Python bindings the only one that gives events, so
that nothing has to be undone, at more than 200 MB/s; markdown-it-py and mistune reach about 10.
"""

import dataclasses
import functools
import html
import re
from collections.abc import Iterator
from typing import Any

from data_prep.sources import files
from data_prep.sources.base import Document, Skipped, import_optional
from data_prep.sources.text_chunks import BoundaryRule, TextChunk, document_aligned_blocks
from data_prep.sources.text_files import FileSource, decode_utf8

# Blank lines inside these do not end what a cut must not separate.
_SOLID_MARKS = (b"```", b"~~~", b"<")
_SOLID = re.compile(
    rb"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*+\n(?s:.*?)(?:^ {0,3}(?P=fence)[`~]*+[ \t]*+$|\Z)"
    rb"|<!--(?s:.*?)(?:-->|\Z)"
    rb"|<(?P<tag>pre|script|style|textarea)\b(?s:.*?)(?:</(?P=tag)>|\Z)",
    re.MULTILINE,
)
_LAST_PARAGRAPH_END = re.compile(rb"(?s:.*)\n[ \t\r]*+\n(?=[^\s])")

_METADATA = re.compile(rb"---[ \t]*\r?\n(?:[\w-]+:.*\n|[ \t].*\n|- .*\n|\r?\n)*+---[ \t]*\r?\n")
_HTML = re.compile(r"<!--(?s:.*?)(?:-->|\Z)|<(script|style)\b(?s:.*?)(?:</\1>|\Z)|</?[a-zA-Z][^<>]*>")
_BLANK_AT_END = re.compile(r"\n[ \t\r]*\n\s*\Z")

# Where one of these begins or ends, so does a paragraph.
_BLOCKS = frozenset(
    ["Paragraph", "Heading", "BlockQuote", "List", "Item", "FootnoteDefinition", "CodeBlock", "HtmlBlock", "Table"]
)
_LONGEST_BREAK = 100


class MarkdownRule(BoundaryRule):
    """A file is a document, or a heading begins one."""

    def __init__(self, level: int | None):
        """With `level`, headings down to that level begin a document."""
        self._heading = level and re.compile(rb"(?s:.*\n)(?= {0,3}#{1,%d}[ \t\r\n])" % level)

    def boundary(self, window: bytes, stop: int, line_start: bool) -> int:
        """Before the last heading."""
        return _last(self._heading, window, stop) if self._heading else 0

    def paragraph(self, window: bytes, stop: int) -> int:
        """Behind the last blank line before text that is not indented."""
        return _last(_LAST_PARAGRAPH_END, window, stop)


def _last(pattern: re.Pattern, window: bytes, stop: int) -> int:
    """Where the last match of a pattern ends that does not end inside something solid."""
    spans = []
    if any(mark in window for mark in _SOLID_MARKS):
        spans = [found.span() for found in _SOLID.finditer(window, 0, stop)]
    while found := pattern.match(window, 0, stop):
        while spans and spans[-1][0] >= found.end():
            spans.pop()
        if not spans or found.end() >= spans[-1][1]:
            return found.end()
        stop = spans[-1][0] + 1  # so that what begins there can be seen
    return 0


@functools.cache
def _parser() -> tuple[Any, Any]:
    """pyromark's function that gives events with their places, and what it is to understand beside CommonMark."""
    pyromark = import_optional("pyromark", "reading Markdown")
    extra = pyromark.Options
    options = extra.ENABLE_TABLES | extra.ENABLE_FOOTNOTES | extra.ENABLE_STRIKETHROUGH | extra.ENABLE_TASKLISTS
    return pyromark.events_with_range, options


@dataclasses.dataclass(frozen=True)
class MarkdownSource(FileSource):
    """`markdown:GLOB` and `markdown:GLOB@LEVEL`."""

    level: int | None = None
    """headings down to this level begin a document; None: a file is a document"""

    def _pieces(self, file: files.DecompressingReader) -> Iterator[TextChunk]:
        return document_aligned_blocks(file, MarkdownRule(self.level), self.block_bytes)

    def _documents(self, piece: TextChunk) -> Iterator[Document | Skipped]:
        # In the middle of a file three hyphens are a ruler.
        metadata = _METADATA.match(piece.data) if piece.line == 1 and piece.begins else None
        skipped = metadata.end() if metadata else 0
        text = decode_utf8(piece, skipped, len(piece.data), piece.origin)
        if isinstance(text, Skipped):
            yield text
            if piece.begins and piece.ends:
                return
            text = ""
        documents = list(_split(text, self.level))
        line, counted, any_text = piece.line, 0, False
        for index, (begin, paragraphs) in enumerate(documents):
            line += piece.data.count(b"\n", counted, skipped + begin)
            counted = skipped + begin
            any_text = any_text or bool(paragraphs)
            begins, ends = piece.begins or index > 0, piece.ends or index < len(documents) - 1
            if paragraphs or not (begins and ends):
                origin = piece.path if begins and self.level is None else f"{piece.path}:{line}"
                glue = _glue(text) if paragraphs and not ends else ""
                yield Document(origin, "\n\n".join(paragraphs) + glue, begins=begins, ends=ends)
        if not any_text and piece.begins and piece.ends:
            yield Skipped("empty_document", piece.origin, "holds no text beside markup")


def _glue(text: str) -> str:
    """What stands between the text of this part and the next."""
    end = text[-_LONGEST_BREAK:]
    return "\n\n" if _BLANK_AT_END.search(end) else end[len(end.rstrip()) :]


def _split(text: str, level: int | None) -> Iterator[tuple[int, list[str]]]:
    """Place (in bytes) and paragraphs of the documents in a text; what stands before the first heading may be empty."""
    events, options = _parser()
    paragraphs = _Paragraphs()
    begin = 0
    for event, place in events(text, options=options):
        if level is not None and type(event) is dict and "Start" in event:
            kind = event["Start"]
            if type(kind) is dict and "Heading" in kind and int(kind["Heading"]["level"][1]) <= level:
                yield begin, paragraphs.take()
                begin = place["start"]
        paragraphs.add(event)
    yield begin, paragraphs.take()


class _Paragraphs:
    """Makes paragraphs of pyromark's events."""

    def __init__(self):
        self._done: list[str] = []
        self._current: list[str] = []
        self._hidden: list[str] = []
        """what is open of that which is left out with all it holds"""

    def take(self) -> list[str]:
        """The paragraphs since the last call."""
        self._close()
        done, self._done = self._done, []
        return done

    def add(self, event: str | dict) -> None:
        """Takes an event: a word, or a dict of one word and what belongs to it."""
        if type(event) is str:
            if event != "Rule" and not self._hidden:  # SoftBreak, HardBreak
                self._current.append("\n")
            return
        ((kind, value),) = event.items()
        if kind == "Text" or kind == "Code" or kind == "Html":
            if not self._hidden:
                self._current.append(value)
        elif kind == "Start":
            name = value if type(value) is str else next(iter(value))
            if name in _BLOCKS:
                self._close()
            if name == "Image" or (name == "CodeBlock" and value[name] != "Indented"):
                self._hidden.append(name)
        elif kind == "End":
            self._end(value if type(value) is str else next(iter(value)))
        elif kind == "InlineHtml" and value.startswith(("<br", "<BR")):
            self._current.append("\n")

    def _end(self, name: str) -> None:
        if self._hidden and self._hidden[-1] == name:
            self._hidden.pop()
        elif name == "HtmlBlock":
            self._current = [html.unescape(_HTML.sub("", "".join(self._current)))]
        elif name == "TableCell":
            self._current.append(" ")
        elif name == "TableHead" or name == "TableRow":
            self._current[-1:] = ["\n"]
        if name in _BLOCKS:
            self._close()

    def _close(self) -> None:
        if self._current:
            text = "".join(self._current).strip()
            if text:
                self._done.append(text)
            self._current = []
