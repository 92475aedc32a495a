"""Near-duplicate removal measured: recall, precision, memory and speed on planted copies.

    python scripts/benchmarks/bench_duplicates.py books/*.md --json duplicates.json
    python scripts/benchmarks/bench_duplicates.py books/*.md --shingles 1,2,3,4,5 --thresholds 0.3,0.4,0.5,0.6,0.7,0.8
    python scripts/benchmarks/bench_duplicates.py books/*.md --peer     # and datasketch, which must be installed

Documents have 100 to 1,000 words (log-uniform). One in ten is a copy of another one with 5 % of its words replaced by
random words of the text; one in ten shares a passage of 30 % of its words with another one; the rest are distinct
passages of the files and, when these are used up, random sequences of their sentences. Their order is random.

A planted pair counts as found if one of the two was removed; all other removals reduce precision. Phase 1 (hashes, one
core) is timed in this process; phase 2 runs in its own process to measure its peak memory (of datasketch: its index).
"""

import argparse
import functools
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, timed
from data_prep.duplicates import minhash, near_duplicates, word_hashes

COPIES, SHARING, SHARED_PART, CHANGED = 0.1, 0.1, 0.3, 0.05
SHORTEST, LONGEST = 100, 1000
LONGEST_SENTENCE = 40


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plant copies, then remove near-duplicates with every shingle and threshold."""
    texts, pairs = plant("\n".join(file.read_text() for file in options.files), options.documents)
    size, runs = sum(len(text.encode()) for text in texts) / 1e6, []
    write_signatures(texts[:1], 1, Path(os.devnull))  # compiles
    with tempfile.TemporaryDirectory() as scratch:
        for shingle in options.shingles:
            path = Path(scratch) / f"signatures_{shingle}.npy"
            words, signatures = write_signatures(texts, shingle, path)
            speeds = {"phase 1 MB/s": size / (words + signatures), "signatures MB/s": size / signatures}
            for threshold in options.thresholds:
                # In a fresh process, so that its peak memory is its own.
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    found = describe(pairs, *process.submit(remove, path, threshold).result())
                runs.append({"name": "bert_jax", "shingle": shingle, "threshold": threshold} | found | speeds)
                harness.progress(str(runs[-1]))
    if options.peer:
        runs.append(measure_peer(texts, pairs, options.shingles[0], options.thresholds[0]))
    return {"documents": len(texts), "MB": size, "planted copies": len(pairs), "runs": runs}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("files", nargs="+", type=Path, help="text in UTF-8")
    add("--documents", type=harness.positive, default=100_000)
    add("--shingles", type=listed(int), default=[minhash.DEFAULT_SHINGLE_WORDS])
    add("--thresholds", type=listed(float), default=[near_duplicates.DEFAULT_THRESHOLD])
    add("--peer", action="store_true", help="also datasketch, with the first shingle and threshold")


def plant(text: str, documents: int) -> tuple[list[str], np.ndarray]:
    """Make documents as described in the module docstring; also the indices of documents and copies, [pairs, 2]."""
    rng = np.random.default_rng(0)
    pool, sentences = text.split(), short_sentences(text)
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), documents)).astype(int)
    num_copies, num_sharing = round(COPIES * documents), round(SHARING * documents)
    word_lists: list[list[str]] = []
    used = 0
    for length in lengths[: documents - num_copies - num_sharing]:
        passage = pool[used : used + length]
        used += length
        word_lists.append(passage if len(passage) == length else random_sentences(sentences, length, rng))
    sources = rng.permutation(len(word_lists))
    for source in sources[:num_sharing]:
        length = len(word_lists[source])
        shared = round(SHARED_PART * length)
        start = rng.integers(length - shared + 1)
        rest = random_sentences(sentences, length - shared, rng)
        where = rng.integers(len(rest) + 1)
        word_lists.append(rest[:where] + word_lists[source][start : start + shared] + rest[where:])
    pairs = []
    for source in sources[-num_copies:]:
        pairs.append((source, len(word_lists)))
        word_lists.append(replace_words(word_lists[source], pool, rng))
    order = rng.permutation(len(word_lists))
    return [" ".join(word_lists[i]) for i in order], np.argsort(order)[np.array(pairs)]


def short_sentences(text: str) -> list[list[str]]:
    """Words of each sentence; verse and lists are cut, so that documents that draw them are not duplicates."""
    split = (sentence.split() for sentence in re.split(r"(?<=[.!?])\s+", text))
    return [sentence[i : i + LONGEST_SENTENCE] for sentence in split for i in range(0, len(sentence), LONGEST_SENTENCE)]


def random_sentences(sentences: list[list[str]], length: int, rng: np.random.Generator) -> list[str]:
    """Words of random sentences, cut to the length."""
    document: list[str] = []
    while len(document) < length:
        document += sentences[rng.integers(len(sentences))]
    return document[:length]


def replace_words(document: list[str], pool: list[str], rng: np.random.Generator) -> list[str]:
    """A copy with a share of its words replaced by different words, drawn with the frequencies of the text."""
    copy = list(document)
    for i in rng.choice(len(copy), round(CHANGED * len(copy)), replace=False):
        while copy[i] == document[i]:
            copy[i] = pool[rng.integers(len(pool))]
    return copy


def describe(pairs: np.ndarray, removed: np.ndarray, seconds: float, megabytes: int) -> dict[str, Any]:
    """Columns of a row: recall and precision of the removed documents, time and memory of phase 2."""
    found = removed[pairs].any(axis=1)
    return {
        "recall": f"{found.mean():.4f}",
        "precision": f"{found.sum() / max(removed.sum(), 1):.4f}",
        "removed": int(removed.sum()),
        "phase 2 s": seconds,
        "phase 2 MB": megabytes,
    }


def write_signatures(texts: list[str], shingle: int, path: Path) -> tuple[float, float]:
    """Write the signatures of all documents; returns the seconds for their words, and for the signatures."""
    hashes, words = timed(lambda: [word_hashes.word_hashes(text) for text in texts])
    signatures, taken = timed(lambda: [minhash.signature(one, shingle) for one in hashes])
    with path.open("wb") as file:
        np.save(file, np.stack(signatures))
    return words["seconds"], taken["seconds"]


def remove(path: Path, threshold: float) -> tuple[np.ndarray, float, int]:
    """Phase 2; returns (removed, seconds, peak RSS of this process in MB)."""
    signatures = np.load(path, mmap_mode="r")
    active = np.ones(len(signatures), bool)
    near_duplicates.find_near_duplicates(signatures[:2], active[:2], threshold)  # compiles
    removed, timing = timed(lambda: near_duplicates.find_near_duplicates(signatures, active, threshold))
    return removed, timing["seconds"], harness.memory_megabytes()


def measure_peer(texts: list[str], pairs: np.ndarray, shingle: int, threshold: float) -> dict[str, Any]:
    """The same greedy algorithm with datasketch's MinHash and MinHashLSH, verified by their estimate."""
    import datasketch

    permutations = minhash.DEFAULT_PERMUTATIONS

    def sign(text: str) -> datasketch.MinHash:
        tokens = re.findall(r"\w+", text.lower())
        shingles = {" ".join(tokens[i : i + shingle]).encode() for i in range(max(len(tokens) - shingle + 1, 1))}
        one = datasketch.MinHash(num_perm=permutations)
        one.update_batch(shingles)
        return one

    def decide() -> np.ndarray:
        index = datasketch.MinHashLSH(threshold=threshold, num_perm=permutations)
        removed = np.zeros(len(signatures), bool)
        for i, one in enumerate(signatures):
            if any(one.jaccard(signatures[other]) >= threshold for other in index.query(one)):
                removed[i] = True
            else:
                index.insert(i, one)
        return removed

    signatures, phase_1 = timed(lambda: [sign(text) for text in texts])
    before = harness.memory_megabytes(field="VmRSS")
    removed, phase_2 = timed(decide)
    index = harness.memory_megabytes(field="VmRSS") - before  # of the index alone, without signatures
    about = {"name": f"datasketch {datasketch.__version__}", "shingle": shingle, "threshold": threshold}
    speed = {"phase 1 MB/s": sum(len(text.encode()) for text in texts) / 1e6 / phase_1["seconds"]}
    return about | describe(pairs, removed, phase_2["seconds"], index) | speed


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
