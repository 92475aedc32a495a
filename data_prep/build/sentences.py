"""Splits cleaned text into sentences."""

import re
import string

import sentencex

_ENUMERATOR = re.compile(r"([⁃•‣*-]?)(\d{1,3}|[a-z])([.)]{1,2}) +(?=\S)")


def split_paragraphs(text: str) -> list[str]:
    """Paragraphs of a cleaned text, which blank lines separate; none is empty."""
    return [paragraph for piece in text.split("\n\n") if (paragraph := piece.strip("\n"))]


def split_sentences(paragraph: str, language: str = "en") -> list[str]:
    """Sentences of a paragraph; a single line end counts as a space, as in wrapped text.

    Uses `sentencex`, and corrects one case: it treats the numbers of a list within a paragraph ("1. The first item
    2. The second") as sentences.

    Args:
      paragraph: a part of the output of `clean`, without blank lines.
      language: ISO 639 code; `sentencex` falls back to a related language.

    Returns:
      the sentences without surrounding space; none is empty.
    """
    paragraph = paragraph.replace("\n", " ")
    if first := _ENUMERATOR.match(paragraph):
        return [sentence for item in _items(paragraph, first) for sentence in _item_sentences(item, language)]
    return _segment(paragraph, language)


def split_lines(text: str) -> list[str]:
    """Sentences of a text with one sentence per line; blank lines are skipped."""
    return [line for line in text.split("\n") if line]


def _segment(text: str, language: str) -> list[str]:
    return [sentence for piece in sentencex.segment(language, text) if (sentence := piece.strip())]


def _items(paragraph: str, first: re.Match[str]) -> list[str]:
    """Splits a paragraph that begins with "1." before "2.", "3." and so on, as long as the numbers are consecutive."""
    bullet, label, close = first.groups()
    items, begin = [], 0
    while label := _successor(label):
        end = paragraph.find(f" {bullet}{label}{close} ", begin)
        if end < 0:
            break
        items.append(paragraph[begin:end])
        begin = end + 1
    return [*items, paragraph[begin:]]


def _successor(label: str) -> str | None:
    if label.isdigit():
        return str(int(label) + 1)
    return None if label == "z" else string.ascii_lowercase[string.ascii_lowercase.index(label) + 1]


def _item_sentences(item: str, language: str) -> list[str]:
    enumerator = _ENUMERATOR.match(item)
    if enumerator is None:
        return _segment(item, language)
    sentences = _segment(item[enumerator.end() :], language)
    return [enumerator[0] + sentences[0], *sentences[1:]]
