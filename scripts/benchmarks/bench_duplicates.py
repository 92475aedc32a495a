"""Near-duplicate removal measured: recall, precision, memory and speed on planted copies.

    python scripts/benchmarks/bench_duplicates.py                       # synthetic text with Zipf's distribution
    python scripts/benchmarks/bench_duplicates.py books/*.md --json duplicates.json
    python scripts/benchmarks/bench_duplicates.py books/*.md --shingles 1,2,3,4,5 --thresholds 0.3,0.4,0.5,0.6,0.7,0.8
    python scripts/benchmarks/bench_duplicates.py books/*.md --peer     # and datasketch, which must be installed

Documents have 100 to 1,000 words (log-uniform). One in ten is a copy of another one with 5 % of its words replaced by
random words of the text; one in ten shares a passage of 30 % of its words with another one; the rest are distinct
passages of the files and, when these are used up, random sequences of their sentences. Their order is random.

A planted pair counts as found if one of the two was removed; all other removals reduce precision. Phase 1 (hashes, one
core) is timed in this process; phase 2 runs in its own process to measure its peak memory.
"""

import argparse
import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import listed, timed

from data_prep.duplicates import minhash, near_duplicates, text_keys, word_hashes
from data_prep.duplicates.ngram_index import NgramIndex

COPIES, SHARING, SHARED_PART = 0.1, 0.1, 0.3
SHORTEST, LONGEST = 100, 1000
SHORT = 200
"""recall is also reported for documents with fewer words, where it varies most"""
LONGEST_SENTENCE = 40
ZIPF_WORDS, ZIPF_TEXT = 50_000, 2_000_000
HEAD = "shingle  threshold   recall  (short)  precision  removed  phase 1 MB/s  phase 2 s  peak RSS MB"


@dataclasses.dataclass(frozen=True)
class Planted:
    """Documents, and the pairs (indices of a document and its copy) among them."""

    texts: list[str]
    pairs: np.ndarray
    """int64 [num_pairs, 2]"""
    short: np.ndarray
    """bool [num_pairs]"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plant copies, then remove near-duplicates with every shingle and threshold."""
    rng = np.random.default_rng(options.seed)
    planted = plant(read_text(options.files, rng), options.documents, options.changed, rng)
    size = sum(len(document.encode()) for document in planted.texts)
    harness.progress(f"{len(planted.texts)} documents, {size / 1e6:.0f} MB, {len(planted.pairs)} planted copies")
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for shingle in options.shingles:
            path = Path(scratch) / f"signatures_{shingle}.npy"
            write = functools.partial(write_signatures, planted.texts, shingle, options.permutations, path)
            phase_1 = timed(write)[1]["seconds"]
            for threshold in options.thresholds:
                removed, phase_2, rss = harness.in_new_process(remove, str(path), threshold, options.memory_mb << 20)
                runs.append(describe(planted, removed, shingle, threshold, size / 1e6 / phase_1, phase_2, rss))
                harness.progress(line_of(runs[-1]))
    if options.peer:
        runs.append(measure_peer(planted, options, size))
    return {
        "documents": len(planted.texts),
        "text_bytes": size,
        "planted": len(planted.pairs),
        "changed": options.changed,
        "permutations": options.permutations,
        "speed_mb_s": measure_speed(planted.texts[:20_000]),
        "runs": runs,
    }


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("files", nargs="*", type=Path, help="text in UTF-8; synthetic text when none is given")
    add("--documents", type=harness.positive, default=100_000)
    add("--changed", type=float, default=0.05, help="share of a copy's words that are replaced")
    add("--shingles", type=listed(int), default=[minhash.DEFAULT_SHINGLE_WORDS])
    add("--thresholds", type=listed(float), default=[near_duplicates.DEFAULT_THRESHOLD])
    add("--permutations", type=int, default=minhash.DEFAULT_PERMUTATIONS)
    add("--memory-mb", type=int, default=near_duplicates.DEFAULT_MEMORY_BYTES >> 20)
    add("--peer", action="store_true", help="also datasketch, with the first shingle and threshold")
    add("--seed", type=int, default=0)


def read_text(files: list[Path], rng: np.random.Generator) -> str:
    """Text of the files, or sentences of random words with frequencies proportional to 1 / rank."""
    if files:
        return "\n".join(file.read_text() for file in files)
    letters = rng.integers(ord("a"), ord("z") + 1, (ZIPF_WORDS, 8)).astype(np.uint8)
    vocabulary = [bytes(row[: 2 + i % 7]).decode() for i, row in enumerate(letters)]
    weights = 1 / np.arange(1, ZIPF_WORDS + 1)
    drawn = rng.choice(ZIPF_WORDS, ZIPF_TEXT, p=weights / weights.sum())
    return " ".join(vocabulary[word] + "." * (i % 20 == 19) for i, word in enumerate(drawn))


def plant(text: str, documents: int, changed: float, rng: np.random.Generator) -> Planted:
    """Make documents as described in the module docstring."""
    pool = text.split()
    sentences = short_sentences(text)
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
        word_lists.append(replace_words(word_lists[source], pool, changed, rng))
    order = rng.permutation(len(word_lists))
    place = np.argsort(order)
    short = np.array([len(word_lists[source]) < SHORT for source, _ in pairs])
    return Planted([" ".join(word_lists[i]) for i in order], place[np.array(pairs)], short)


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


