"""Finds documents and paragraphs that repeat an earlier one, exactly (except for whitespace) or nearly.

Exact: by the keys of texts (`text_keys`).

Near: a signature (`minhash.signature`) is split into bands of a few values; documents that agree on a whole band are
compared (Indyk and Motwani 1998; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3).

Both read their input in blocks and use hash tables of a given size, for any number of documents. The best known library
for near-duplicates is datasketch (comparison in docs/LOG.md): it hashes shingles one by one in Python, which takes 15
times as long, and its index of Python sets needs 8 kB per document. This module needs 1 kB for documents in the index
and one byte for the others.
"""

import math
import mmap

import numba
import numpy as np

from data_prep.duplicates.minhash import EMPTY
from data_prep.duplicates.text_keys import hash_text_key
from data_prep.duplicates.word_hashes import hash64

DEFAULT_MEMORY_BYTES = 256 << 20
DEFAULT_THRESHOLD = 0.5
BAND_RECALL = 0.99
"""Probability that a pair with exactly the threshold similarity is compared"""
BUCKET = 32
"""Kept documents that are stored for one value of a band"""

_BLOCK_BYTES = 8 << 20
_ROOM = 1.5
"""Slots of a hash table per entry"""


def find_duplicates(keys: np.ndarray, active: np.ndarray, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> np.ndarray:
    """Which rows repeat an earlier one, bool [n]; exact, with the same result for any `memory_bytes`.

    A hash table of `memory_bytes` contains the distinct keys of one range of hashed keys at a time; a range that does
    not fit is halved. 256 MB are enough for 11 million distinct keys; the keys are read once per range.

    Args:
      keys: of texts, uint64 [n, 2]; an array, or a memmap opened for reading.
      active: rows to consider, bool [n]; the others are ignored.
      memory_bytes: in addition to the arguments and the result.
    """
    repeated = np.zeros(len(keys), bool)
    block_rows, room = _divide(memory_bytes, 16)
    size = max(min(room // 16, math.ceil(_ROOM * len(keys))), 64)
    table = np.empty((size, 2), np.uint64)
    ranges = [(0, 2**64 - 1)]
    while ranges:
        low, high = ranges.pop()
        table[:] = 0
        entries = 0
        for start, block in _blocks(keys, block_rows):
            rows = slice(start, start + len(block))
            entries = _mark_repeats(
                block, active[rows], repeated[rows], table, entries, np.uint64(low), np.uint64(high)
            )
            if entries < 0:
                middle = low + (high - low) // 2
                ranges += [(middle + 1, high), (low, middle)]
                break
    return repeated


def _divide(memory_bytes: int, row_bytes: int) -> tuple[int, int]:
    """Returns (rows to read at a time, bytes left for the tables).

    Three blocks are in memory at a time: the mapped pages, their copy, and the previous copy.
    """
    rows = max(min(_BLOCK_BYTES, memory_bytes // 8) // row_bytes, 1)
    return rows, memory_bytes - 3 * rows * row_bytes


def _blocks(array: np.ndarray, rows: int):
    """Yields (first row, copy of the rows); drops the pages of a memmap from memory after they were read."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    # A private writable map would lose its changes.
    mapped = base if isinstance(base, mmap.mmap) and not array.flags.writeable else None
    for start in range(0, len(array), rows):
        block = np.array(array[start : start + rows])
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
        yield start, block


@numba.njit(cache=True, nogil=True)
def _mark_repeats(keys, active, repeated, table, entries, low, high):
    """Processes one block; returns the number of keys in the table, or -1 if it would become too full."""
    size = np.uint64(len(table))
    for i in range(len(keys)):
        if not active[i]:
            continue
        # (0, 0) marks a free slot; residues are below 2^61, so no text has the key that replaces it.
        first, second = keys[i, 0], keys[i, 1]
        if first == 0 and second == 0:
            first = ~first
        mixed = hash_text_key(first, second)
        if mixed < low or mixed > high:
            continue
        slot = _slot(mixed, size)
        while table[slot, 0] != 0 or table[slot, 1] != 0:
            if table[slot, 0] == first and table[slot, 1] == second:
                break
            slot = slot + 1 if slot + 1 < size else 0
        if table[slot, 0] == first and table[slot, 1] == second:
            repeated[i] = True
        elif entries * _ROOM >= size:
            return -1
        else:
            table[slot, 0], table[slot, 1] = first, second
            entries += 1
    return entries


@numba.njit(cache=True, nogil=True)
def _slot(mixed, size):
    """An evenly spread slot below `size` < 2^32, from the lower half of a mixed hash."""
    return np.int64(((mixed & np.uint64(0xFFFFFFFF)) * np.uint64(size)) >> np.uint64(32))


def bands_and_rows(threshold: float, permutations: int) -> tuple[int, int]:
    """How a signature is split: (bands, values per band).

    A pair of similarity s agrees on a band of r values with probability s^r, and on at least one of b bands with
    1 - (1 - s^r)^b. r is the largest for which this is `BAND_RECALL` at the threshold: larger r means
    fewer unnecessary comparisons. At 0.5 with 128 values: 42 bands of 3, 0.996; at 0.8: 21 of 6, 0.998.

    Args:
      threshold: in (0, 1].
      permutations: length of the signatures.
    """
    for rows in range(permutations, 1, -1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= BAND_RECALL:
            return bands, rows
    return permutations, 1


def find_near_duplicates(
    signatures: np.ndarray,
    active: np.ndarray,
    threshold: float = DEFAULT_THRESHOLD,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> np.ndarray:
    """Which documents are similar to an earlier document that is kept, bool [n].

    In order, each document is compared with the kept documents that agree with it on a band, and removed as soon as
    the estimated Jaccard similarity (share of equal values) reaches the threshold. Removed documents are not compared
    again: a thousand copies need a thousand comparisons, and a document that is similar to removed ones only is kept.
    A document without words is similar to none.

    The index contains as many kept documents as fit into `memory_bytes` (1 kB each with 128 permutations and threshold
    0.5: 240,000 in 256 MB). When it is full, the other documents are compared with it, and the remaining ones start the
    next index: n documents are read n / 480,000 times on average.

    Bound: one value of one band refers to at most `BUCKET` kept documents, the first of an index; with boilerplate that
    thousands of documents share, a document is compared with at most BUCKET x bands others. The disadvantage: a pair is
    missed if all bands on which it agrees are full (a pair of similarity 0.75 agrees on 18 of 42 on average). Only then
    can the result depend on `memory_bytes`.

    Args:
      signatures: uint32 [n, permutations]; an array, or a memmap opened for reading.
      active: documents to consider, bool [n].
      threshold: Jaccard similarity of shingles, in (0, 1].
      memory_bytes: in addition to the arguments and the result.
    """
    count, permutations = signatures.shape
    bands, rows = bands_and_rows(threshold, permutations)
    min_agreements = math.ceil(threshold * permutations - 1e-9)
    block_rows, room = _divide(memory_bytes, 4 * permutations)
    capacity = min(max(int(room // (4 * permutations + 8 * bands * _ROOM)), 1), count)
    removed = np.zeros(count, bool)
    kept = np.empty((capacity, permutations), np.uint32)
    slots = np.empty((bands, math.ceil(_ROOM * capacity) + 1), np.uint64)
    begin = 0
    while begin < count:
        slots[:] = 0
        entries, next_begin = 0, count
        for start, block in _blocks(signatures[begin:], block_rows):
            in_block = slice(begin + start, begin + start + len(block))
            entries, first = _mark_similar(
                block, active[in_block], removed[in_block], slots, kept, entries, rows, min_agreements
            )
            if first >= 0:
                next_begin = min(next_begin, begin + start + first)
        begin = next_begin
    return removed


@numba.njit(cache=True, nogil=True)
def _mark_similar(signatures, active, removed, slots, kept, entries, rows, min_agreements):
    """Processes one block; returns (documents in the index, first kept document without room in it or -1).

    A slot contains the upper half of a band's hash and the index in `kept` plus 1, or 0.
    """
    first = -1
    hashes = np.empty(len(slots), np.uint64)
    for i in range(len(signatures)):
        values = signatures[i]
        if not active[i] or removed[i] or values.min() == EMPTY:
            continue
        for band in range(len(slots)):
            hashes[band] = _band_hash(values, band, rows)
        if _is_similar(values, hashes, slots, kept, min_agreements):
            removed[i] = True
        elif entries < len(kept):
            kept[entries] = values
            entries += 1
            for band in range(len(slots)):
                _insert(slots[band], hashes[band], entries)
        elif first < 0:
            first = i
    return entries, first


@numba.njit(cache=True, nogil=True)
def _is_similar(values, hashes, slots, kept, min_agreements):
    for band in range(len(slots)):
        size = slots.shape[1]
        slot = _slot(hashes[band], size)
        while slots[band, slot] != 0:
            entry = slots[band, slot]
            if entry >> np.uint64(32) == hashes[band] >> np.uint64(32):
                other = kept[np.int64(entry & np.uint64(0xFFFFFFFF)) - 1]
                if _agreements(values, other) >= min_agreements:
                    return True
            slot = slot + 1 if slot + 1 < size else 0
    return False


@numba.njit(cache=True, nogil=True)
def _insert(slots, hashed, entry):
    slot = _slot(hashed, len(slots))
    same = 0
    while slots[slot] != 0:
        same += slots[slot] >> np.uint64(32) == hashed >> np.uint64(32)
        if same == BUCKET:
            return
        slot = slot + 1 if slot + 1 < len(slots) else 0
    slots[slot] = (hashed >> np.uint64(32) << np.uint64(32)) | np.uint64(entry)


@numba.njit(cache=True, nogil=True)
def _band_hash(values, band, rows):
    state = np.uint64(0)
    for i in range(band * rows, (band + 1) * rows):
        state = hash64(state + np.uint64(values[i]) + np.uint64(0x9E3779B97F4A7C15))
    return state


@numba.njit(cache=True, nogil=True)
def _agreements(values, others):
    agreements = 0
    for i in range(len(values)):
        agreements += values[i] == others[i]
    return agreements
