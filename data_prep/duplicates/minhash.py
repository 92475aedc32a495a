"""MinHash signatures: estimate the similarity of two documents from a few numbers of each.

Broder (1997): of all shingles (word n-grams) of two documents, the one with the smallest hash belongs to both with
probability J, their Jaccard similarity; so J is estimated by the share of hash functions whose smallest values
agree, with standard deviation sqrt(J (1 - J) / permutations): 0.043 at J = 0.63 with 128.
"""

import functools

import numpy as np

from bert_jax.numba_cache import cached_njit
from data_prep.word_hashes import hash64, ngram_hashes

DEFAULT_SHINGLE_WORDS = 3
"""A copy with 5 % of its words changed keeps q = 0.95^3 of its shingles: J = q / (2 - q) = 0.75, far above passages
that share 30 % of their text (0.18). With 5 words J is 0.63, and short copies fall below 0.5 by chance; with 1 word,
different texts on one subject reach similar values (table in docs/log/corpora.md, 2026-11-21)."""
DEFAULT_PERMUTATIONS = 128
EMPTY = np.uint32(0xFFFFFFFF)
"""All values of the signature of a document without words"""


def signature(
    words: np.ndarray, shingle_words: int = DEFAULT_SHINGLE_WORDS, permutations: int = DEFAULT_PERMUTATIONS
) -> np.ndarray:
    """The MinHash signature of a document, uint32 [permutations].

    The hash functions are h(x) = (a x + b mod 2^64) >> 32 on 32-bit x with fixed random 64-bit a and b: strongly
    universal (Dietzfelbinger 1996), so any two shingles collide as under random functions. Pairwise independence alone
    does not guarantee that the smallest of many is unbiased; that follows because x itself is a well mixed hash.

    The signature of a document in parts is the elementwise minimum of their signatures (`np.minimum`), except for
    shingles across a boundary of parts. A part without words, all `EMPTY`, changes nothing.

    Args:
      words: `word_hashes` of the document, uint64 [num_words].
      shingle_words: words in a shingle, positive; a shorter document is one shingle.
      permutations: hash functions.
    """
    shingles = ngram_hashes(words, max(min(shingle_words, len(words)), 1))
    return _minima((shingles >> np.uint64(32)).astype(np.uint32), *_functions(permutations))


@functools.cache
def _functions(count: int) -> tuple[np.ndarray, np.ndarray]:
    """a and b of each hash function, uint64 [count]; the first ones do not depend on `count`."""
    draws = np.array([hash64(np.uint64((i + 1) * 0x9E3779B97F4A7C15 % 2**64)) for i in range(2 * count)], np.uint64)
    return draws[::2].copy(), draws[1::2].copy()


@cached_njit
def _minima(shingles: np.ndarray, factors: np.ndarray, terms: np.ndarray) -> np.ndarray:
    smallest = np.full(len(factors), np.uint64(0xFFFFFFFFFFFFFFFF))
    # This loop order compiles to vector instructions.
    for shingle in shingles:
        for i in range(len(factors)):
            smallest[i] = min(smallest[i], factors[i] * np.uint64(shingle) + terms[i])
    return (smallest >> np.uint64(32)).astype(np.uint32)
