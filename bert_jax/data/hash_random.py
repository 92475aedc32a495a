"""Randomness without a generator: every draw is a hash of what it is for, compiled.

A stream of draws is two words, a key and a count of the draws made from it; a permutation is a key and a size.

Whoever changes this file removes ``__pycache__/*.nbc`` beside it: numba's cache does not see that what examples.py
inlined has changed.
"""

import numba
import numpy as np

HALF = np.uint64(2**52)
"""The threshold of `happens` for a chance of one half."""


def threshold(rate: float) -> np.uint64:
    """What `happens` compares with, so that it is true with probability `rate`, exact to 2^-53."""
    return np.uint64(min(round(rate * 2**53), 2**53))


def key_of(*words: int) -> np.uint64:
    """A 64-bit key for each combination of non-negative integers; their order matters."""
    key = np.uint64(0)
    for word in words:
        # Compiled functions return Python integers, which numba would take for signed ones.
        key = np.uint64(mix(np.uint64(add(key, np.uint64(word)))))
    return key


@numba.njit(cache=True, nogil=True)
def add(a, b):
    """Folds a word into a key, to be scrambled by `mix`."""
    return a * np.uint64(0x9E3779B97F4A7C15) + b + np.uint64(1)


@numba.njit(cache=True, nogil=True)
def mix(z):
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def draw(state, bound):
    """A uniform integer in [0, bound); advances the count in ``state[1]``."""
    state[1] += np.uint64(1)
    high = mix(add(state[0], state[1])) >> np.uint64(32)
    return np.int64((high * np.uint64(bound)) >> np.uint64(32))


@numba.njit(cache=True, nogil=True)
def happens(state, limit):
    """True with probability limit / 2^53; advances the count."""
    state[1] += np.uint64(1)
    return (mix(add(state[0], state[1])) >> np.uint64(11)) < limit


@numba.njit(cache=True, nogil=True)
def permuted(positions, size, key):
    """Images of some positions under a keyed permutation of range(size), int64; none needs the others.

    Four Feistel rounds on the smallest square of a power of two that holds `size`, walked until the value
    is below it.
    """
    bits = 1
    while (1 << (2 * bits)) < size:
        bits += 1
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64(bits)
    out = np.empty(len(positions), np.int64)
    for i in range(len(positions)):
        value = np.uint64(positions[i])
        while True:
            left, right = value >> shift, value & mask
            for turn in range(4):
                left, right = right, left ^ (mix(add(key ^ np.uint64(turn), right)) & mask)
            value = (left << shift) | right
            if value < np.uint64(size):
                break
        out[i] = np.int64(value)
    return out
