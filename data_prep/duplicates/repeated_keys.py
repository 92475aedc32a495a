"""Finds rows that repeat the key of an earlier row: exact duplicates of documents and paragraphs.

Keys are grouped by a range of their hashes; a hash table has the distinct keys of a group (`grouped_steps`). A range of
rows sends each key once: so a key that millions share, such as that of an error page, makes no large group.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from bert_jax.numba_cache import cached_njit
from data_prep.duplicates.grouped_steps import Chunk, GroupedSteps, RowReader, RunSteps, num_groups
from data_prep.duplicates.text_keys import hash_text_key

_ROOM = 1.5
"""Slots of a hash table per entry"""
_ROW_BYTES = 16 * _ROOM
_FIRST_SLOTS = 1 << 12


def find_repeats(reader: RowReader, run: RunSteps, memory_bytes: int) -> np.ndarray:
    """Which rows have the key of an earlier row, bool [n]. The result does not depend on engine and memory.

    Args:
      reader: of keys, uint64 [n, 2]; equal keys are repeats.
      run: runs the steps on an engine.
      memory_bytes: of one worker.
    """
    count = int(reader.starts[-1])
    repeated = np.zeros(count, bool)
    if count:
        groups = num_groups(count, max(int(memory_bytes / 4 / _ROW_BYTES), 1))
        steps = (_SendKeys(reader, groups), _mark_repeats)
        for (rows,) in run(GroupedSteps("duplicates", [range(len(reader.starts) - 1)], steps, [groups])):
            repeated[rows] = True
    return repeated


@dataclasses.dataclass(frozen=True)
class _SendKeys:
    reader: RowReader
    groups: int

    def __call__(self, key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
        active, keys = self.reader.read(key)
        rows = np.flatnonzero(active)
        repeats, _ = _insert(keys[rows], np.zeros((int(_ROOM * len(rows)) + 1, 2), np.uint64), 0)
        repeated = rows[repeats]
        if len(repeated):
            known = np.zeros((0, 2), np.uint64), repeated.astype(np.uint32), self.reader.starts[key : key + 1]
            yield key % self.groups, known
        active = active.copy()
        active[repeated] = False
        yield from split_by_hash(hash_keys(keys), active, self.groups, int(self.reader.starts[key]), keys)


def split_by_hash(
    hashes: np.ndarray, active: np.ndarray, group_count: int, first_row: int, values: np.ndarray
) -> Iterator[tuple[int, Chunk]]:
    """Yields (group, (values, rows relative to the first one, the first row)), without the inactive rows."""
    rows, bounds = sort_by_group(hashes, active, group_count)
    for group in np.flatnonzero(np.diff(bounds)).tolist():
        of_group = rows[bounds[group] : bounds[group + 1]]
        yield group, (values[of_group], of_group, np.array([first_row]))


@cached_njit
def hash_keys(keys):
    """64 mixed bits of each key, uint64 [n]."""
    hashes = np.empty(len(keys), np.uint64)
    for i in range(len(keys)):
        hashes[i] = hash_text_key(keys[i, 0], keys[i, 1])
    return hashes


@cached_njit
def group_of(hashed, groups):
    """The group of a hash: ranges of its upper half."""
    return np.int64(((hashed >> np.uint64(32)) * np.uint64(groups)) >> np.uint64(32))


@cached_njit
def slot_of(hashed, size):
    """An evenly spread slot below `size` < 2^32, from the lower half of a hash, which `group_of` does not use."""
    return np.int64(((hashed & np.uint64(0xFFFFFFFF)) * np.uint64(size)) >> np.uint64(32))


@cached_njit
def sort_by_group(hashes, active, groups):
    """Returns (active rows by group and in order, uint32; where each group begins, int64 [groups + 1])."""
    bounds = np.zeros(groups + 1, np.int64)
    for i in range(len(hashes)):
        if active[i]:
            bounds[group_of(hashes[i], groups) + 1] += 1
    bounds = np.cumsum(bounds)
    rows, following = np.empty(bounds[-1], np.uint32), bounds[:-1].copy()
    for i in range(len(hashes)):
        if active[i]:
            group = group_of(hashes[i], groups)
            rows[following[group]] = i
            following[group] += 1
    return rows, bounds


def _mark_repeats(key: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
    table, entries = np.zeros((_FIRST_SLOTS, 2), np.uint64), 0
    for keys, rows, (first,) in chunks:
        if not len(keys):  # repeats that are known
            yield 0, (rows + first,)
            continue
        while len(table) < _ROOM * (entries + len(keys)):
            table = _grow(table)
        repeats, entries = _insert(keys, table, entries)
        if repeats.any():
            yield 0, (rows[repeats] + first,)


@cached_njit
def _insert(keys, table, entries):
    """Inserts new keys; returns (rows whose key was there before, number of keys)."""
    repeats = np.zeros(len(keys), np.bool_)
    for i in range(len(keys)):
        slot = _find(keys[i, 0], keys[i, 1], table)
        # (0, 0) marks a free slot.
        if table[slot, 0] != 0 or table[slot, 1] != 0:
            repeats[i] = True
        else:
            table[slot, 0], table[slot, 1] = _stored(keys[i, 0], keys[i, 1]), keys[i, 1]
            entries += 1
    return repeats, entries


@cached_njit
def _stored(first, second):
    """(0, 0) is replaced by a key that no text has, because residues are below 2^61."""
    return ~first if first == 0 and second == 0 else first


@cached_njit
def _find(first, second, table):
    """The slot of the key, or the free slot for it."""
    first = _stored(first, second)
    size = len(table)
    slot = slot_of(hash_text_key(first, second), size)
    while (table[slot, 0] != 0 or table[slot, 1] != 0) and (table[slot, 0] != first or table[slot, 1] != second):
        slot = slot + 1 if slot + 1 < size else 0
    return slot


@cached_njit
def _grow(table):
    larger = np.zeros((2 * len(table), 2), np.uint64)
    for i in range(len(table)):
        if table[i, 0] != 0 or table[i, 1] != 0:
            slot = _find(table[i, 0], table[i, 1], larger)
            larger[slot, 0], larger[slot, 1] = table[i, 0], table[i, 1]
    return larger
