"""Converts wikitext to plain text, in time linear in its length.

No library is used. Those that build a syntax tree are slow and keep too much: on a typical article mwparserfromhell
0.7 reaches 1.6 MB/s and keeps captions, categories and tables; it takes seconds for 16 kB of unclosed templates, and
tens of GB for some old pages (its issues 364 and 286). wikitextparser reaches 2.2 MB/s and has the GPL as its licence.
To remove most of the markup a stack is enough, at 17 MB/s.

Templates within sentences show text (`mediawiki_templates`). Removed: other templates, tables, references, formulas,
galleries, files, categories, links to other languages, comments, tags (their content is kept, unless it belongs to the
above), headings without text below them, and sections of references and links (_APPENDICES). List items are separate
paragraphs. Of text in several scripts (`-{zh-hans:..;zh-hant:..}-`) the first is shown.
"""

import html
import re
from collections.abc import Iterator

from data_prep.sources.mediawiki_templates import may_show_text, shown_text, superscript

# Up to the end tag, nothing is markup.
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
_MAX_LINK_DEPTH = 8
"""Maximum nesting of links, which keeps time linear; a link in the caption of a file has depth 2."""

_NOTHING = "\0"
"""Takes the place of a removed template, raw tag or link: marks for bold and italics around it remain apart, and
`_without_marks` finds the punctuation around it."""
_MAX_TEMPLATE_DEPTH = 8
"""Templates that are nested deeper show nothing, which keeps time linear."""
_PARAMETER = re.compile(r"\{\{\{[^{}|]*+\|?([^{}]*+)\}\}\}")
_VARIANT = re.compile(r"-\{(?!\{)(?:([A-Z;-]{1,9})\|)?([^{}]*+)\}-(?!\})")
_VARIANT_TEXT = re.compile(r"\s*[a-z]{2,3}(?:-[a-z]+)*\s*:([^;]*)")
_SUPERSCRIPT = re.compile(r"<sup>([^<>]{1,20})</sup>", re.IGNORECASE)
# Sections without sentences, in the languages of which we are certain.
_APPENDICES = frozenset(
    [
        *(
            "see also",
            "references",
            "external links",
            "further reading",
            "notes",
            "footnotes",
            "bibliography",
            "sources",
        ),
        *("notes and references", "references and notes", "citations", "works cited"),
        *("siehe auch", "einzelnachweise", "weblinks", "literatur", "anmerkungen"),
        *("voir aussi", "notes et références", "liens externes", "bibliographie", "références"),
        *("véase también", "referencias", "enlaces externos", "bibliografía", "notas"),
        *("voci correlate", "collegamenti esterni", "bibliografia", "note", "zie ook", "externe links"),
        *("ver também", "referências", "ligações externas", "zobacz też", "przypisy", "linki zewnętrzne"),
        *(
            "см. также",
            "примечания",
            "ссылки",
            "литература",
            "参见",
            "参考文献",
            "外部链接",
            "関連項目",
            "脚注",
            "外部リンク",
        ),
    ]
)

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
_SEPARATORS = " ,;\u00a0"
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_PROTECTED = str.maketrans({mark: f"&#{ord(mark)};" for mark in "&'[]{}|<>=*#:;_-()"})


def plain_text(text: str, hidden_namespaces: frozenset[str] = frozenset()) -> str:
    """The text of a page as displayed, with blank lines between paragraphs.

    Args:
      text: wikitext.
      hidden_namespaces: names of the namespaces of files and categories in the language of the wiki; the English ones
        are known.
    """
    text = "\n" + text.replace("\r", "")
    if "{{{" in text:
        text = _PARAMETER.sub(r"\1", text)
    if "-{" in text:
        text = _VARIANT.sub(_first_variant, text)
    if "<sup>" in text:
        text = _SUPERSCRIPT.sub(lambda match: superscript(match[1]), text)
    hidden_namespaces = _HIDDEN | {name.lower() for name in hidden_namespaces}
    text = _with_links_resolved(_without_brackets_and_tags(text, hidden_namespaces), hidden_namespaces)
    text = _QUOTED_LINE.sub(_without_quotes, _REMAINS.sub("", _EXTERNAL.sub(r"\1", text)))
    text = _without_marks(text)
    while "  " in text:
        text = text.replace("  ", " ")
    text = "\n\n".join(_with_something_below(_without_appendices(_blocks(text))))
    return _ENTITY.sub(
        lambda match: html.unescape(match[0]), text
    )  # last, because the characters that they represent are not markup


