"""Near-duplicate removal measured: recall, precision, memory and speed on planted copies.

    python scripts/benchmarks/bench_duplicates.py books/*.md --json duplicates.json
    python scripts/benchmarks/bench_duplicates.py books/*.md --shingles 1,2,3,4,5 --thresholds 0.3,0.4,0.5,0.6,0.7,0.8
    python scripts/benchmarks/bench_duplicates.py books/*.md --peer     # and datasketch, which must be installed
    python scripts/benchmarks/bench_duplicates.py --simulated 1000000,50000000 --memory-mb 512
    python scripts/benchmarks/bench_duplicates.py --simulated 1000000 --engines local,direct,dask

With texts, documents have 100 to 1,000 words (log-uniform). One in ten is a copy of another one with 5 % of its words
replaced by random words of the text; one in ten shares a passage of 30 % of its words with another one; the rest are
distinct passages of the files and, when these are used up, random sequences of their sentences. Their order is random.

A planted pair counts as found if one of the two was removed; all other removals reduce precision. Phase 1 (hashes, one
core) is timed in this process; phase 2 runs in its own process to measure its peak memory (of datasketch: its index).

`--simulated` decides on signatures that are computed from the index of a document when they are read: one in ten is a
copy with a similarity of 0.75, one in a hundred has one of ten pieces of boilerplate, one in a hundred has one of ten
common signatures. CPU time and peak resident memory are those of all processes together, after a decision on few
documents that compiles; a page that several processes share counts for each. The hash of the kept documents must be the
same on all engines.
"""

import argparse
import contextlib
import functools
import hashlib
import multiprocessing
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from simulated_signatures import SimulatedSignatures, planted

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, timed
from bert_jax.errors import UserError
from data_prep.builder.engines import Engine
from data_prep.builder.engines.local import LocalEngine
from data_prep.duplicates import minhash, near_duplicates, word_hashes
from data_prep.duplicates.grouped_steps import RowReader

COPIES, SHARING, SHARED_PART, CHANGED = 0.1, 0.1, 0.3, 0.05
SHORTEST, LONGEST = 100, 1000
LONGEST_SENTENCE = 40
WARM_UP = 20_000


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plant copies, then remove near-duplicates with every shingle and threshold."""
    if options.simulated:
        return {"simulated": [row for name in options.engines for row in simulate(name, options)]}
    if not options.files:
        raise UserError("give text files, or --simulated")
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
    add("files", nargs="*", type=Path, help="text in UTF-8")
    add("--documents", type=harness.positive, default=100_000)
    add("--shingles", type=listed(int), default=[minhash.DEFAULT_SHINGLE_WORDS])
    add("--thresholds", type=listed(float), default=[near_duplicates.DEFAULT_THRESHOLD])
    add("--simulated", type=listed(int), metavar="N,...", help="numbers of simulated documents")
    add("--engines", type=listed(str), default=["local"], help="of local, direct and dask, with --simulated")
    add("--workers", type=harness.positive, default=2)
    add("--memory-mb", type=harness.positive, help="of all workers, with --engines local")
    add("--scratch", type=Path, help="directory for temporary files")
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


class StoredSignatures:
    """A reader of signatures in a file of numpy."""

    def __init__(self, path: Path, documents: int, per_range: int):
        self._path = path
        self.starts = ranges(documents, per_range)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """All documents of a range, and their signatures."""
        signatures = np.array(np.load(self._path, mmap_mode="r")[slice(*self.starts[index : index + 2])])
        return np.ones(len(signatures), bool), signatures


def ranges(documents: int, per_range: int) -> np.ndarray:
    """First document of each range, and their end."""
    return np.append(np.arange(0, documents, per_range), documents)


def remove(path: Path, threshold: float) -> tuple[np.ndarray, float, int]:
    """Phase 2; returns (removed, seconds, peak RSS of this process in MB)."""
    documents = len(np.load(path, mmap_mode="r"))
    with LocalEngine(1) as engine:
        decide(StoredSignatures(path, 2, 2), engine, path.parent, threshold)  # compiles
        per_range = near_duplicates.documents_per_range(minhash.DEFAULT_PERMUTATIONS, engine.memory_bytes)
        reader = StoredSignatures(path, documents, per_range)
        removed, timing = timed(lambda: decide(reader, engine, path.parent, threshold))
    return removed, timing["seconds"], harness.memory_megabytes()


class WithoutRepeated:
    """A reader of the same rows; those that are repeated are not considered."""

    def __init__(self, reader: RowReader, repeated: np.ndarray, path: Path):
        np.save(path, repeated)
        self._reader, self._path = reader, path
        self.starts = reader.starts

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows to consider, and signatures, of a range."""
        active, signatures = self._reader.read(index)
        return active & ~np.load(self._path, mmap_mode="r")[slice(*self.starts[index : index + 2])], signatures


