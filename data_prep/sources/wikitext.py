"""Wikitext as plain text, in time linear in its length.

No library is used. Those that keep the markup in a tree are slow and leave more behind than they should: on a
typical article mwparserfromhell 0.7 does 1.6 MB/s and leaves captions, categories and tables; it takes seconds for
16 kB of unclosed templates, and tens of GB for some old pages (its issues 364 and 286). wikitextparser does 2.2 MB/s
and is under the GPL. What is wanted here is to leave most of it out; for that a stack is enough, at 17 MB/s.

Left out: templates, tables, references, formulas, galleries, files, categories, links to other languages, comments,
tags (what stands between them stays, unless it belongs to the above), and headings with nothing under them. Items
of lists are paragraphs of their own.
"""

import html
import re
from collections.abc import Iterator

# Up to their end tag nothing is markup.
_RAW_TAGS = frozenset(
    [
        *("ref", "references", "math", "chem", "ce", "gallery", "timeline", "syntaxhighlight", "source", "score"),
        *("imagemap", "graph", "hiero", "templatedata", "mapframe", "maplink", "inputbox", "categorytree"),
        *("templatestyles", "indicator", "includeonly", "nowiki", "pre"),
    ]
)
_SHOWN_RAW_TAGS = frozenset({"nowiki", "pre"})
_LINE_BREAKS = frozenset({"br", "p", "div", "li", "tr", "blockquote", "center", "hr"})
_END_TAGS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in _RAW_TAGS}

_MARKUP = re.compile(
    r"<!--"
    r"|\{\{|\}\}"
    r"|\n[ :*#;]*+\{\|"  # a table, maybe indented
    r"|\n[ \t]*+\|\}(?!\})"
    r"|<(/?)([A-Za-z][A-Za-z0-9]*+)([^<>]*+)>"
)
_SIMPLE_LINK = re.compile(r"\[\[(?:[^\[\]\n|:]++\|)?+([^\[\]\n|:]++)\]\]")  # what follows the last bar is shown
_LINK = re.compile(r"\[\[|\]\]")
_MOST_LINKS = 8
"""How deep links may lie in each other, so that time stays linear; one in the caption of a file makes 2."""

_HIDDEN = frozenset({"file", "image", "media", "category"})
_MEDIA = re.compile(
    r"[^:|]+:.*\.(?:jpe?g|png|gif|svg|tiff?|webp|og[gva]|webm|mp3|wav|flac|midi?|pdf|djvu|stl)\s*\Z", re.IGNORECASE
)
_LANGUAGE = re.compile(r"(?!doi|hdl)[a-z]{2,3}(?:-[a-z]+)*\Z|simple\Z")
_EXTERNAL = re.compile(r"\[(?:https?:|ftp:|mailto:|irc:|news:|//)[^\s\[\]]*+[ \t]*+([^\[\]\n]*+)\]")
_REMAINS = re.compile(r"__[A-Z]+__|\{\{|\}\}")
_QUOTES = re.compile(r"'{2,}")
_QUOTED_LINE = re.compile(r"^.*?''.*$", re.MULTILINE)
_HEADING = re.compile(r"(={1,6})(.+)\1\Z")
_ITEM = re.compile(r"[*#:;]+")
_EMPTY_BRACKETS = re.compile(r" ?\([ \t,;:\u00a0\u2013-]*+\)")
_SPACES_BEFORE = re.compile(r"(?<![ \n])  *+([,.)])(?!\S)")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_PROTECTED = str.maketrans({mark: f"&#{ord(mark)};" for mark in "&'[]{}|<>=*#:;_-()"})


def plain_text(text: str, hidden: frozenset[str] = frozenset()) -> str:
    """The text of a page as a reader sees it, paragraphs divided by blank lines.

    Args:
      text: wikitext.
      hidden: names of the namespaces of files and categories in the language of the wiki; the English ones
        are known.
    """
    text = _without_brackets_and_tags("\n" + text.replace("\r", ""))
    text = _with_links_resolved(text, _HIDDEN | {name.lower() for name in hidden})
    text = _QUOTED_LINE.sub(_without_quotes, _REMAINS.sub("", _EXTERNAL.sub(r"\1", text)))
    text = _SPACES_BEFORE.sub(r"\1", _EMPTY_BRACKETS.sub("", text))
    text = "\n\n".join(_with_something_below(_blocks(text)))
    return _ENTITY.sub(lambda found: html.unescape(found[0]), text)  # last: what they stand for is no markup


class _Output:
    """What was put out so far, and what is open at this place."""

    def __init__(self):
        self.parts: list[str] = []
        self._stack: list[tuple[str, int]] = []  # what was opened, and how many parts there were before it
        self._counts: dict[str, int] = {}

    def open(self, kind: str, mark: str) -> None:
        """Something begins; `mark` stays if it never ends."""
        self._stack.append((kind, len(self.parts)))
        self._counts[kind] = self.count(kind) + 1
        self.parts.append(mark)

    def count(self, kind: str) -> int:
        """How many of a kind are open."""
        return self._counts.get(kind, 0)

    def close(self, kind: str) -> list[str]:
        """Takes back what was put out since the last of a kind was opened, with all that was opened in it."""
        while True:
            last, length = self._stack.pop()
            self._counts[last] -= 1
            if last == kind:
                inside = self.parts[length + 1 :]
                del self.parts[length:]
                return inside


