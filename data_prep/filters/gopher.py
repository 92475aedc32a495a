"""The rules of MassiveText, for Gopher (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1 and table A1).

A word is what white space separates, as in Dolma (Soldaini et al. 2024); datatrove counts punctuation marks as words of
their own. The thresholds are for English; languages without spaces between words need other ones.
"""

import dataclasses
import itertools
from typing import Annotated

import numpy as np

from bert_jax.field_validation import Count, Interval, check
from bert_jax.numba_cache import cached_njit
from data_prep.filters.rules import Threshold, Verdict, check_order, is_broken, repeated
from data_prep.word_hashes import hash64, hash_ngrams

_Length = Annotated[float, Interval("(0, 1e6]")]

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_ELLIPSES = ("...", "…")
_BULLETS = ("•", "-", "*")


@dataclasses.dataclass(frozen=True)
class GopherQuality:
    """Thresholds; None switches a rule off."""

    min_words: Count | None = 50
    max_words: Count | None = 100_000
    min_mean_word_length: _Length | None = 3.0
    """characters"""
    max_mean_word_length: _Length | None = 10.0
    max_hashes: Threshold | None = 0.1
    """# per word"""
    max_ellipses: Threshold | None = 0.1
    """... and … per word"""
    max_bullet_lines: Threshold | None = 0.9
    """share of the lines that begin with a bullet point, - or *"""
    max_ellipsis_lines: Threshold | None = 0.3
    """share of the lines that end with an ellipsis"""
    min_words_with_letters: Threshold | None = 0.8
    """share of the words with a letter"""
    min_stop_words: Annotated[int, Interval("[1, 8]")] | None = 2
    """different ones of STOP_WORDS; for documents in English only"""

    def __post_init__(self):
        check(self, "gopher_quality.")
        for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
            check_order(self, "gopher_quality", low, high)

    def judge(self, text: str, language: str) -> Verdict:
        """The verdict on a text that is not empty."""
        return Verdict(text, self._broken_rule(text, language))

    def _broken_rule(self, text: str, language: str) -> str | None:
        words, lines = text.split(), [line.strip() for line in text.split("\n") if line]
        number = len(words)
        mean_length = sum(map(len, words)) / number
        measures = (
            ("min_words", number),
            ("max_words", number),
            ("min_mean_word_length", mean_length),
            ("max_mean_word_length", mean_length),
            ("max_hashes", text.count("#") / number),
            ("max_ellipses", sum(map(text.count, _ELLIPSES)) / number),
            ("max_bullet_lines", sum(line.startswith(_BULLETS) for line in lines) / len(lines)),
            ("max_ellipsis_lines", sum(line.endswith(_ELLIPSES) for line in lines) / len(lines)),
        )
        for rule, value in measures:
            if is_broken(self, rule, value):
                return rule
        if self.min_words_with_letters is not None:
            with_letters = sum(word[0].isalpha() or any(map(str.isalpha, word)) for word in words)
            if with_letters / number < self.min_words_with_letters:
                return "min_words_with_letters"
        if language.partition("-")[0] == "en":
            different = STOP_WORDS.intersection(map(str.lower, set(words)))
            if is_broken(self, "min_stop_words", len(different)):
                return "min_stop_words"
        return None


@dataclasses.dataclass(frozen=True)
class GopherRepetition:
    """Thresholds, shares of the lines, paragraphs or characters of a document; None switches a rule off.

    The share of a most frequent n-gram is that of the characters in its occurrences, spaces between its words included;
    one that occurs once does not count. The share of repeated n-grams is that of the characters, without spaces, of
    n-grams that occurred before, each character once.
    """

    repeated_lines: Threshold | None = 0.30
    repeated_paragraphs: Threshold | None = 0.30
    repeated_line_characters: Threshold | None = 0.20
    repeated_paragraph_characters: Threshold | None = 0.20
    top_2_gram: Threshold | None = 0.20
    top_3_gram: Threshold | None = 0.18
    top_4_gram: Threshold | None = 0.16
    repeated_5_grams: Threshold | None = 0.15
    repeated_6_grams: Threshold | None = 0.14
    repeated_7_grams: Threshold | None = 0.13
    repeated_8_grams: Threshold | None = 0.12
    repeated_9_grams: Threshold | None = 0.11
    repeated_10_grams: Threshold | None = 0.10

    def __post_init__(self):
        check(self, "gopher_repetition.")

    def judge(self, text: str, _language: str) -> Verdict:
        """The verdict on a text that is not empty."""
        return Verdict(text, self._broken_rule(text))

    def _broken_rule(self, text: str) -> str | None:
        for unit, mark in (("line", "\n"), ("paragraph", "\n\n")):
            pieces = [piece for piece in text.split(mark) if piece]
            number, characters = repeated(pieces)
            for rule, share in (
                (f"repeated_{unit}s", number / len(pieces)),
                (f"repeated_{unit}_characters", characters / len(text)),
            ):
                if is_broken(self, rule, share):
                    return rule
        ids, lengths = _number_words(text.split())
        for size in range(2, 11):
            rule, measure = (f"top_{size}_gram", _top) if size < 5 else (f"repeated_{size}_grams", _repeated_characters)
            characters = measure(ids, lengths, size)
            if is_broken(self, rule, characters / len(text)):
                return rule
            if size >= 5 and not characters:
                return None  # no longer n-gram is repeated, if none of this size is
        return None


def _number_words(words: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """A hash of its number for each word, uint64 [num_words], and its characters, int64 [num_words]."""
    numbers = dict(zip(dict.fromkeys(words), itertools.count(), strict=False))
    ids = np.fromiter(map(numbers.__getitem__, words), np.uint64, len(words))
    return _hash_all(ids), np.fromiter(map(len, words), np.int64, len(words))


@cached_njit
def _hash_all(numbers):
    hashes = np.empty_like(numbers)
    for i in range(len(numbers)):
        hashes[i] = hash64(numbers[i] + np.uint64(1))
    return hashes


@cached_njit
def _slot(table, key):
    """Index of the key in a hash table of a power of 2 slots, or of the free slot for it."""
    mask = np.uint64(len(table) - 1)
    slot = (key >> np.uint64(1)) & mask
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot


@cached_njit
def _free_table(entries):
    slots = 4
    while slots < 2 * entries:
        slots *= 2
    return np.zeros(slots, np.uint64)


@cached_njit
def _top(ids, lengths, size):
    """Characters of all occurrences of the most frequent n-gram, of several the first; 0 if it occurs once."""
    keys = hash_ngrams(ids, size) | np.uint64(1)  # odd, because 0 marks a free slot
    table = _free_table(len(keys))
    occurrences, first = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    for i in range(len(keys)):
        slot = _slot(table, keys[i])
        if table[slot] == 0:
            table[slot], first[slot] = keys[i], i
        occurrences[slot] += 1
    most, start = 1, 0
    for slot in range(len(table)):
        if occurrences[slot] > most or (occurrences[slot] == most > 1 and first[slot] < start):
            most, start = occurrences[slot], first[slot]
    return most * (lengths[start : start + size].sum() + size - 1) if most > 1 else 0


@cached_njit
def _repeated_characters(ids, lengths, size):
    """Characters of the n-grams that occurred before; the next one begins after it."""
    keys = hash_ngrams(ids, size) | np.uint64(1)  # odd, because 0 marks a free slot
    table = _free_table(len(keys))
    characters = i = 0
    while i < len(keys):
        slot = _slot(table, keys[i])
        if table[slot] == keys[i]:
            characters += lengths[i : i + size].sum()
            i += size
        else:
            table[slot] = keys[i]
            i += 1
    return characters
