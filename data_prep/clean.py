"""Cleans text: makes texts that look the same equal, and removes nothing that is visible."""

import dataclasses
import functools
import re
import unicodedata

import numpy as np

from bert_jax.numba_cache import cached_njit
from bert_jax.tokenizers.cleaning import INVISIBLE

NORMALIZATIONS = ("nfc", "nfkc", "none")

# Control, format and surrogate characters without text: C0 and C1 controls except tab, line feed and
# carriage return; soft hyphen; zero-width space; directional marks; byte order mark; U+FFFD, which decoding
# errors leave. Zero-width joiners are kept: Persian, Indic scripts and emoji need them.
_INVISIBLE = re.compile(INVISIBLE)
_SURROGATES = re.compile("[\ud800-\udfff]")
LINE_ENDS = "\r\x0b\x0c\x85\u2028\u2029"  # besides line feed
_OTHER_SPACES = re.compile(r"[^\S\n ]")

# Cleaning steps that a character, or a run of characters, may require.
_CONTROL, _LINE_END, _OTHER_SPACE, _NOT_NORMAL, _RUN = 1, 2, 4, 8, 16
_TABLE_SIZE = 0x30000
"""No character above these planes is a space, invisible or changed by normalisation."""
_SPACE, _NEWLINE, _RETURN = 0x20, 0x0A, 0x0D


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
    table = _table(form)
    codes = _codes(text)
    steps = _scan(codes, table)
    if steps & _LINE_END:
        codes = _with_newlines(codes, table)
        steps |= _RUN
    if steps & _CONTROL:
        # Lone surrogates, which UTF-8 cannot represent, are always removed.
        if cleaning.control_characters:
            kept = _without(codes, table, _CONTROL)
        else:
            kept = _codes(_SURROGATES.sub("", _text(codes)))
        counts.control_characters += len(codes) - len(kept)
        codes = kept
        steps |= _NOT_NORMAL | _RUN  # their neighbours are adjacent now
    if steps & _NOT_NORMAL and form != "NONE" and not unicodedata.is_normalized(form, text := _text(codes)):
        codes = _codes(unicodedata.normalize(form, text))
        counts.normalized_documents += 1
        steps |= _OTHER_SPACE | _RUN  # NFKC turns other characters into spaces
    if cleaning.whitespace:
        codes = _stripped(codes, table)
        if steps & (_OTHER_SPACE | _RUN):
            squeezed = _squeeze(codes, table)
            counts.whitespace_characters += len(codes) - len(squeezed)
            codes = squeezed
    return _text(codes)


def _codes(text: str) -> np.ndarray:
    """Code points: uint8 for ASCII, which takes a quarter of the memory, otherwise uint32."""
    if text.isascii():
        return np.frombuffer(text.encode(), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _text(codes: np.ndarray) -> str:
    if codes.dtype == np.uint8:
        return codes.tobytes().decode("ascii")
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


@functools.cache
def _table(form: str) -> np.ndarray:
    """For each code point, the steps it may require, uint8 [_TABLE_SIZE]; `form` is NFC, NFKC or NONE."""
    table = np.zeros(_TABLE_SIZE, np.uint8)
    characters = "".join(map(chr, range(_TABLE_SIZE)))
    line_ends = re.compile(f"[{LINE_ENDS}]")
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


@cached_njit
def _scan(codes: np.ndarray, table: np.ndarray) -> int:
    """Which steps a text may require; may include steps that are not needed, never omits one that is."""
    run, uncommon = False, False
    for i in range(len(codes)):  # without branches, so that the compiler computes several characters at once
        code = codes[i]
        before = codes[i - 1] if i else _NEWLINE
        before_that = codes[i - 2] if i > 1 else _NEWLINE
        space, newline = before == _SPACE, before == _NEWLINE
        blank_line = newline & (before_that == _NEWLINE)
        run |= (code == _SPACE) & (space | newline) | (code == _NEWLINE) & (space | blank_line)
        uncommon |= (code < _SPACE) & (code != _NEWLINE) | (code > 0x7E)
    steps = _RUN if run else 0
    if uncommon:
        for code in codes:
            if code < _TABLE_SIZE:
                steps |= table[code]
    return steps


@cached_njit
def _with_newlines(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Makes every line end U+000A; CR LF is one."""
    kept = np.empty_like(codes)
    size = 0
    for i in range(len(codes)):
        code = codes[i]
        if code < _TABLE_SIZE and table[code] & _LINE_END:
            if code == _RETURN and i + 1 < len(codes) and codes[i + 1] == _NEWLINE:
                continue
            code = _NEWLINE
        kept[size] = code
        size += 1
    return kept[:size]


@cached_njit
def _stripped(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Without white space at both ends."""
    begin, end = 0, len(codes)
    while begin < end and _is_space(codes[begin], table):
        begin += 1
    while begin < end and _is_space(codes[end - 1], table):
        end -= 1
    return codes[begin:end]


@cached_njit
def _is_space(code: int, table: np.ndarray) -> bool:
    return code in (_SPACE, _NEWLINE) or (code < _TABLE_SIZE and table[code] & _OTHER_SPACE != 0)


@cached_njit
def _without(codes: np.ndarray, table: np.ndarray, step: int) -> np.ndarray:
    """Removes the characters that require a step."""
    kept = np.empty_like(codes)
    size = 0
    for code in codes:
        if code >= _TABLE_SIZE or not table[code] & step:
            kept[size] = code
            size += 1
    return kept[:size]


@cached_njit
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
