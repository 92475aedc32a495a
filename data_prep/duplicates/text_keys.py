"""Keys of texts: equal if the texts are equal except for white space; can be combined from the keys of parts.

A key is two polynomials over the bytes that are not white space, modulo 2^61 - 1. So the key of a long document can be
computed from the keys of its parts, for any split. Two given texts of n bytes have the same key with probability below
(n / 2^61)^2.
"""

import numba
import numpy as np
from llvmlite import ir

from bert_jax.numba_cache import cached_njit
from data_prep.word_hashes import hash64

_PRIME = np.uint64((1 << 61) - 1)
# The two points at which the polynomials are evaluated: drawn once, in [2^60, 0.9 * 2^61).
_BASES = np.array([0x1B4E81B4E81B4E85, 0x16A09E667F3BCC91], np.uint64)
_WHITESPACE = np.array([chr(byte) in "\t\n\v\f\r " for byte in range(256)])


def text_key(data: bytes) -> np.ndarray:
    """The key of a text or of a part of one, uint64 [4]: the key [2], and values for `combine_keys` [2].

    Args:
      data: UTF-8 of a cleaned text; ASCII whitespace is ignored. The key of the empty text is (0, 0).
    """
    return _key(np.frombuffer(data, np.uint8), _BASES, _WHITESPACE)


def paragraph_keys(data: bytes, ends: np.ndarray) -> np.ndarray:
    """Keys of consecutive paragraphs of a text, uint64 [n, 2]: `text_key(paragraph)[:2]` of each.

    Args:
      data: UTF-8 of a cleaned text.
      ends: one past the last byte of each paragraph, ascending, int64 [n]; each begins at the end of the previous one.
    """
    return _paragraph_keys(np.frombuffer(data, np.uint8), np.asarray(ends, np.int64), _BASES, _WHITESPACE)


@numba.extending.intrinsic
def _high_product(context, a, b):
    """Upper 64 bits of a 64 x 64 bit product; numba has no 128-bit type."""

    def generate(context, builder, signature, arguments):
        wide = ir.IntType(128)
        left, right = (builder.zext(argument, wide) for argument in arguments)
        high = builder.lshr(builder.mul(left, right), ir.Constant(wide, 64))
        return builder.trunc(high, ir.IntType(64))

    return numba.uint64(numba.uint64, numba.uint64), generate


@cached_njit
def _multiply(a, b):
    """Product of two residues modulo the prime: 2^61 = 1, so the upper bits are added to the lower ones."""
    high, low = _high_product(a, b), a * b
    return _reduce((low & _PRIME) + ((low >> np.uint64(61)) | (high << np.uint64(3))))


@cached_njit
def _reduce(value):
    return value - _PRIME if value >= _PRIME else value


@cached_njit
def _key(data, bases, whitespace):
    # Bytes are kept without a branch, which is mispredicted at most ends of words.
    kept = np.empty(len(data), np.uint8)
    count = 0
    for byte in data:
        kept[count] = byte
        count += not whitespace[byte]
    key = np.empty(4, np.uint64)
    for i in range(2):
        key[i] = _polynomial(kept[:count], bases[i])
        key[2 + i] = _power(bases[i], count)
    return key


@cached_njit
def _polynomial(data, base):
    """The polynomial of the bytes, from those of its quarters: each product waits for the one before it."""
    quarter = len(data) // 4
    a = b = c = d = np.uint64(0)
    for i in range(quarter):
        a = _append(a, data[i], base)
        b = _append(b, data[quarter + i], base)
        c = _append(c, data[2 * quarter + i], base)
        d = _append(d, data[3 * quarter + i], base)
    power, value = _power(base, quarter), _reduce(a)
    for part in (b, c, d):
        value = _reduce(_multiply(value, power) + _reduce(part))
    for i in range(4 * quarter, len(data)):
        value = _append(value, data[i], base)
    return _reduce(value)


@cached_njit
def _append(value, byte, base):
    """A value with one more byte; the byte plus 1, because a leading zero would not change the polynomial.

    The result is at most the prime + 256, not fully reduced, if `value` is, because bases are below 0.9 * 2^61.
    """
    return _multiply(value, base) + np.uint64(byte) + np.uint64(1)


@cached_njit
def _power(base, exponent):
    power = np.uint64(1)
    while exponent:
        if exponent & 1:
            power = _multiply(power, base)
        base = _multiply(base, base)
        exponent >>= 1
    return power


@cached_njit
def combine_keys(left, right):
    """`text_key` of a text from the keys of its two parts, uint64 [4]."""
    both = np.empty(4, np.uint64)
    for i in range(2):
        both[i] = _reduce(_multiply(left[i], right[2 + i]) + right[i])
        both[2 + i] = _multiply(left[2 + i], right[2 + i])
    return both


@cached_njit
def _paragraph_keys(data, ends, bases, whitespace):
    keys = np.empty((len(ends), 2), np.uint64)
    start = 0
    for i in range(len(ends)):
        keys[i] = _key(data[start : ends[i]], bases, whitespace)[:2]
        start = ends[i]
    return keys


@cached_njit
def unit_interval_hash(keys):
    """Hashes keys, uint64 [n, 2], to uniform numbers in [0, 1), float64 [n]: multiples of 2^-53."""
    places = np.empty(len(keys), np.float64)
    for i in range(len(keys)):
        places[i] = np.float64(hash_text_key(keys[i, 0], keys[i, 1]) >> np.uint64(11)) / 2.0**53
    return places


@cached_njit
def hash_text_key(first, second):
    """64 well mixed bits of a key."""
    return hash64(first ^ hash64(second))
