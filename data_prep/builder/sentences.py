"""Splits cleaned text into sentences."""

import bisect
import itertools
import re
import string
from collections.abc import Iterator

import sentencex

_ENUMERATOR = re.compile(r"([⁃•‣*-]?)(\d{1,3}|[a-z])([.)]{1,2}) +(?=\S)")
_PARAGRAPH_END = "\n\n"
"""`sentencex` never looks beyond it, and returns it as a piece of its own."""

LONG_CHARACTERS = 1 << 14
"""Longer paragraphs are split in windows, because the time of `sentencex` grows with the square of their length."""
WINDOW = 1 << 11
"""Characters of a window."""
_BATCH_BYTES = 10_000
"""Bytes of paragraphs per call; in longer texts, `sentencex` omits the ends of some paragraphs."""
_CONTEXT = 128
"""What follows the end of a sentence by more characters has no effect on it, except the end of a quotation."""
# Letters of Thai, Lao, Burmese and Khmer, which have spaces between clauses and sentences, not between words. Digits
# and the marks of repetition and abbreviation are left out: spaces beside them are within a clause.
_UNSPACED = "[ก-ฮะ-ๅ็-์ກ-ຮະ-ໄ່-ໍໜໝက-ဿ၊-႟ក-៓]"
_UNSPACED_LETTER = re.compile(_UNSPACED)
_SENTENCE_END = re.compile("(?<=[។៕။])(?! *[។៕။])")
_CLAUSE_END = re.compile(f"(?<={_UNSPACED}) +(?={_UNSPACED})")
UNSPLIT_CHARACTERS, CLAUSE_CHARACTERS = 200, 40
"""Longer sentences in these scripts are split at spaces, into parts of at least so many characters except the last. 40
characters of Thai are about 10 words."""
# `sentencex` does not split quotations and text in brackets.
_PAIRS = ["“”", "‘’", "«»", "„“", "‹›", "「」", "《》", "()", "[]"]


def split_paragraphs(text: str) -> list[str]:
    """Paragraphs of a cleaned text, which blank lines separate; none is empty."""
    return [paragraph for piece in text.split(_PARAGRAPH_END) if (paragraph := piece.strip("\n"))]


def split_sentences(paragraphs: list[str], language: str = "en") -> list[list[str]]:
    """Sentences of paragraphs; a single line end counts as a space, as in wrapped text.

    Uses `sentencex`, once for all paragraphs, and corrects one case: it treats the numbers of a list within a paragraph
    ("1. The first item 2. The second") as sentences.

    Args:
      paragraphs: parts of the output of `clean`, without blank lines.
      language: ISO 639 code; `sentencex` falls back to a related language.

    Returns:
      the sentences of each paragraph, without surrounding space; none is empty. `sentencex` finds few ends in Thai,
      Lao, Burmese and Khmer: its sentences are split after their marks and, if they are long, at spaces. In a paragraph
      longer than LONG_CHARACTERS, a quotation or bracket of more than WINDOW / 2 characters may be split like other
      text.
    """
    if "\n" in "".join(paragraphs):  # one search is faster than one in each paragraph
        paragraphs = [paragraph.replace("\n", " ") for paragraph in paragraphs]
    sentences = _segment(paragraphs, language)
    for i, paragraph in enumerate(paragraphs):
        if first := _ENUMERATOR.match(paragraph):
            sentences[i] = _list_sentences(_items(paragraph, first), language)
        if not paragraph.isascii() and _UNSPACED_LETTER.search(paragraph):
            parts = (part.strip() for sentence in sentences[i] for part in _SENTENCE_END.split(sentence))
            sentences[i] = [clause for part in parts if part for clause in _clauses(part)]
    return sentences


def _clauses(sentence: str) -> Iterator[str]:
    """Parts of a sentence in a script without spaces between words."""
    begin = 0
    for match in _CLAUSE_END.finditer(sentence) if len(sentence) > UNSPLIT_CHARACTERS else ():
        if match.start() - begin >= CLAUSE_CHARACTERS:
            yield sentence[begin : match.start()]
            begin = match.end()
    yield sentence[begin:]