class _Output:
    """The output so far, and the open elements."""

    def __init__(self):
        self.parts: list[str] = []
        self._stack: list[tuple[str, int]] = []  # open elements, and the number of parts before each
        self._counts: dict[str, int] = {}

    def open(self, kind: str, mark: str) -> None:
        """Opens an element; `mark` is kept as text if the element is never closed."""
        self._stack.append((kind, len(self.parts)))
        self._counts[kind] = self.count(kind) + 1
        self.parts.append(mark)

    def count(self, kind: str) -> int:
        """Number of open elements of a kind."""
        return self._counts.get(kind, 0)

    def close(self, kind: str) -> list[str]:
        """Closes the last open element of a kind and all elements in it; removes and returns their output."""
        while True:
            last, length = self._stack.pop()
            self._counts[last] -= 1
            if last == kind:
                inside = self.parts[length + 1 :]
                del self.parts[length:]
                return inside


def _without_brackets_and_tags(text: str, hidden: frozenset[str]) -> str:
    output, place = _Output(), 0
    unclosed: set[str] = set()  # tags without an end tag
    while match := _MARKUP.search(text, place):
        output.parts.append(text[place : match.start()])
        place = match.end()
        mark = match[0].strip()
        if mark == "{{":
            output.open("}}", mark)
        elif mark == "<!--":
            end = text.find("-->", place)
            place = end + 3 if end >= 0 else len(text)
        elif match[2]:
            place = _tag(match, text, output, unclosed)
        elif mark.endswith("{|"):
            output.parts.append("\n")
            output.open("|}", "|")  # a line with a bar in front is not shown
        elif output.count(mark):
            inside = output.close(mark)
            if mark == "}}" and output.count(mark) < _MAX_TEMPLATE_DEPTH and inside:
                output.parts.append(_template(inside, hidden))
        else:
            output.parts.append(match[0])
    output.parts.append(text[place:])
    return "".join(output.parts)


def _template(parts: list[str], hidden: frozenset[str]) -> str:
    """What a template shows, from its output."""
    name = parts[0].partition("|")[0]
    if len(name) >= 40 or not may_show_text(name):
        return _NOTHING
    inside = "".join(parts).replace(_NOTHING, "")
    if "[[" in inside:  # the bars of links do not divide arguments
        inside = _with_links_resolved(inside, hidden)
    return shown_text(name, inside) or _NOTHING


def _first_variant(match: re.Match) -> str:
    """The text of `-{FLAGS|..}-`, of several variants the first."""
    flags, inside = match[1] or "", match[2]
    if set(flags) & set("HTND-"):  # conversion rules, titles, names of languages
        return ""
    variant = _VARIANT_TEXT.match(inside)
    return variant[1].strip() if variant else inside


def _tag(match: re.Match, text: str, output: _Output, unclosed: set[str]) -> int:
    """Removes a tag; returns the place to continue at."""
    name, place = match[2].lower(), match.end()
    begins = not match[1] and not match[3].endswith("/")
    if name in _RAW_TAGS and begins and name not in unclosed:
        if end := _END_TAGS[name].search(text, place):
            shown = name in _SHOWN_RAW_TAGS
            output.parts.append(text[place : end.start()].translate(_PROTECTED) if shown else _NOTHING)
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
    while match := _LINK.search(text, place):
        output.parts.append(text[place : match.start()])
        place = match.end()
        if match[0] == "[[" and output.count("]]") < _MAX_LINK_DEPTH:
            output.open("]]", "[[")
        elif match[0] == "]]" and output.count("]]"):
            output.parts.append(_link("".join(output.close("]]")), hidden))
        else:
            output.parts.append(match[0])
    output.parts.append(text[place:])
    return "".join(output.parts)


