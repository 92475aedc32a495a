"""Counter-based random numbers, compiled: every number is a hash of a key and a counter.

The state of a stream is two words: a key and the count of numbers drawn from it. A permutation needs a key and a size.
"""

import numpy as np

from bert_jax.numba_cache import cached_njit

HALF = np.uint64(2**52)
"""The threshold of `draw_bernoulli` for a probability of one half."""


def bernoulli_threshold(rate: float) -> np.uint64:
    """The threshold for which `draw_bernoulli` is true with probability `rate`, exact to 2^-53."""
    return np.uint64(min(round(rate * 2**53), 2**53))


def make_key(*words: int) -> np.uint64:
    """A 64-bit key for each combination of non-negative integers; their order matters."""
    key = np.uint64(0)
    for word in words:
        # Compiled functions return Python integers, which numba would interpret as signed.
        key = np.uint64(hash64(np.uint64(hash_input(key, np.uint64(word)))))
    return key


@cached_njit
def hash_input(key, word):
    """The argument of `hash64` for a key and a word."""
    return key * np.uint64(0x9E3779B97F4A7C15) + word + np.uint64(1)


@cached_njit
def hash64(z):
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@cached_njit
def draw_uniform_int(state, bound):
    """A uniform integer in [0, bound); increments the count in ``state[1]``."""
    state[1] += np.uint64(1)
    high = hash64(hash_input(state[0], state[1])) >> np.uint64(32)
    return np.int64((high * np.uint64(bound)) >> np.uint64(32))


@cached_njit
def draw_bernoulli(state, limit):
    """True with probability limit / 2^53; increments the count."""
    state[1] += np.uint64(1)
    return (hash64(hash_input(state[0], state[1])) >> np.uint64(11)) < limit


@cached_njit
def uniform_of_indices(key, indices):
    """A number in [0, 1) for each index, float64 [n], with 53 random bits."""
    out = np.empty(len(indices), np.float64)
    for i in range(len(indices)):
        out[i] = (hash64(hash_input(key, np.uint64(indices[i]))) >> np.uint64(11)) * 2.0**-53
    return out


@cached_njit
def permute_evenly(positions, size, key):
    """Images of `positions` under a keyed permutation of range(size), int64, that spreads neighbours.

    For each m, the images of the positions [i 2^m, (i + 1) 2^m) are in different ones of 2^m parts of range(size) whose
    sizes differ by at most 1: every second position goes to one half, and so on inside of the halves; the key decides
    which half is first. For sizes that are powers of two, this is the van der Corput sequence with nested scrambling
    (Owen 1995).
    """
    out = np.empty(len(positions), np.int64)
    for i in range(len(positions)):
        position, first, left, node = positions[i], 0, size, 1
        while left > 1:
            is_odd = position & 1
            of_odd = left // 2
            of_even = left - of_odd
            swapped = hash64(hash_input(key, np.uint64(node))) & np.uint64(1)
            if is_odd:
                first, left = (first if swapped else first + of_even), of_odd
            else:
                first, left = (first + of_odd if swapped else first), of_even
            node = 2 * node + is_odd
            position >>= 1
        out[i] = first
    return out


@cached_njit
def permute(positions, size, key):
    """Images of `positions` under a keyed permutation of range(size), int64; each is computed independently.

    Four Feistel rounds on the smallest even power of two that is at least `size`, repeated until the value is below
    `size` (cycle walking).
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
            for round_index in range(4):
                left, right = right, left ^ (hash64(hash_input(key ^ np.uint64(round_index), right)) & mask)
            value = (left << shift) | right
            if value < np.uint64(size):
                break
        out[i] = np.int64(value)
    return out
