"""The training stream: the reader against Grain's packing alone, plans of huge corpora, and what processes read.

    python scripts/benchmarks/bench_stream.py reader --corpus DIR [--corpus DIR ...] [--formats ...] [--seq-lens 128]
    python scripts/benchmarks/bench_stream.py plan --documents 10000000 --tokens 2000000000
    python scripts/benchmarks/bench_stream.py amplification --documents 400 --tokens 40000000 --processes 1,64,256,512

`reader` runs on one core and alternates between bert_jax's reader (read, plan, pack and collate records in the page
cache) and Grain's FirstFitPackIterDataset, which only packs ready arrays of the same examples. `plan` creates length
arrays in memory and reads a first batch and a batch in mid-epoch in each format; it prints the peak memory of the
process. How long a run waits for rows is in its metrics.jsonl (`data_wait`). `amplification` divides the tokens of the
records that a process reads by those of its rows, over consecutive batches of one run; it is the mean of 8 processes.
"""

import argparse
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np

from bert_jax import config as config_lib
from bert_jax.bench import harness
from bert_jax.bench.harness import listed, one_of, positive
from bert_jax.config import Config, DataConfig, ObjectiveConfig, Phase
from bert_jax.data.batch import SpecialIds
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition, Cursor
from bert_jax.data.manifest import MAX_RECORD_TOKENS
from bert_jax.data.record import Record

FORMATS = ("segment_pair", "sentence_order", "full_sentences", "doc_sentences", "sentence_pair")
SPECIAL_IDS = SpecialIds(0, 1, 2)
BINS = 128
"""Packing bins of Grain; it was fastest with this number."""
BATCH_TOKENS = 32_768


def make_config(form: str, seq_len: int, batch: int) -> Config:
    """Config of an endless run."""
    return Config(
        name="bench",
        data=DataConfig(format=form),
        objective=ObjectiveConfig(pair="none"),
        phases=(Phase(steps=10**9, seq_len=seq_len, batch_size=batch),),
    )


