"""Grouped steps in memory, readers of arrays, and duplicates by their definitions, in quadratic time."""

import collections
import dataclasses
import functools
import pickle

import numpy as np

from data_prep.duplicates.minhash import EMPTY
from data_prep.duplicates.near_duplicates import BUCKET, bands_and_rows, find_repeated_signatures, near_duplicate_mask


def run_in_memory(steps):
    """Chunks of the last step: a dictionary of lists between two steps."""
    groups = {key: [()] for keys in steps.passes for key in keys}
    for step in steps.steps:
        following = collections.defaultdict(list)
        for key in sorted(groups):
            for group, chunk in pickle.loads(pickle.dumps(step))(key, iter(groups[key])):
                following[group].append(chunk)
        groups = following
    yield from groups[0]


@dataclasses.dataclass(frozen=True)
class ArrayReader:
    """Reads ranges of rows of an array."""

    values: np.ndarray
    active: np.ndarray
    starts: np.ndarray

    def read(self, index):
        rows = slice(*self.starts[index : index + 2])
        return self.active[rows].copy(), self.values[rows].copy()


def reader_of(values, active=None, per_range=100):
    """A reader of an array; by default, of all its rows."""
    active = np.ones(len(values), bool) if active is None else active
    return ArrayReader(values, active, np.append(np.arange(0, len(values), per_range), len(values)))


def slow_repeats(keys, active):
    """Rows that repeat an earlier one."""
    known, repeated = set(), []
    for key, on in zip(map(tuple, keys.tolist()), active.tolist(), strict=True):
        repeated.append(on and key in known)
        if on:
            known.add(key)
    return np.array(repeated, bool)


def slow_near_duplicates(signatures, active, threshold, bucket_size=BUCKET):
    """The definition: the buckets of each band without hashes, every pair in them, then the greedy decision."""
    count, permutations = signatures.shape
    bands, rows = bands_and_rows(threshold, permutations)
    has_words = (signatures != EMPTY).any(axis=1)
    repeated = slow_repeats(signatures, active & has_words)
    compared = np.zeros((count, count), bool)
    for band in range(bands):
        buckets = collections.defaultdict(list)
        for document in np.flatnonzero(active & has_words & ~repeated).tolist():
            bucket = buckets[signatures[document, band * rows : (band + 1) * rows].tobytes()]
            compared[document, bucket[:bucket_size]] = True
            bucket.append(document)
    removed = repeated.copy()
    for document in range(count):
        others = np.flatnonzero(compared[document] & ~removed)
        agreements = (signatures[others] == signatures[document]).sum(axis=1)
        removed[document] |= (agreements >= threshold * permutations - 1e-9).any()
    return removed


def decide(signatures, threshold=0.5, memory_bytes=256 << 20, active=None, per_range=100, run=run_in_memory):
    """As in a build: equal signatures first."""
    active = np.ones(len(signatures), bool) if active is None else active
    repeated = find_repeated_signatures(reader_of(signatures, active, per_range), run, memory_bytes)
    reader = reader_of(signatures, active & ~repeated, per_range)
    return repeated | near_duplicate_mask(reader, run, signatures.shape[1], threshold, memory_bytes)


def random_signatures(count):
    return np.random.default_rng(3).integers(0, 2**32 - 1, (count, 128), dtype=np.uint32)


@functools.cache
def clusters():
    """1,500 signatures around two centres, the most similar ones last; some are equal, some without words."""
    rng = np.random.default_rng(0)
    count = 1500
    centres = random_signatures(2)[rng.integers(2, size=count)]
    own = rng.integers(0, 2**32 - 1, (count, 128), dtype=np.uint32)
    signatures = np.where(rng.random((count, 128)) < np.linspace(0.35, 0.8, count)[:, None], centres, own)
    signatures[rng.integers(count, size=count // 10)] = signatures[rng.integers(count, size=count // 10)]
    signatures[rng.integers(count, size=3)] = EMPTY
    return signatures, rng.random(count) < 0.9


@functools.cache
def expected_of_clusters(threshold, bucket=BUCKET):
    return slow_near_duplicates(*clusters(), threshold, bucket)