def split_lines(text: str) -> list[str]:
    """Sentences of a text with one sentence per line; blank lines are skipped."""
    return [line for line in text.split("\n") if line]


def _segment(paragraphs: list[str], language: str) -> list[list[str]]:
    """Sentences of paragraphs without line ends."""
    pieces = _pieces(_PARAGRAPH_END.join(paragraphs).encode(), language)
    stripped = list(map(str.strip, pieces))
    sentences, begin = [], 0
    for _ in paragraphs:
        end = pieces.index(_PARAGRAPH_END, begin)
        sentences.append([sentence for sentence in stripped[begin:end] if sentence])
        begin = end + 1
    return sentences


def _pieces(text: bytes, language: str) -> list[str]:
    """The pieces of paragraphs, each with one of _PARAGRAPH_END after them."""
    pieces, begin, mark = [], 0, _PARAGRAPH_END.encode()
    while begin <= len(text):
        end = len(text)
        if end - begin > _BATCH_BYTES:
            ends = text.rfind(mark, begin, begin + _BATCH_BYTES), text.find(mark, begin), end
            end = next(end for end in ends if end >= 0)
        batch = text[begin:end].decode()
        pieces += sentencex.segment(language, batch) if len(batch) <= LONG_CHARACTERS else _long_pieces(batch, language)
        pieces.append(_PARAGRAPH_END)
        begin = end + len(mark)
    return pieces


def _long_pieces(text: str, language: str) -> Iterator[str]:
    """The pieces of a paragraph that is longer than WINDOW, in time linear in its length."""
    begin, unfinished = 0, ""
    while len(text) - begin > WINDOW:
        window = text[begin : begin + WINDOW]
        pieces = sentencex.segment(language, window)
        count, cut = _last_safe_end(window, pieces)
        if count:
            yield unfinished + pieces[0]
            yield from pieces[1:count]
            unfinished = ""
        else:
            cut = window.rfind(" ", WINDOW // 2, WINDOW - _CONTEXT) + 1 or WINDOW - _CONTEXT
            unfinished += window[:cut]
        begin += cut
    first, *others = sentencex.segment(language, text[begin:])
    yield unfinished + first
    yield from others


def _last_safe_end(window: str, pieces: list[str]) -> tuple[int, int]:
    """Where to end a window: the number of pieces and of characters before it.

    This is the last end of a sentence in the second half that is outside of quotations and brackets, also of those that
    end after the window; if there is none, the last end of a sentence; (0, 0) if there is none.
    """
    ends = list(itertools.accumulate(map(len, pieces)))
    count = bisect.bisect_right(ends, WINDOW - _CONTEXT)
    for i in range(count, 0, -1):
        end = ends[i - 1]
        if end < WINDOW // 2:
            break
        # After other characters, the next piece may continue a word.
        if (window[end - 1] == " " or not window[end - 1].isascii()) and not _is_open(window, end):
            return i, end
    return (count, ends[count - 1]) if count else (0, 0)


def _is_open(window: str, end: int) -> bool:
    """Whether a quotation or bracket of the window begins before a place, and does not end before it."""
    if window.count('"', 0, end) % 2:
        return True
    return any(window.rfind(begins, 0, end) > window.rfind(ends, 0, end) for begins, ends in _PAIRS)


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


def _list_sentences(items: list[str], language: str) -> list[str]:
    """Sentences of the items of a list, each of which begins with its number."""
    enumerators = [match[0] if (match := _ENUMERATOR.match(item)) else "" for item in items]
    rests = [item[len(enumerator) :] for item, enumerator in zip(items, enumerators, strict=True)]
    sentences = []
    for enumerator, (first, *others) in zip(enumerators, _segment(rests, language), strict=True):
        sentences += [enumerator + first, *others]
    return sentences
