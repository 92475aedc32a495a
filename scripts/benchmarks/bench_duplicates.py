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
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in [str(ROOT)] if path not in sys.path]

from data_prep.duplicates import minhash, near_duplicates, text_keys, word_hashes  # noqa: E402
from data_prep.duplicates.ngram_index import NgramIndex  # noqa: E402

COPIES, SHARING, SHARED_PART = 0.1, 0.1, 0.3
SHORTEST, LONGEST = 100, 1000
SHORT = 200
"""recall is also reported for documents with fewer words, where it varies most"""
LONGEST_SENTENCE = 40
ZIPF_WORDS, ZIPF_TEXT = 50_000, 2_000_000


@dataclasses.dataclass(frozen=True)
class Planted:
    """Documents, and the pairs (indices of a document and its copy) among them."""

    texts: list[str]
    pairs: np.ndarray
    """int64 [num_pairs, 2]"""
    short: np.ndarray
    """bool [num_pairs]"""


def main() -> None:
    """Run the benchmark."""
    options = parse_options()
    rng = np.random.default_rng(options.seed)
    text = read_text(options.files, rng)
    planted = plant(text, options.documents, options.changed, rng)
    size = sum(len(document.encode()) for document in planted.texts)
    print(f"{len(planted.texts)} documents, {size / 1e6:.0f} MB, {len(planted.pairs)} planted copies")
    report = {
        "documents": len(planted.texts),
        "text_bytes": size,
        "planted": len(planted.pairs),
        "changed": options.changed,
        "permutations": options.permutations,
        "speed_mb_s": measure_speed(planted.texts[:20_000]),
        "runs": [],
    }
    print("one core, MB/s:", ", ".join(f"{name} {rate:.0f}" for name, rate in report["speed_mb_s"].items()))
    print("shingle  threshold   recall  (short)  precision  removed  phase 1 MB/s  phase 2 s  peak RSS MB")
    with tempfile.TemporaryDirectory() as scratch:
        for shingle in options.shingles:
            path = Path(scratch) / f"signatures_{shingle}.npy"
            seconds = write_signatures(planted.texts, shingle, options.permutations, path)
            for threshold in options.thresholds:
                removed, phase_2, rss = in_new_process(str(path), threshold, options.memory_mb << 20)
                run = {"shingle_words": shingle, "threshold": threshold, **score(planted, removed)}
                run |= {"phase_1_mb_s": size / 1e6 / seconds, "phase_2_s": phase_2, "phase_2_peak_rss_mb": rss}
                report["runs"].append(run)
                print_run(run)
    if options.peer:
        report["peer"] = measure_peer(planted, options, size)
        print_run(report["peer"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="text in UTF-8; synthetic text when none is given")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--changed", type=float, default=0.05, help="share of a copy's words that are replaced")
    parser.add_argument("--shingles", type=comma_separated(int), default=[minhash.DEFAULT_SHINGLE_WORDS])
    parser.add_argument("--thresholds", type=comma_separated(float), default=[near_duplicates.DEFAULT_THRESHOLD])
    parser.add_argument("--permutations", type=int, default=minhash.DEFAULT_PERMUTATIONS)
    parser.add_argument("--memory-mb", type=int, default=near_duplicates.DEFAULT_MEMORY_BYTES >> 20)
    parser.add_argument("--peer", action="store_true", help="also datasketch, with the first shingle and threshold")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def comma_separated(kind: Callable) -> Callable:
    """Parser of comma-separated values."""
    return lambda text: [kind(value) for value in text.split(",")]


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


def score(planted: Planted, removed: np.ndarray) -> dict:
    """Recall and precision of the removed documents."""
    found = removed[planted.pairs].any(axis=1)
    return {
        "recall": float(found.mean()),
        "recall_short": float(found[planted.short].mean()),
        "precision": float(found.sum() / max(removed.sum(), 1)),
        "removed": int(removed.sum()),
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
        start = time.perf_counter()
        for i in range(len(texts)):
            call(i)
        rates[name] = sum(map(len, data)) / 1e6 / (time.perf_counter() - start)
    return rates


def write_signatures(texts: list[str], shingle: int, permutations: int, path: Path) -> float:
    """Compute words and signatures of all documents; returns the seconds."""
    start = time.perf_counter()
    out = np.lib.format.open_memmap(path, "w+", np.uint32, (len(texts), permutations))
    for i, text in enumerate(texts):
        out[i] = minhash.signature(word_hashes.word_hashes(text), shingle, permutations)
    return time.perf_counter() - start


def in_new_process(*arguments: object) -> tuple[np.ndarray, float, float]:
    """Call `remove` in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(remove, arguments)


def remove(path: str, threshold: float, memory_bytes: int) -> tuple[np.ndarray, float, float]:
    """Phase 2; returns (removed, seconds, peak RSS of this process in MB)."""
    signatures = np.load(path, mmap_mode="r")
    active = np.ones(len(signatures), bool)
    near_duplicates.find_near_duplicates(signatures[:2], active[:2], threshold)  # compiles
    start = time.perf_counter()
    removed = near_duplicates.find_near_duplicates(signatures, active, threshold, memory_bytes)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    return removed, seconds, int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e6


def measure_peer(planted: Planted, options: argparse.Namespace, size: int) -> dict:
    """The same greedy algorithm with datasketch's MinHash and MinHashLSH, verified by their estimate."""
    import datasketch

    shingle, threshold = options.shingles[0], options.thresholds[0]
    start = time.perf_counter()
    signatures = []
    for text in planted.texts:
        tokens = re.findall(r"\w+", text.lower())
        shingles = {" ".join(tokens[i : i + shingle]).encode() for i in range(max(len(tokens) - shingle + 1, 1))}
        one = datasketch.MinHash(num_perm=options.permutations)
        one.update_batch(shingles)
        signatures.append(one)
    phase_1 = time.perf_counter() - start
    start = time.perf_counter()
    index = datasketch.MinHashLSH(threshold=threshold, num_perm=options.permutations)
    removed = np.zeros(len(signatures), bool)
    before = resident_mb()
    for i, one in enumerate(signatures):
        if any(one.jaccard(signatures[other]) >= threshold for other in index.query(one)):
            removed[i] = True
        else:
            index.insert(i, one)
    return {
        "name": f"datasketch {datasketch.__version__}",
        "shingle_words": shingle,
        "threshold": threshold,
        **score(planted, removed),
        "phase_1_mb_s": size / 1e6 / phase_1,
        "phase_2_s": time.perf_counter() - start,
        "phase_2_peak_rss_mb": resident_mb() - before,  # of the index alone, without signatures
    }


def resident_mb() -> float:
    """Resident memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024 / 1e6


def print_run(run: dict) -> None:
    """Print a row of the table."""
    print(
        f"{run['shingle_words']:7} {run['threshold']:10.2f} {run['recall']:8.4f} {run['recall_short']:8.4f}"
        f" {run['precision']:10.4f} {run['removed']:8} {run['phase_1_mb_s']:13.1f} {run['phase_2_s']:10.2f}"
        f" {run['phase_2_peak_rss_mb']:12.0f}  {run.get('name', '')}",
        flush=True,
    )


if __name__ == "__main__":
    main()
