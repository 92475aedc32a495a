"""Cleans text: makes texts that look the same equal, and removes nothing that is visible."""

import dataclasses
import functools
import re
import unicodedata

import numba
import numpy as np

NORMALIZATIONS = ("nfc", "nfkc", "none")

# Control, format and surrogate characters without text: C0 and C1 controls except tab, line feed and
# carriage return; soft hyphen; zero-width space; directional marks; byte order mark; U+FFFD, which decoding
# errors leave. Zero-width joiners are kept: Persian, Indic scripts and emoji need them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffd\ud800-\udfff]"
)
_SURROGATES = re.compile("[\ud800-\udfff]")
_LINE_ENDS = "\r\x0b\x0c\x85\u2028\u2029"  # besides line feed
_OTHER_SPACES = re.compile(r"[^\S\n ]")

# Cleaning steps that a character, or a run of characters, may require.
_CONTROL, _LINE_END, _OTHER_SPACE, _NOT_NORMAL, _RUN = 1, 2, 4, 8, 16
_TABLE_SIZE = 0x30000
"""No character above these planes is a space, invisible or changed by normalisation."""
_SPACE, _NEWLINE = 0x20, 0x0A


@dataclasses.dataclass(frozen=True)
class CleaningOptions:
    """Which cleaning steps are enabled.

    Attributes:
      normalization: "nfc", "nfkc" or "none". The default is NFC, because NFKC changes the text (x² becomes x2).
      control_characters: remove invisible characters; lone surrogates are always removed.
      whitespace: collapse runs of spaces and of blank lines, remove spaces at the ends of lines. Line ends
        always become "\\n": the steps after cleaning require it.
    """

    normalization: str = "nfc"
    control_characters: bool = True
    whitespace: bool = True


DEFAULT = CleaningOptions()


@dataclasses.dataclass
class CleaningCounts:
    """Counts of what each cleaning step changed."""

    control_characters: int = 0
    """characters removed"""
    normalized_documents: int = 0
    """documents, or parts of long documents, that normalisation changed"""
    whitespace_characters: int = 0
    """characters removed, except those at the ends of documents"""


def clean(text: str, cleaning: CleaningOptions = DEFAULT, counts: CleaningCounts | None = None) -> str:
    """Cleans a text; applying it twice has the same result as once.

    One pass over the text finds which steps are needed: real text is mostly clean, and the regular expressions alone
    would take longer than everything else in a build.

    Args:
      text: any text, surrogates included.
      cleaning: which steps are enabled.
      counts: to which the changes are added.
    """
    counts = CleaningCounts() if counts is None else counts
    form = cleaning.normalization.upper()
    steps = _scan(_codes(text), _table(form))
    if steps & _LINE_END:
        for line_end in ("\r\n", *_LINE_ENDS):  # much faster than a regular expression
            text = text.replace(line_end, "\n")
        steps |= _RUN
    if steps & _CONTROL:
        # Lone surrogates, which UTF-8 cannot represent, are always removed.
        if cleaning.control_characters:
            kept = _text(_without(_codes(text), _table(form), _CONTROL))
        else:
            kept = _SURROGATES.sub("", text)
        counts.control_characters += len(text) - len(kept)
        text = kept
        steps |= _NOT_NORMAL | _RUN  # their neighbours are adjacent now
    if steps & _NOT_NORMAL and form != "NONE" and not unicodedata.is_normalized(form, text):
        text = unicodedata.normalize(form, text)
        counts.normalized_documents += 1
        steps |= _OTHER_SPACE | _RUN  # NFKC turns other characters into spaces
    if cleaning.whitespace:
        text = text.strip()
        if steps & (_OTHER_SPACE | _RUN):
            squeezed = _text(_squeeze(_codes(text), _table(form)))
            counts.whitespace_characters += len(text) - len(squeezed)
            text = squeezed
    return text


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _text(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


@functools.cache
def _table(form: str) -> np.ndarray:
    """For each code point, the steps it may require, uint8 [_TABLE_SIZE]; `form` is NFC, NFKC or NONE."""
    table = np.zeros(_TABLE_SIZE, np.uint8)
    characters = "".join(map(chr, range(_TABLE_SIZE)))
    line_ends = re.compile(f"[{_LINE_ENDS}]")
    for step, pattern in ((_CONTROL, _INVISIBLE), (_LINE_END, line_ends), (_OTHER_SPACE, _OTHER_SPACES)):
        for match in pattern.finditer(characters):
            table[match.start() : match.end()] |= step
    if form == "NONE":
        return table
    for code, character in enumerate(characters):
        decomposition = unicodedata.decomposition(character)
        if decomposition and not unicodedata.is_normalized(form, character):
            table[code] |= _NOT_NORMAL
        if unicodedata.combining(character):  # combining marks may be in another order
            table[code] |= _NOT_NORMAL
        if decomposition and decomposition[0] != "<":  # the second of a pair may combine with the first
            table[[int(part, 16) for part in decomposition.split()[1:]]] |= _NOT_NORMAL
    table[0x1160:0x1200] |= _NOT_NORMAL  # vowels and finals of Hangul combine by rule, not by table
    return table


@numba.njit(cache=True, nogil=True)
def _scan(codes: np.ndarray, table: np.ndarray) -> int:
    """Which steps a text may require; may include steps that are not needed, never omits one that is."""
    steps, before, blank = 0, _NEWLINE, 0
    for code in codes:
        if code < _TABLE_SIZE:
            steps |= table[code]
        if code == _NEWLINE:
            blank = blank + 1 if before == _NEWLINE else 1
            if before == _SPACE or blank > 2:
                steps |= _RUN
        elif code == _SPACE and before in (_SPACE, _NEWLINE):
            steps |= _RUN
        before = code
    return steps


@numba.njit(cache=True, nogil=True)
def _without(codes: np.ndarray, table: np.ndarray, step: int) -> np.ndarray:
    """Removes the characters that require a step."""
    kept = np.empty_like(codes)
    size = 0
    for code in codes:
        if code >= _TABLE_SIZE or not table[code] & step:
            kept[size] = code
            size += 1
    return kept[:size]


@numba.njit(cache=True, nogil=True)
def _squeeze(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Makes every space U+0020 and single, removes spaces at line ends, keeps at most two line ends in a row."""
    kept = np.empty_like(codes)
    size, blank = 0, 0  # blank: line ends that end `kept`
    for code in codes:
        if code < _TABLE_SIZE and table[code] & _OTHER_SPACE:
            code = _SPACE
        if code == _NEWLINE:
            if size and kept[size - 1] == _SPACE:
                size -= 1
            if blank == 2:
                continue
            blank += 1
        elif code == _SPACE:
            if blank or (size and kept[size - 1] == _SPACE):
                continue
        else:
            blank = 0
        kept[size] = code
        size += 1
    return kept[:size]
