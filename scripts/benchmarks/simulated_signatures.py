"""Signatures of any number of documents, computed from the index of a document; which ones are copies is known."""

import dataclasses

import numba
import numpy as np

from data_prep.duplicates.minhash import DEFAULT_PERMUTATIONS
from data_prep.duplicates.word_hashes import hash64

SIMILARITY = 0.75
"""of a copy and its source"""
_COPIES, _BOILERPLATE, _EQUAL = 10, 11, 12
"""Of 100 documents: 10 copies of earlier ones, one with boilerplate, one with a common signature; the rest is random"""
_COMMON = 10
"""Pieces of boilerplate, which give their documents a similarity of 0.3; and common signatures"""


@dataclasses.dataclass(frozen=True)
class SimulatedSignatures:
    """A reader of rows (`data_prep.duplicates.grouped_steps`)."""

    starts: np.ndarray
    """first document of each range, and their end, int64 [ranges + 1]"""

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """All documents of a range, and their signatures."""
        first, end = self.starts[index : index + 2].tolist()
        return np.ones(end - first, bool), _signatures(first, end - first, DEFAULT_PERMUTATIONS)


@numba.njit(cache=True, nogil=True)
def planted(documents):
    """Which documents are copies of an earlier one, bool [documents]."""
    copies = np.zeros(documents, np.bool_)
    seen = np.zeros(_COMMON, np.bool_)
    for i in range(documents):
        kind, source = _kind_and_source(np.uint64(i))
        if kind == _EQUAL:
            copies[i] = seen[source]
            seen[source] = True
        else:
            copies[i] = kind == _COPIES
    return copies


@numba.njit(cache=True, nogil=True)
def _kind_and_source(i):
    """(kind or 0, the source of a copy, or which piece is common)."""
    drawn = hash64(i + np.uint64(1) << np.uint64(1))
    kind, source = drawn % np.uint64(100), drawn >> np.uint64(8)
    if kind >= _EQUAL:
        return 0, i
    if kind == _EQUAL - 1:
        return _EQUAL, source % np.uint64(_COMMON)
    if kind == _BOILERPLATE - 1:
        return _BOILERPLATE, source % np.uint64(_COMMON)
    if i == 0:
        return 0, i
    source = source % i
    # Copies of copies would not have a known similarity to what is kept.
    is_random = hash64(source + np.uint64(1) << np.uint64(1)) % np.uint64(100) >= _EQUAL
    return (_COPIES, source) if is_random else (0, i)


@numba.njit(cache=True, nogil=True)
def _signatures(first, count, permutations):
    values = np.empty((count, permutations), np.uint32)
    for row in range(count):
        i = np.uint64(first + row)
        kind, source = _kind_and_source(i)
        own, other, share = hash64(i * np.uint64(3)), np.uint64(0), 0.0
        if kind == _COPIES:
            other, share = hash64(source * np.uint64(3)), SIMILARITY
        elif kind == _BOILERPLATE:
            other, share = hash64(source * np.uint64(3) + np.uint64(1)), 0.3**0.5
        elif kind == _EQUAL:
            other, share = hash64(source * np.uint64(3) + np.uint64(2)), 1.0
        bound = np.uint64(share * 2.0**32)
        for p in range(permutations):
            value = hash64(own + np.uint64(p))
            if kind != 0 and (value & np.uint64(0xFFFFFFFF)) < bound:
                value = hash64(other + np.uint64(p))
            values[row, p] = value >> np.uint64(32)
    return values