def _without_brackets_and_tags(text: str) -> str:
    output, place = _Output(), 0
    unclosed: set[str] = set()  # tags of which no end tag follows
    while found := _MARKUP.search(text, place):
        output.parts.append(text[place : found.start()])
        place = found.end()
        mark = found[0].strip()
        if mark == "{{":
            output.open("}}", mark)
        elif mark == "<!--":
            end = text.find("-->", place)
            place = end + 3 if end >= 0 else len(text)
        elif found[2]:
            place = _tag(found, text, output, unclosed)
        elif mark.endswith("{|"):
            output.parts.append("\n")
            output.open("|}", "")
        elif output.count(mark):
            output.close(mark)
        else:
            output.parts.append(found[0])
    output.parts.append(text[place:])
    return "".join(output.parts)


def _tag(found: re.Match, text: str, output: _Output, unclosed: set[str]) -> int:
    """Leaves out a tag; returns where to read on."""
    name, place = found[2].lower(), found.end()
    begins = not found[1] and not found[3].endswith("/")
    if name in _RAW_TAGS and begins and name not in unclosed:
        if end := _END_TAGS[name].search(text, place):
            if name in _SHOWN_RAW_TAGS:
                output.parts.append(text[place : end.start()].translate(_PROTECTED))
            return end.end()
        unclosed.add(name)
    elif name == "table" and begins:
        output.open("</table>", "")
    elif name == "table" and output.count("</table>"):
        output.close("</table>")
    elif name in _LINE_BREAKS:
        output.parts.append("\n")
    return place


def _with_links_resolved(text: str, hidden: frozenset[str]) -> str:
    text = _SIMPLE_LINK.sub(r"\1", text)
    output, place = _Output(), 0
    while found := _LINK.search(text, place):
        output.parts.append(text[place : found.start()])
        place = found.end()
        if found[0] == "[[" and output.count("]]") < _MOST_LINKS:
            output.open("]]", "[[")
        elif found[0] == "]]" and output.count("]]"):
            output.parts.append(_link("".join(output.close("]]")), hidden))
        else:
            output.parts.append(found[0])
    output.parts.append(text[place:])
    return "".join(output.parts)


def _link(inside: str, hidden: frozenset[str]) -> str:
    """What is shown of `[[inside]]`."""
    target, bar, shown = inside.partition("|")
    if "\n" in target:
        return f"[[{inside}]]"
    prefix, colon, _ = target.partition(":")
    prefix = prefix.strip()
    if colon and (prefix.lower() in hidden or _MEDIA.match(target) or _LANGUAGE.match(prefix)):
        return ""
    return shown if bar else target.strip().removeprefix(":")


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Headings with their level, and paragraphs with a level deeper than any."""
    paragraph: list[str] = []
    for line in text.split("\n"):
        line = line.strip()
        heading = _HEADING.match(line) if line.startswith("=") else None
        item = _ITEM.match(line)
        shown = heading[2].strip() if heading else line[item.end() :].strip() if item else line
        is_markup = line.startswith("|") or not line.strip("-")
        if paragraph and (heading or item or is_markup or not shown):
            yield 7, "\n".join(paragraph)
            paragraph = []
        if is_markup or not shown:
            continue
        if heading:
            yield len(heading[1]), shown
        elif item:
            yield 7, shown
        else:
            paragraph.append(shown)
    if paragraph:
        yield 7, "\n".join(paragraph)


def _with_something_below(blocks: Iterator[tuple[int, str]]) -> list[str]:
    """All paragraphs, and those headings that have text or a kept deeper heading next."""
    kept: list[str] = []
    next_level = 0
    for level, text in reversed(list(blocks)):
        if level == 7 or next_level > level:
            kept.append(text)
            next_level = level
    return kept[::-1]


def _without_quotes(found: re.Match) -> str:
    """Leaves out '' (italics), ''' (bold) and ''''' (both), but not an apostrophe beside them, as in L'''amour''.

    Where both are odd in number, MediaWiki takes the first three after a letter for an apostrophe and italics.
    """
    line = found[0]
    if "'''" in line:
        runs = list(_QUOTES.finditer(line))
        lengths = [len(run[0]) for run in runs]
        if sum(length in (3, 5) for length in lengths) % 2 and sum(length in (2, 5) for length in lengths) % 2:
            for run, length in zip(runs, lengths, strict=True):
                if length == 3 and run.start() and line[run.start() - 1] != " ":
                    line = f"{line[: run.start()]}\0{line[run.end() :]}"
                    break
    return _QUOTES.sub("", line).replace("\0", "'")