def _link(inside: str, hidden: frozenset[str]) -> str:
    """The displayed text of `[[inside]]`."""
    target, bar, shown = inside.partition("|")
    if "\n" in target:
        return f"[[{inside}]]"
    prefix, colon, _ = target.partition(":")
    prefix = prefix.strip()
    if colon and (prefix.lower() in hidden or _MEDIA.match(target) or _LANGUAGE.match(prefix)):
        return _NOTHING
    return shown if bar else target.strip().removeprefix(":")


def _without_marks(text: str) -> str:
    """Removes each _NOTHING with the punctuation that it leaves: in brackets, doubled, or after a space.

    `(; from X)` becomes `(from X)`, `X (, ) is` becomes `X is`, and `in , a town` becomes `in, a town`.
    """
    left, *others = text.split(_NOTHING)
    kept: list[str] = []
    for right in filter(None, others):
        before, after = left.rstrip(_SEPARATORS), right.lstrip(_SEPARATORS)
        if before.endswith("("):
            if after.startswith(")"):
                before, after = before[:-1].rstrip(" "), after[1:]
            left, right = before, after
        elif after.startswith(")"):
            left, right = before, after
        elif left.endswith("\n"):  # nothing is left of the beginning of a paragraph
            right = right.lstrip(" .,;")
        elif right.startswith(",") and (spaceless := left.rstrip(" ")).endswith(","):
            left = spaceless.removesuffix(",")
        elif left.endswith(" "):
            if right.startswith((",", ".", ";")):
                left = left.rstrip(" ")
            else:
                left, right = left.rstrip(" ") + " ", right.lstrip(" ")
        if right:
            kept.append(left)
            left = right
    return "".join([*kept, left])


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Headings with their level, and paragraphs with level 7."""
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


def _without_appendices(blocks: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The blocks without sections of references and links, up to the next heading of the same or a higher level."""
    dropped = 0
    for level, text in blocks:
        if level < 7 and (not dropped or level <= dropped):
            dropped = level if text.strip("' ").casefold() in _APPENDICES else 0
        if not dropped:
            yield level, text


def _with_something_below(blocks: Iterator[tuple[int, str]]) -> list[str]:
    """All paragraphs, and the headings that are followed by text or by a deeper heading that is kept."""
    kept: list[str] = []
    next_level = 0
    for level, text in reversed(list(blocks)):
        if level == 7 or next_level > level:
            kept.append(text)
            next_level = level
    return kept[::-1]


def _without_quotes(match: re.Match) -> str:
    """Removes '' (italics), ''' (bold) and ''''' (both), but not an adjacent apostrophe, as in L'''amour''.

    The rules are those of MediaWiki (`Parser::doQuotes`): of four, and of more than five, the first are apostrophes. If
    bold and italics are both odd in number, one bold mark is an apostrophe and italics: the first after a word of one
    letter, else after a longer word, else after a space.
    """
    line = match[0]
    if "'''" not in line:
        return line.replace("''", "")
    runs = [(run.start(), run.end() - run.start()) for run in _QUOTES.finditer(line)]
    kept = [length - 5 if length > 5 else int(length == 4) for _, length in runs]
    lengths = [length - apostrophes for (_, length), apostrophes in zip(runs, kept, strict=True)]
    if sum(length in (3, 5) for length in lengths) % 2 and sum(length in (2, 5) for length in lengths) % 2:
        bold = [i for i, length in enumerate(lengths) if length == 3]
        rank = [_before(line, runs[i][0] + kept[i], kept[i] > 0) for i in bold]
        if bold:
            kept[bold[rank.index(min(rank))]] += 1
    pieces, end = [], 0
    for (start, length), apostrophes in zip(runs, kept, strict=True):
        pieces += [line[end:start], "'" * apostrophes]
        end = start + length
    return "".join(pieces) + line[end:]


def _before(line: str, place: int, apostrophe: bool) -> int:
    """Rank of the text before a bold mark: 0 for a word of one letter, 1 for a longer word, 2 for a space."""
    before = line[max(0, place - 2) : place]
    if not before or before.endswith(" "):
        return 2
    return 0 if len(before) == 2 and before[0] == " " and not apostrophe else 1