def stream_batches(corpus: Corpus, form: str, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of bert_jax's stream, read in this thread."""
    stream = TrainingStream([corpus], [1.0], make_config(form, seq_len, BATCH_TOKENS // seq_len), SPECIAL_IDS)
    cursor = stream.normalize_cursor(Cursor())
    while True:
        yield stream.rows_at(cursor)
        cursor = stream.next_cursor(cursor)


def grain_batches(corpus: Corpus, form: str, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of rows that Grain's FirstFit packs from the examples of the stream."""
    config = config_lib.replace(make_config(form, seq_len, 4096), data={"examples_per_row": 1})
    stream = TrainingStream([corpus], [1.0], config, SPECIAL_IDS)
    rows = stream.rows_at(stream.normalize_cursor(Cursor()))
    lengths = (rows["segment_ids"] > 0).sum(1)
    examples = [ids[:n].copy() for ids, n in zip(rows["input_ids"], lengths, strict=True)]
    source = grain.MapDataset.source(examples).map(lambda ids: {"ids": ids})
    parent = source.repeat().to_iter_dataset(grain.ReadOptions(1, 1))
    packed = grain.experimental.FirstFitPackIterDataset(
        parent, length_struct={"ids": seq_len}, num_packing_bins=BINS, seed=0
    )
    return iter(packed.batch(BATCH_TOKENS // seq_len))


def read(batches: Iterator[dict[str, np.ndarray]], seconds: float) -> harness.Timing:
    """Seconds per million tokens without padding, over about `seconds`."""
    tokens, end = 0, time.perf_counter() + seconds
    with harness.measure_seconds() as timing:
        while time.perf_counter() < end:
            batch = next(batches)
            tokens += int((batch["segment_ids" if "segment_ids" in batch else "ids_segment_ids"] > 0).sum())
    return {clock: taken / tokens * 1e6 for clock, taken in timing.items()}


def bench_reader(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both readers in turn for every case."""
    os.sched_setaffinity(0, harness.usable_cores()[:1])
    results = []
    for directory, form, seq_len in itertools.product(options.corpus, options.formats, options.seq_lens):
        corpus = Corpus.open(directory)
        readers = {"ours": stream_batches(corpus, form, seq_len), "grain": grain_batches(corpus, form, seq_len)}
        for batches in readers.values():
            read(batches, 0.3)
        sides = {name: partial(read, batches, options.seconds) for name, batches in readers.items()}
        rows = harness.summary(harness.interleave(sides, options.rounds), "ours", ("seconds",), Mtokens=1)
        about = {"corpus": Path(directory).name, "format": form, "seq_len": seq_len}
        rates = {f"{name}, million tokens/s": row["Mtokens/s"] for name, row in rows.items()}
        ratio = {"times as fast": rows["grain"]["seconds / ours"]}
        results.append(about | rates | ratio | {"fill": packing_efficiency(corpus, form, seq_len)})
    return results


def packing_efficiency(corpus: Corpus, form: str, seq_len: int) -> float:
    """Share of tokens without padding in the rows of an epoch."""
    stream = TrainingStream([corpus], [1.0], make_config(form, seq_len, 1), SPECIAL_IDS)
    rows = tokens = 0
    for window in stream.corpora[0].epoch_windows(seq_len, 0):
        rows, tokens = rows + len(window), tokens + int(window.examples["length"].sum())
    return tokens / rows / seq_len


class LengthsOnly(Corpus):
    """A corpus with lengths only; its token ids are zeros."""

    tokens_read: int

    def records(self, indices: Sequence[int]) -> list[Record]:
        """Records of zeros."""
        records = []
        for index in indices:
            ends = np.cumsum(self.sentence_lengths[self.record_offsets[index] : self.record_offsets[index + 1]])
            self.tokens_read += int(ends[-1])
            records.append(Record(0, 0, np.zeros(ends[-1], np.uint16), ends))
        return records

    @classmethod
    def make(cls, documents: int, tokens: int) -> "LengthsOnly":
        """Sentences of 2 to 38 tokens, 20 on average, in documents with about equal numbers of sentences; records of at
        most `MAX_RECORD_TOKENS` on average.
        """
        rng, sentences = np.random.default_rng(0), tokens // 20
        lengths = np.empty(sentences, np.uint16)
        for part in np.array_split(lengths, sentences // (1 << 22) + 1):
            part[:] = rng.integers(2, 39, len(part), dtype=np.uint16)
        offsets = np.linspace(0, sentences, documents + 1).astype(np.int64)
        per_document = -(-tokens // documents // MAX_RECORD_TOKENS)
        records = np.linspace(offsets[:-1], offsets[1:], per_document, endpoint=False).T.astype(np.int64).ravel()
        corpus = object.__new__(cls)
        corpus.__dict__.update(
            directory="memory",
            split="train",
            name="memory",
            identity="memory",
            vocab_size=1 << 16,
            sentence_lengths=lengths,
            document_offsets=offsets,
            record_offsets=np.append(records, sentences),
            word_starts=np.zeros(0, np.uint8),
            num_tokens=int(lengths.sum(dtype=np.int64)),
            tokens_read=0,
        )
        return corpus


def bench_plan(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds until a batch is ready in a new stream; its records are zeros and cost nothing to read."""
    os.sched_setaffinity(0, harness.usable_cores()[:1])
    corpus, results = LengthsOnly.make(options.documents, options.tokens), []
    arrays = harness.memory_megabytes()

    def first_batch(form: str, seq_len: int, in_middle: bool) -> None:
        stream = TrainingStream([corpus], [1.0], make_config(form, seq_len, 256), SPECIAL_IDS)
        windows = stream.corpora[0].epoch_planner(seq_len).windows
        middle = Cursor(step=5, rows=1280, positions=(CorpusPosition(0, windows // 2, 100),))
        stream.rows_at(stream.normalize_cursor(middle if in_middle else Cursor()))

    for form, seq_len in itertools.product(FORMATS, options.seq_lens):
        first, middle = (harness.timed(partial(first_batch, form, seq_len, one))[1] for one in (False, True))
        times = {"first s": first["seconds"], "middle s": middle["seconds"]}
        peak = {"peak MB": harness.memory_megabytes(), "arrays MB": arrays}
        results.append({"format": form, "seq_len": seq_len} | times | peak)
    return results


def bench_amplification(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens read per token used, for batches of a quarter to four times the tokens of a window."""
    corpus, results = LengthsOnly.make(options.documents, options.tokens), []
    for form, seq_len in itertools.product(options.formats, options.seq_lens):
        for batch in (2**20 // seq_len, 2**24 // seq_len):
            row: dict[str, Any] = {"format": form, "seq_len": seq_len, "batch": batch}
            for processes in options.processes:
                row[f"{processes} processes"] = tokens_read_per_token(corpus, form, seq_len, batch, processes)
            results.append(row)
    return results


def tokens_read_per_token(corpus: LengthsOnly, form: str, seq_len: int, batch: int, processes: int) -> float:
    """Of up to 8 processes, over 4 windows or 8 batches, whichever is more."""
    config, read, used = make_config(form, seq_len, batch), 0, 0
    for process in range(0, processes, max(1, processes // 8)):
        stream = TrainingStream([corpus], [1.0], config, SPECIAL_IDS, process, processes)
        cursor, before = stream.normalize_cursor(Cursor()), corpus.tokens_read
        while dataclasses.astuple(cursor.positions[0]) < (0, 4, 0) or cursor.step < 8:
            rows = stream.rows_at(cursor)
            used += int((rows["segment_ids"] > 0).sum())
            cursor = stream.next_cursor(cursor)
        read += corpus.tokens_read - before
    return read / used


MODES = {"reader": bench_reader, "plan": bench_plan, "amplification": bench_amplification}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rows of a mode."""
    return {options.mode: MODES[options.mode](options)}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("mode", choices=MODES)
    add("--corpus", action="append", default=[])
    add("--formats", type=listed(one_of(*FORMATS)), default=FORMATS)
    add("--seq-lens", type=listed(positive), default=[128, 512])
    add("--rounds", type=positive, default=5)
    add("--seconds", type=float, default=1.0)
    add("--documents", type=positive, default=10_000_000)
    add("--tokens", type=positive, default=2_000_000_000)
    add("--processes", type=listed(positive), default=[1, 64, 256, 512])


main = partial(harness.run, __doc__, flags, measure, harness.report_lines)


if __name__ == "__main__":
    raise SystemExit(main())