def replace_words(document: list[str], pool: list[str], share: float, rng: np.random.Generator) -> list[str]:
    """A copy with a share of its words replaced by different words, drawn with the frequencies of the text."""
    copy = list(document)
    for i in rng.choice(len(copy), round(share * len(copy)), replace=False):
        while copy[i] == document[i]:
            copy[i] = pool[rng.integers(len(pool))]
    return copy


def describe(
    planted: Planted, removed: np.ndarray, shingle: int, threshold: float, rate: float, seconds: float, rss: float
) -> dict[str, Any]:
    """A row of the table, with recall and precision of the removed documents."""
    found = removed[planted.pairs].any(axis=1)
    return {
        "name": "bert_jax",
        "shingle_words": shingle,
        "threshold": threshold,
        "recall": float(found.mean()),
        "recall_short": float(found[planted.short].mean()),
        "precision": float(found.sum() / max(removed.sum(), 1)),
        "removed": int(removed.sum()),
        "phase_1_mb_s": rate,
        "phase_2_s": seconds,
        "phase_2_peak_rss_mb": rss,
    }


def measure_speed(texts: list[str]) -> dict[str, float]:
    """MB/s of each function that runs on every document."""
    data = [text.encode() for text in texts]
    hashes = [word_hashes.word_hashes(text) for text in texts]
    index = NgramIndex.build(texts[: len(texts) // 10])
    ends = [np.arange(len(one) % 500, len(one) + 1, 500) for one in data]
    cases: dict[str, Callable[[int], object]] = {
        "word_hashes": lambda i: word_hashes.word_hashes(texts[i]),
        "signature": lambda i: minhash.signature(hashes[i]),
        "text_key": lambda i: text_keys.text_key(data[i]),
        "paragraph_keys": lambda i: text_keys.paragraph_keys(data[i], ends[i]),
        "ngram_hits": lambda i: index.hits(hashes[i]),
    }
    rates = {}
    for name, call in cases.items():
        call(0)  # compiles
        _, timing = timed(lambda call=call: [call(i) for i in range(len(texts))])
        rates[name] = sum(map(len, data)) / 1e6 / timing["seconds"]
    return rates


def write_signatures(texts: list[str], shingle: int, permutations: int, path: Path) -> None:
    """Compute words and signatures of all documents."""
    out = np.lib.format.open_memmap(path, "w+", np.uint32, (len(texts), permutations))
    for i, text in enumerate(texts):
        out[i] = minhash.signature(word_hashes.word_hashes(text), shingle, permutations)


def remove(path: str, threshold: float, memory_bytes: int) -> tuple[np.ndarray, float, int]:
    """Phase 2; returns (removed, seconds, peak RSS of this process in MB)."""
    signatures = np.load(path, mmap_mode="r")
    active = np.ones(len(signatures), bool)
    near_duplicates.find_near_duplicates(signatures[:2], active[:2], threshold)  # compiles
    find = functools.partial(near_duplicates.find_near_duplicates, signatures, active, threshold, memory_bytes)
    removed, timing = timed(find)
    return removed, timing["seconds"], harness.memory_megabytes()


def measure_peer(planted: Planted, options: argparse.Namespace, size: int) -> dict[str, Any]:
    """The same greedy algorithm with datasketch's MinHash and MinHashLSH, verified by their estimate."""
    import datasketch

    shingle, threshold = options.shingles[0], options.thresholds[0]

    def sign(text: str) -> datasketch.MinHash:
        tokens = re.findall(r"\w+", text.lower())
        shingles = {" ".join(tokens[i : i + shingle]).encode() for i in range(max(len(tokens) - shingle + 1, 1))}
        one = datasketch.MinHash(num_perm=options.permutations)
        one.update_batch(shingles)
        return one

    def decide() -> np.ndarray:
        index = datasketch.MinHashLSH(threshold=threshold, num_perm=options.permutations)
        removed = np.zeros(len(signatures), bool)
        for i, one in enumerate(signatures):
            if any(one.jaccard(signatures[other]) >= threshold for other in index.query(one)):
                removed[i] = True
            else:
                index.insert(i, one)
        return removed

    signatures, phase_1 = timed(lambda: [sign(text) for text in planted.texts])
    before = harness.memory_megabytes(field="VmRSS")
    removed, phase_2 = timed(decide)
    rss = harness.memory_megabytes(field="VmRSS") - before  # of the index alone, without signatures
    rate = size / 1e6 / phase_1["seconds"]
    row = describe(planted, removed, shingle, threshold, rate, phase_2["seconds"], rss)
    return row | {"name": f"datasketch {datasketch.__version__}"}


def line_of(run: dict[str, Any]) -> str:
    """A row of the table as text."""
    return (
        f"{run['shingle_words']:7} {run['threshold']:10.2f} {run['recall']:8.4f} {run['recall_short']:8.4f}"
        f" {run['precision']:10.4f} {run['removed']:8} {run['phase_1_mb_s']:13.1f} {run['phase_2_s']:10.2f}"
        f" {run['phase_2_peak_rss_mb']:12.0f}  {run['name']}"
    )


def render(report: dict[str, Any]) -> list[str]:
    """Sizes, speeds, and a row per run."""
    sizes = f"{report['documents']} documents, {report['text_bytes'] / 1e6:.0f} MB, {report['planted']} planted copies"
    speeds = ", ".join(f"{name} {rate:.0f}" for name, rate in report["speed_mb_s"].items())
    return [f"{harness.header(report)}; {sizes}", f"one core, MB/s: {speeds}", HEAD, *map(line_of, report["runs"])]


main = functools.partial(harness.run, __doc__, flags, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
