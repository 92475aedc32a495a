"""Finds documents that are similar to an earlier one, by their MinHash signatures.

A signature (`minhash.signature`) is split into bands of a few values; documents that agree on a whole band are compared
(Indyk and Motwani 1998; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3). The decision is
greedy: in order, a document is removed if it is similar to an earlier document that is kept. So a document that is
similar to removed ones only is kept.

In grouped steps (`grouped_steps`), linear in the number of documents:

1. `_SendBands` sends a hash of every band of every document to the group of the hash;
2. `_PairUp` finds the pairs that agree on a band;
3. `_RequestSignatures` removes repeated pairs and requests the signatures of their earlier documents;
4. `_SendSignatures` answers;
5. `_Compare` compares whole signatures.

The last decision, `_remove_later`, needs one byte for each document, and the pairs of similar documents in order.

Of documents that agree on a band, each is compared with the first `BUCKET`. This limits the work for boilerplate that
thousands of documents share, and it depends on no earlier decision, so pairs can be found in any order. The
disadvantage: a pair is missed if all bands on which it agrees are shared by more documents before it (a pair of
similarity 0.75 agrees on 18 of 42 on average). Equal signatures are removed first, so that they do not fill a bucket.

The best known library for near-duplicates is datasketch (comparison in docs/log/corpora.md, 2026-11-21): it hashes
shingles one by one in Python, which takes 15 times as long, and its index of Python sets needs 8 kB of memory per
document.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np

from bert_jax.numba_cache import cached_njit
from data_prep.duplicates.grouped_steps import Chunk, GroupedSteps, RowReader, RunSteps, num_groups
from data_prep.duplicates.minhash import EMPTY
from data_prep.duplicates.repeated_keys import find_repeats, group_of, slot_of
from data_prep.word_hashes import hash64

BAND_RECALL = 0.99
"""Probability that a pair with exactly the threshold similarity is compared"""
BUCKET = 32
"""Documents with which a later one that agrees with them on a band is compared"""

MAX_RANGE = 1 << 20
"""Documents that a reader may read at a time"""
_BANDS_PER_PASS = 14
"""Bands whose hashes exist at the same time: 12 bytes for each and document"""
_ENTRIES_PER_GROUP = 1 << 20
"""Larger tables do not fit into the caches."""
_ROOM = 1.5
"""Slots of a hash table per entry"""
_PAIRS_PER_CHUNK = 1 << 18
_ROW_BITS = np.uint64(MAX_RANGE.bit_length() - 1)


def documents_per_range(permutations: int, memory_bytes: int) -> int:
    """How many documents a reader of signatures should read at a time, with this much memory for a worker."""
    return int(min(max(memory_bytes // 4 // (4 * permutations), 1), MAX_RANGE))


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


def near_duplicate_mask(
    reader: RowReader, run: RunSteps, permutations: int, threshold: float, memory_bytes: int
) -> np.ndarray:
    """Which documents are similar to an earlier document that is kept, bool [n].

    Two documents are similar if the estimated Jaccard similarity (share of equal values) reaches the threshold and they
    were compared (above). A document without words is similar to none. The result does not depend on engine and memory.

    Args:
      reader: of signatures, uint32 [n, permutations], in ranges of at most `MAX_RANGE` documents. What it marks as not
        to be considered must include repeated signatures (`find_repeated_signatures`).
      run: runs the steps on an engine.
      permutations: length of the signatures.
      threshold: Jaccard similarity of shingles, in (0, 1].
      memory_bytes: of one worker.
    """
    starts = reader.starts
    ranges, count = len(starts) - 1, int(starts[-1])
    removed = np.zeros(count, bool)
    if not count:
        return removed
    bands, rows = bands_and_rows(threshold, permutations)
    passes = -(-bands // _BANDS_PER_PASS)
    bounds = tuple(round(bands * index / passes) for index in range(passes + 1))
    per_group = int(min(_ENTRIES_PER_GROUP, max(memory_bytes // 4 / (16 * _ROOM), 1)))
    groups = num_groups(count * _BANDS_PER_PASS, per_group)
    steps = GroupedSteps(
        "near-duplicates",
        [range(index * ranges, (index + 1) * ranges) for index in range(passes)],
        (
            _SendBands(reader, bounds, rows, groups),
            _PairUp(starts, per_group),
            _RequestSignatures(starts, max(memory_bytes // 64, 1)),
            _SendSignatures(reader),
            _Compare(reader, math.ceil(threshold * permutations - 1e-9)),
        ),
        [groups, ranges, ranges, ranges],
    )
    for later, earlier in run(steps):
        _remove_later(later, earlier, removed)
    return removed


def find_repeated_signatures(reader: RowReader, run: RunSteps, memory_bytes: int) -> np.ndarray:
    """Which documents have the signature of an earlier one, bool [n]: similar to it, or to what it is similar to.

    Args:
      reader: of signatures.
      run: runs the steps on an engine.
      memory_bytes: of one worker.
    """
    return find_repeats(_SignatureKeys(reader), run, memory_bytes)


@dataclasses.dataclass(frozen=True)
class _SignatureKeys:
    """Reads a key of 128 bits of each signature."""

    reader: RowReader

    @property
    def starts(self) -> np.ndarray:
        return self.reader.starts

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        active, signatures = self.reader.read(index)
        return active & _has_words(signatures), _signature_keys(signatures)


@cached_njit
def _has_words(signatures):
    """A document with words has values below EMPTY, except for one in 2^32 of them."""
    result = np.zeros(len(signatures), np.bool_)
    for i in range(len(signatures)):
        result[i] = signatures[i].min() != EMPTY
    return result


@cached_njit
def _signature_keys(signatures):
    keys = np.empty((len(signatures), 2), np.uint64)
    for i in range(len(signatures)):
        first, second = np.uint64(1), np.uint64(2)
        for value in signatures[i]:
            first = hash64(first + np.uint64(value))
            second = hash64(second ^ (first + np.uint64(0x9E3779B97F4A7C15)))
        keys[i, 0], keys[i, 1] = first, second
    return keys


@dataclasses.dataclass(frozen=True)
class _SendBands:
    """Step 1; a call for each pass and range of documents. Sends (hashes, rows relative to the first, first row)."""

    reader: RowReader
    bounds: tuple[int, ...]
    """first band of each pass, and the end of the last one"""
    rows: int
    """values per band"""
    groups: int

    def __call__(self, key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
        number, index = divmod(key, len(self.reader.starts) - 1)
        active, signatures = self.reader.read(index)
        active &= _has_words(signatures)
        begin, end = self.bounds[number : number + 2]
        hashes, documents, bounds = _sort_bands(signatures, active, begin, end, self.rows, self.groups)
        first = np.array([self.reader.starts[index]])
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            of_group = slice(bounds[group], bounds[group + 1])
            yield group, (hashes[of_group], documents[of_group], first)


@cached_njit
def _sort_bands(signatures, active, begin, end, rows, groups):
    """Returns (hashes of bands of active documents, their rows, where each group begins), by group and in order."""
    bands = end - begin
    hashes = np.empty(len(signatures) * bands, np.uint64)
    count = 0
    owners = np.empty(len(signatures), np.uint32)
    documents = 0
    for i in range(len(signatures)):
        if active[i]:
            owners[documents] = i
            documents += 1
            for band in range(begin, end):
                hashes[count] = _band_hash(signatures[i], band, rows)
                count += 1
    bounds = np.zeros(groups + 1, np.int64)
    for k in range(count):
        bounds[group_of(hashes[k], groups) + 1] += 1
    bounds = np.cumsum(bounds)
    following = bounds[:-1].copy()
    sorted_hashes, sorted_rows = np.empty(count, np.uint64), np.empty(count, np.uint32)
    for k in range(count):
        group = group_of(hashes[k], groups)
        sorted_hashes[following[group]] = hashes[k]
        sorted_rows[following[group]] = owners[k // bands]
        following[group] += 1
    return sorted_hashes, sorted_rows, bounds


@cached_njit
def _band_hash(values, band, rows):
    """A polynomial in an odd constant, then mixed; the same values in two bands have different hashes."""
    state = np.uint64(band + 1)
    for i in range(band * rows, (band + 1) * rows):
        state = state * np.uint64(0x9E3779B97F4A7C15) + np.uint64(values[i])
    return hash64(state)


@dataclasses.dataclass(frozen=True)
class _PairUp:
    """Step 2; a call for each group of hashes. Sends pairs to the range of their later document.

    A pair is `earlier document << _ROW_BITS | row of the later document in its range`, uint64.
    """

    starts: np.ndarray
    entries: int
    """expected in a group"""

    def __call__(self, key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
        table, entries, count = np.zeros((int(self.entries * _ROOM) + 2, 2), np.uint64), 0, 0
        later, earlier = np.empty(_PAIRS_PER_CHUNK, np.int64), np.empty(_PAIRS_PER_CHUNK, np.int64)
        for hashes, rows, (first,) in chunks:
            position = 0
            while position < len(hashes):
                position, entries, count = _pair_up(
                    hashes, rows, first, position, table, entries, later, earlier, count
                )
                if count + BUCKET > len(later):
                    yield from self._by_range(later[:count], earlier[:count])
                    count = 0
                if entries * _ROOM + 1 > len(table):
                    table = _grow(table)
        yield from self._by_range(later[:count], earlier[:count])

    def _by_range(self, later: np.ndarray, earlier: np.ndarray) -> Iterator[tuple[int, Chunk]]:
        if not len(later):
            return
        ranges = np.searchsorted(self.starts, later, "right") - 1
        pairs = (earlier.astype(np.uint64) << _ROW_BITS) | (later - self.starts[ranges]).astype(np.uint64)
        order = np.argsort(ranges, kind="stable")
        bounds = np.searchsorted(ranges[order], np.arange(len(self.starts)))
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            yield index, (pairs[order[bounds[index] : bounds[index + 1]]],)


@cached_njit
def _pair_up(hashes, rows, first, position, table, entries, later, earlier, count):
    """Pairs each entry from a position with the entries of its hash in the table, and inserts it if there are few.

    A slot of the table has a hash and a document plus 1, or 0.

    Returns:
      (position to continue at, entries in the table, number of pairs). Ends early if `later` or the table is full.
    """
    size = len(table)
    while position < len(hashes) and count + BUCKET <= len(later) and entries * _ROOM + 1 <= size:
        hashed, document = hashes[position], first + np.int64(rows[position])
        slot, same = slot_of(hashed, size), 0
        while table[slot, 1] != 0:
            if table[slot, 0] == hashed:
                later[count], earlier[count] = document, np.int64(table[slot, 1]) - 1
                count += 1
                same += 1
                if same == BUCKET:
                    break
            slot = slot + 1 if slot + 1 < size else 0
        if same < BUCKET:
            table[slot, 0], table[slot, 1] = hashed, np.uint64(document + 1)
            entries += 1
        position += 1
    return position, entries, count


@cached_njit
def _grow(table):
    larger = np.zeros((2 * len(table), 2), np.uint64)
    for i in range(len(table)):
        if table[i, 1] != 0:
            slot = slot_of(table[i, 0], len(larger))
            while larger[slot, 1] != 0:
                slot = slot + 1 if slot + 1 < len(larger) else 0
            larger[slot] = table[i]
    return larger


@dataclasses.dataclass(frozen=True)
class _RequestSignatures:
    """Step 3; a call for each range of later documents. Sends (range, different pairs, ascending) to earlier ones."""

    starts: np.ndarray
    max_pairs: int
    """in memory; with more, some are sent twice, which costs time only"""

    def __call__(self, key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
        waiting, count = [], 0
        for (pairs,) in chunks:
            waiting.append(pairs)
            count += len(pairs)
            if count > self.max_pairs:
                waiting = [np.unique(np.concatenate(waiting))]
                count = len(waiting[0])
                if count > self.max_pairs // 2:
                    yield from self._request(key, waiting[0])
                    waiting, count = [], 0
        if waiting:
            yield from self._request(key, np.unique(np.concatenate(waiting)))

    def _request(self, key: int, pairs: np.ndarray) -> Iterator[tuple[int, Chunk]]:
        bounds = np.searchsorted(pairs, self.starts.astype(np.uint64) << _ROW_BITS)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            yield index, (np.array([key]), pairs[bounds[index] : bounds[index + 1]])


@dataclasses.dataclass(frozen=True)
class _SendSignatures:
    """Step 4; a call for each range of earlier documents. Sends (pairs, earlier documents, their signatures)."""

    reader: RowReader

    def __call__(self, key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
        signatures = None
        for (index,), pairs in chunks:
            if signatures is None:
                signatures = self.reader.read(key)[1]
            documents = np.unique(pairs >> _ROW_BITS).astype(np.int64)
            yield int(index), (pairs, documents, signatures[documents - self.reader.starts[key]])


@dataclasses.dataclass(frozen=True)
class _Compare:
    """Step 5; a call for each range of later documents. Sends (later, earlier) of similar pairs, by later document."""

    reader: RowReader
    min_agreements: int

    def __call__(self, key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
        signatures, similar = None, []
        for pairs, documents, of_documents in chunks:
            if signatures is None:
                signatures = self.reader.read(key)[1]
            earlier = (pairs >> _ROW_BITS).astype(np.int64)
            rows = (pairs & np.uint64(MAX_RANGE - 1)).astype(np.int64)
            places = np.searchsorted(documents, earlier)
            similar.append(pairs[_are_similar(signatures, rows, of_documents, places, self.min_agreements)])
        if similar:
            pairs = np.concatenate(similar)
            later = (pairs & np.uint64(MAX_RANGE - 1)).astype(np.int64)
            order = np.argsort(later, kind="stable")
            yield 0, (later[order] + self.reader.starts[key], (pairs[order] >> _ROW_BITS).astype(np.int64))


@cached_njit
def _are_similar(signatures, rows, others, other_rows, min_agreements):
    result = np.zeros(len(rows), np.bool_)
    for k in range(len(rows)):
        values, other = signatures[rows[k]], others[other_rows[k]]
        agreements = 0
        for i in range(len(values)):
            agreements += values[i] == other[i]
        result[k] = agreements >= min_agreements
    return result


@cached_njit
def _remove_later(later, earlier, removed):
    """Marks later documents as removed, except if the earlier ones are; pairs must be sorted by later document."""
    for k in range(len(later)):
        if not removed[earlier[k]]:
            removed[later[k]] = True
