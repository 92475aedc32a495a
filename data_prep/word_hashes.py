"""Hashes of words and of word n-grams, 64 bits each, for near-duplicates, decontamination and repeated n-grams.

Texts that differ only in case, punctuation, symbols, spacing and invisible characters have the same words. In a script
without spaces between words (Thai, Khmer), every phrase is one "word"; every CJK character is a word, as in BERT's
tokenizer. The hashes never change: they use neither a seed nor `hash()`.
"""

import functools
import unicodedata

import numpy as np

from bert_jax.numba_cache import cached_njit

# As in google-research/bert tokenization.py, _is_chinese_char.
_CJK = (
    (0x3400, 0x4DC0),
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0x20000, 0x2A6E0),
    (0x2A700, 0x2CEB0),
    (0x2F800, 0x2FA20),
)
_TABLE_SIZE = 0x30000
"""No character above these planes has a case or separates words."""
_SEPARATOR, _INVISIBLE, _SINGLE_WORD = 0, 1, 1 << 31

# Odd multipliers without visible pattern: from the golden ratio, and from Steele and Vigna (2021), table 6.
_LETTER_MULTIPLIER = np.uint64(0xD1342543DE82EF95)
_WORD_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def word_hashes(text: str) -> np.ndarray:
    """Hashes of a text's words in order, uint64 [num_words].

    Words are runs of letters, marks and digits, case folded (character by character, so that ß stays ß).
    Different words share a hash with probability 2^-64.

    Args:
      text: any text; normalise it first (`clean`), otherwise é and e + accent differ.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    hashes = np.empty(len(codes), np.uint64)
    return hashes[: _hash_words(codes, _table(), hashes)].copy()


def ngram_hashes(words: np.ndarray, size: int) -> np.ndarray:
    """Hashes of all n-grams of `size` words, uint64 [max(num_words - size + 1, 0)]; they depend on the order of words.

    Args:
      words: hashes, uint64 [num_words].
      size: words per n-gram, positive.
    """
    return hash_ngrams(words, size)


@cached_njit
def hash64(z: np.uint64) -> np.uint64:
    """A bijection whose every output bit depends on every input bit: SplitMix64's finaliser (Steele et al. 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.cache
def _table() -> np.ndarray:
    """For each character its case-folded character or one of the classes above, uint32 [_TABLE_SIZE]."""
    table = np.empty(_TABLE_SIZE, np.uint32)
    for code in range(_TABLE_SIZE):
        character = chr(code)
        category = unicodedata.category(character)
        if category[0] in "PSZ" or category in ("Cc", "Cs"):
            table[code] = _SEPARATOR
        elif category == "Cf":
            table[code] = _INVISIBLE
        else:
            folded = character.casefold()  # unlike lower(), it maps both small sigmas to one
            table[code] = ord(folded if len(folded) == 1 else character.lower()[0])
    for start, stop in _CJK:
        table[start:stop] = np.arange(start, stop, dtype=np.uint32) | np.uint32(_SINGLE_WORD)
    return table


@cached_njit
def _hash_words(codes: np.ndarray, table: np.ndarray, hashes: np.ndarray) -> int:
    """Writes the hash of each word; returns the number of words."""
    count = 0
    state = np.uint64(0)
    inside = False
    for code in codes:
        folded = table[code] if code < _TABLE_SIZE else code
        if folded == _INVISIBLE:
            continue
        single = folded >= _SINGLE_WORD
        if folded != _SEPARATOR and not single:
            # No letter is zero, so words of different lengths have different polynomials.
            state = (state + np.uint64(folded)) * _LETTER_MULTIPLIER
            inside = True
            continue
        if inside:
            hashes[count] = hash64(state)
            count += 1
            state = np.uint64(0)
            inside = False
        if single:
            hashes[count] = hash64(np.uint64(folded) * _LETTER_MULTIPLIER)
            count += 1
    if inside:
        hashes[count] = hash64(state)
        count += 1
    return count


@cached_njit
def hash_ngrams(words: np.ndarray, size: int) -> np.ndarray:
    """`ngram_hashes` for compiled functions: a rolling polynomial modulo 2^64; each value then passes `hash64`."""
    hashes = np.empty(max(len(words) - size + 1, 0), np.uint64)
    leaving = np.uint64(1)
    for _ in range(size):
        leaving *= _WORD_MULTIPLIER
    state = np.uint64(0)
    for i in range(len(words)):
        state = state * _WORD_MULTIPLIER + words[i]
        if i >= size:
            state -= leaving * words[i - size]
        if i >= size - 1:
            hashes[i - size + 1] = hash64(state)
    return hashes
