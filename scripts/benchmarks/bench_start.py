"""The start of a run on a corpus of many documents: seconds and memory until a process has its first rows.

    python scripts/benchmarks/bench_start.py write --directory DIR --documents 100000000
    python scripts/benchmarks/bench_start.py start --directory DIR [--processes 64] [--cold]

`write` makes a corpus with 1 to 15 sentences per document (8 on average) of 20 tokens on average, 1 % of them with 61
to 200: one shard and its arrays, repeated. All shards are links to one file; 100 million documents need 3.3 GB.
`start` does what a run does before its first step, without jax: opens both splits, plans the phases, compares files
with corpus.json (`--data.verify counts`), reads the first batch. `--cold` removes them from the page cache first.
Memory is the maximum of samples every 20 ms: `anonymous` belongs to the process; pages of `mapped` files are shared by
all processes, and given back when memory is needed.
"""

import argparse
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, positive
from bert_jax.config import Config, DataConfig, ObjectiveConfig, Phase
from bert_jax.data.batch import SpecialIds
from bert_jax.data.batches import HeldOutRows, TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.data.integrity import DATASET_INFO, check_corpus_files
from bert_jax.data.manifest import FORMAT_VERSION, MANIFEST, SOURCE_FILES, SPLITS, TOKENIZER, array_file, shard_file

NAME = "many"
VOCAB = 30_522
SHARD_DOCUMENTS = 200_000
"""64 MB of tokens"""
SPECIAL_IDS = SpecialIds(0, 101, 102)


def write_shard(path: epath.Path, documents: int) -> dict[str, np.ndarray]:
    """Writes a shard; returns its arrays, see `ShardWriter.finish`."""
    from data_prep.builder.groups import Group
    from data_prep.builder.shards import DocumentPart, ShardWriter

    rng = np.random.default_rng(0)
    sentences = rng.integers(1, 16, documents)
    lengths = rng.integers(2, 38, sentences.sum())
    long = rng.random(len(lengths)) < 0.01
    lengths[long] = rng.integers(61, 201, long.sum())
    tokens = rng.integers(1000, VOCAB, lengths.sum()).astype("<u2")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    with ShardWriter(np.ones(VOCAB, bool), 100, 0) as writer:
        at = 0
        for count in sentences.tolist():
            own = lengths[at : at + count]
            writer.add_document(
                [DocumentPart(tokens[ends[at] : ends[at + count]], own, 0, 0, "", Group("texts", "en", None))]
            )
            at += count
        arrays, _ = writer.finish(path)
    return arrays


def write_array(path: epath.Path, values: np.ndarray, repeats: int) -> None:
    """Writes `values` several times, or offsets made of them (int64) by continued sums."""
    is_offsets = values.dtype == np.uint32
    dtype = np.dtype("<i8") if is_offsets else values.dtype
    with path.open("wb") as file:
        shape = (len(values) * repeats + is_offsets,)
        np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})
        ends, total = np.cumsum(values, dtype="<i8"), int(values.sum(dtype=np.int64))
        if is_offsets:
            file.write(np.zeros(1, "<i8").tobytes())
        for repeat in range(repeats):
            file.write((ends + repeat * total if is_offsets else values).tobytes())