def decide(reader: RowReader, engine: Engine, scratch: Path, threshold: float) -> np.ndarray:
    """Which documents are removed, bool [documents], as in a build."""

    def run(steps):
        return engine.run_steps(steps, str(scratch), scratch)

    repeated = near_duplicates.find_repeated_signatures(reader, run, engine.memory_bytes)
    if repeated.any():
        reader = WithoutRepeated(reader, repeated, scratch / "repeated.npy")
    permutations = minhash.DEFAULT_PERMUTATIONS
    return repeated | near_duplicates.find_near_duplicates(reader, run, permutations, threshold, engine.memory_bytes)


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


def simulate(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one engine, each for a number of simulated documents."""
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch, open_engine(name, options) as engine:
        per_range = near_duplicates.documents_per_range(minhash.DEFAULT_PERMUTATIONS, engine.memory_bytes)
        for documents in [WARM_UP, *options.simulated]:
            copies = planted(documents)
            reader = SimulatedSignatures(ranges(documents, per_range))
            with ProcessTree() as tree:
                removed, timing = timed(lambda: decide(reader, engine, Path(scratch), options.thresholds[0]))  # noqa: B023
            found = describe_removed(copies, removed)
            cost = {"CPU us per document": tree.cpu_seconds / documents * 1e6, "seconds": timing["seconds"]}
            rows.append({"engine": name, "documents": documents, **cost, "peak MB": tree.peak_megabytes, **found})
            harness.progress(str(rows[-1]))
    return rows[1:]


def describe_removed(copies: np.ndarray, removed: np.ndarray) -> dict[str, Any]:
    """Columns of a row: recall and precision for copies whose index is known; a hash of the decision."""
    found = int((copies & removed).sum())
    return {
        "recall": f"{found / copies.sum():.5f}",
        "precision": f"{found / removed.sum():.5f}",
        "removed": int(removed.sum()),
        "decision": hashlib.sha256(np.packbits(removed)).hexdigest()[:12],
    }


@contextlib.contextmanager
def open_engine(name: str, options: argparse.Namespace) -> Iterator[Engine]:
    """The engine of a name in `--engines`."""
    with contextlib.ExitStack() as stack:
        if name == "local":
            memory_bytes = options.memory_mb << 20 if options.memory_mb else None
            yield stack.enter_context(LocalEngine(options.workers, memory_bytes))
            return
        from data_prep.builder.engines.beam import BeamEngine

        if name == "dask":
            import distributed

            cluster = distributed.LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=None)
            stack.enter_context(cluster)
            # By default, Dask gives 128 ranges to one worker.
            flags = [f"--dask_client_address={cluster.scheduler_address}", "--dask_partition_size=1"]
            yield BeamEngine("DaskRunner", flags)
        else:
            yield BeamEngine("DirectRunner")


class ProcessTree:
    """Measures this process and those that it started: a context manager.

    Attributes:
      cpu_seconds: between begin and end, of processes that still exist at the end.
      peak_megabytes: largest sum of resident memory.
    """

    def __enter__(self):
        self.peak_megabytes, self._ended = 0, threading.Event()
        self._before = self._cpu_seconds()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()
        self.cpu_seconds = self._cpu_seconds() - self._before

    def _watch(self):
        while not self._ended.wait(0.1):
            memory = 0
            for pid in self._processes():
                with contextlib.suppress(OSError):
                    memory += harness.memory_megabytes(pid, "VmRSS")
            self.peak_megabytes = max(self.peak_megabytes, memory)

    def _cpu_seconds(self) -> float:
        ticks = 0
        for pid in self._processes():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _processes(self) -> list[str]:
        processes = [str(os.getpid())]
        for pid in processes:  # grows
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    processes += task.read_text().split()
        return processes


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
