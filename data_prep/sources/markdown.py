"""`markdown:GLOB`: converts Markdown to plain text, paragraph by paragraph.

Kept: headings (as separate paragraphs), list items, quotations, the text of links, inline code, footnotes, rows of
tables (one line each), and indented blocks, which in books are verse and letters more often than code. Removed: fenced
code, images, HTML tags and comments, the names of footnotes, rulers, and metadata at the start of a file.

The parser is pyromark (Rust's pulldown-cmark), the only one with Python bindings that yields events, at more than
200 MB/s; markdown-it-py and mistune reach about 10.
"""

import dataclasses
import functools
import html
import re
from collections.abc import Iterator
from typing import Any

from bert_jax.errors import UserError
from data_prep.sources.base import Document, Skipped, Source, import_optional
from data_prep.sources.text_chunks import BoundaryRule, TextChunk
from data_prep.sources.text_files import FileSource, decode

# Documents must not be split inside these, even at blank lines.
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

# A paragraph begins and ends with each of these.
_BLOCKS = frozenset(
    ["Paragraph", "Heading", "BlockQuote", "List", "Item", "FootnoteDefinition", "CodeBlock", "HtmlBlock", "Table"]
)
_LONGEST_BREAK = 100


class _MarkdownRule(BoundaryRule):
    """A file is a document, or a heading begins a document."""

    def __init__(self, level: int | None):
        """With `level`, headings up to that level begin a document."""
        self._heading = level and re.compile(rb"(?s:.*\n)(?= {0,3}#{1,%d}[ \t\r\n])" % level)

    def last_document_end(self, window: bytes, stop: int, line_start: bool) -> int:
        """Before the last heading."""
        return _last(self._heading, window, stop) if self._heading else 0

    def last_paragraph_end(self, window: bytes, stop: int) -> int:
        """After the last blank line before text that is not indented."""
        return _last(_LAST_PARAGRAPH_END, window, stop)


def _last(pattern: re.Pattern, window: bytes, stop: int) -> int:
    """End of the last match of a pattern that does not end inside fenced code or HTML."""
    spans = []
    if any(mark in window for mark in _SOLID_MARKS):
        spans = [match.span() for match in _SOLID.finditer(window, 0, stop)]
    while match := pattern.match(window, 0, stop):
        while spans and spans[-1][0] >= match.end():
            spans.pop()
        if not spans or match.end() >= spans[-1][1]:
            return match.end()
        stop = spans[-1][0] + 1  # so that a match that begins there is found
    return 0


@functools.cache
def _parser() -> tuple[Any, Any]:
    """pyromark's function for events with their places, and the options for extensions of CommonMark."""
    pyromark = import_optional("pyromark", "reading Markdown")
    extra = pyromark.Options
    options = extra.ENABLE_TABLES | extra.ENABLE_FOOTNOTES | extra.ENABLE_STRIKETHROUGH | extra.ENABLE_TASKLISTS
    return pyromark.events_with_range, options


@dataclasses.dataclass(frozen=True)
class MarkdownSource(FileSource):
    """`markdown:GLOB` and `markdown:GLOB@LEVEL`."""

    level: int | None = None
    """headings up to this level begin a document; None: a file is a document"""

    @classmethod
    def from_spec(cls, spec: str, argument: str, workers: int) -> Source:
        """`markdown:GLOB` or `markdown:GLOB@LEVEL`; a path may contain an @."""
        pattern, at, level = argument.rpartition("@")
        if not at or "/" in level or "." in level:
            return super().from_spec(spec, argument, workers)
        if level not in tuple("123456"):
            example = "give the level of a heading, 1 to 6, e.g. `markdown:*.md@2`"
            raise UserError(f"source {spec}: after the @, {example}")
        return dataclasses.replace(super().from_spec(spec, pattern, workers), level=int(level))

    @property
    def rule(self) -> BoundaryRule:
        """Headings end documents."""
        return _MarkdownRule(self.level)

    def _documents(self, chunk: TextChunk) -> Iterator[Document | Skipped]:
        # In the middle of a file, three hyphens are a ruler.
        metadata = _METADATA.match(chunk.data) if chunk.line == 1 and chunk.begins else None
        skipped = metadata.end() if metadata else 0
        text, lost = decode(chunk, skipped, len(chunk.data), chunk.origin)
        yield from lost
        if text is None:
            if chunk.begins and chunk.ends:
                return
            text = ""
        documents = list(_split(text, self.level))
        line, counted, any_text = chunk.line, 0, False
        for index, (begin, paragraphs) in enumerate(documents):
            line += chunk.data.count(b"\n", counted, skipped + begin)
            counted = skipped + begin
            any_text = any_text or bool(paragraphs)
            begins, ends = chunk.begins or index > 0, chunk.ends or index < len(documents) - 1
            if paragraphs or not (begins and ends):
                origin = chunk.path if begins and self.level is None else f"{chunk.path}:{line}"
                separator = _separator(text) if paragraphs and not ends else ""
                yield Document(origin, "\n\n".join(paragraphs) + separator, begins=begins, ends=ends)
        if not any_text and chunk.begins and chunk.ends:
            yield Skipped("empty_document", chunk.origin, "contains no text besides markup")


def _separator(text: str) -> str:
    """The separator between the text of this part and the next."""
    end = text[-_LONGEST_BREAK:]
    return "\n\n" if _BLANK_AT_END.search(end) else end[len(end.rstrip()) :]


def _split(text: str, level: int | None) -> Iterator[tuple[int, list[str]]]:
    """Place (in bytes) and paragraphs of the documents in a text; the one before the first heading may be empty."""
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
    """Builds paragraphs from pyromark's events."""

    def __init__(self):
        self._done: list[str] = []
        self._current: list[str] = []
        self._hidden: list[str] = []
        """open elements whose content is removed"""

    def take(self) -> list[str]:
        """The paragraphs since the last call."""
        self._close()
        done, self._done = self._done, []
        return done

    def add(self, event: str | dict) -> None:
        """Adds an event: a name, or a dict with one name and its value."""
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