def write(options: argparse.Namespace) -> dict[str, Any]:
    """Writes the corpus."""
    from data_prep.sources.files import file_entry

    directory = epath.Path(options.directory)
    directory.mkdir(parents=True)
    documents = min(SHARD_DOCUMENTS, options.documents)
    arrays = write_shard(directory / "shard", documents)
    shard, files, splits = file_entry(directory / "shard"), {}, {}
    for split, shards in (("train", options.documents // documents), ("validation", 1)):
        contents = {
            "sentence_lengths": (arrays["sentence_lengths"], shards),
            "document_offsets": (arrays["document_sentences"], shards),
            "record_offsets": (arrays["record_sentences"], shards),
            "token_counts": (arrays["token_counts"] * shards, 1),
            "word_starts": (arrays["word_starts"], shards),
        }
        for array, content in contents.items():
            path = directory / array_file(split, array)
            write_array(path, *content)
            files[path.name] = file_entry(path)
        names = [shard_file(NAME, split, index, shards) for index in range(shards)]
        for name in names:
            (Path(options.directory) / name).hardlink_to(Path(options.directory) / "shard")
        files |= dict.fromkeys(names, shard)
        records = len(arrays["record_sentences"])
        splits[split] = {
            "documents": documents * shards,
            "sentences": len(arrays["sentence_lengths"]) * shards,
            "tokens": int(arrays["token_counts"].sum()) * shards,
            "records": records * shards,
            "unknown_tokens": 0,
            "text_bytes": 0,
            "unknown_bytes": 0,
            "word_start_bytes": len(arrays["word_starts"]) * shards,
            "shards": [{"file": name, "records": records} for name in names],
        }
    (directory / "shard").unlink()
    for name in (TOKENIZER, SOURCE_FILES, DATASET_INFO, "features.json"):
        (directory / name).write_text("{}")
        files[name] = file_entry(directory / name)
    manifest = {"format_version": FORMAT_VERSION, "name": NAME, "vocab_size": VOCAB}
    manifest |= {"tokenizer": {"fingerprint": "none"}, "splits": splits, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    counts = {name: splits["train"][name] for name in ("documents", "sentences", "tokens")}
    return {"written": [counts | {"shards": len(splits["train"]["shards"])}]}


class Memory(contextlib.AbstractContextManager):
    """The maximum of this process' resident memory, in MB, by kind."""

    def __init__(self):
        self.peaks = {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
            current = {words[0].rstrip(":"): words[1] for words in lines if len(words) == 3}
            self.peaks = {field: max(peak, int(current[field]) // 1024) for field, peak in self.peaks.items()}
            if self._done.wait(0.02):
                return


@contextlib.contextmanager
def clocked(row: dict[str, Any], name: str) -> Iterator[None]:
    """Adds seconds to a row."""
    begin = time.perf_counter()
    yield
    row[f"{name} s"] = round(time.perf_counter() - begin, 2)


def forget_pages(directory: Path) -> None:
    """Removes the files from the page cache."""
    for path in directory.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Starts the last process of each number of processes."""
    results = []
    for processes in options.processes:
        if options.cold:
            forget_pages(Path(options.directory))
        # As phases of BERT: pairs, rows of 128 and then of 512 tokens.
        phases = tuple(Phase(steps=10**5, seq_len=length, batch_size=options.batch_size) for length in (128, 512))
        data = DataConfig(format="segment_pair", verify="counts")
        config = Config(name="bench", data=data, objective=ObjectiveConfig(pair="none"), phases=phases)
        row: dict[str, Any] = {"processes": processes, "cold": options.cold}
        process = processes - 1, processes
        before = time.process_time()
        with Memory() as memory, clocked(row, "all"):
            with clocked(row, "open"):
                train, held_out = (Corpus.open(options.directory, split) for split in SPLITS)
            with clocked(row, "plan"):
                stream = TrainingStream([train], [1.0], config, SPECIAL_IDS, *process)
                validation = HeldOutRows([held_out], data, SPECIAL_IDS, *process)
                for phase in phases:
                    stream.corpora[0].epoch_planner(phase.seq_len)
                validation.corpora[0].epoch_planner(phases[-1].seq_len)
            with clocked(row, "check"):
                check_corpus_files([train], "counts", *process, keep_open=True)
            with clocked(row, "rows"):
                stream.rows_at(stream.normalize_cursor(Cursor()))
        row["CPU s"] = round(time.process_time() - before, 2)
        results.append(row | {"anonymous MB": memory.peaks["RssAnon"], "mapped MB": memory.peaks["RssFile"]})
        results[-1]["all MB"] = memory.peaks["VmRSS"]
    return {"start": results}


MODES = {"write": write, "start": start}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rows of a mode."""
    return MODES[options.mode](options)


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("mode", choices=MODES)
    add("--directory", required=True)
    add("--documents", type=positive, default=100_000_000)
    add("--processes", type=listed(positive), default=[1])
    add("--batch-size", type=positive, default=4096)
    add("--cold", action="store_true")


main = partial(harness.run, __doc__, flags, measure, harness.report_lines)


if __name__ == "__main__":
    raise SystemExit(main())
