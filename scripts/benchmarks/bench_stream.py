"""Speed of the training stream: the reader against Grain's packing alone, plans of huge corpora, waiting time.

    python scripts/benchmarks/bench_stream.py reader --corpus DIR [--corpus DIR ...] [--formats ...] [--seq-lens 128]
    python scripts/benchmarks/bench_stream.py plan --documents 10000000 --tokens 2000000000
    python scripts/benchmarks/bench_stream.py wait --corpus DIR --preset bert_mini --steps 40 [--batch 32]

`reader` runs on one core and alternates between bert_jax's reader (read, plan, pack and collate records in the page
cache) and Grain's FirstFitPackIterDataset, which only packs ready arrays of the same examples. `plan` creates length
arrays in memory and reads a first batch and a batch in mid-epoch in each format; it prints the peak memory of the
process. `wait` trains and prints the share of time in which the loop waits for rows, an upper bound of the device's.
"""

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import harness
import numpy as np
from harness import listed, one_of, positive

from bert_jax import config as config_lib
from bert_jax.config import Config, DataConfig, ObjectiveConfig, Phase
from bert_jax.config.presets import load_config
from bert_jax.data.batch import SpecialIds
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition, Cursor
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
    cursor = stream.resolve_cursor(Cursor())
    while True:
        yield stream.batch(cursor)
        cursor = stream.next_cursor(cursor)


class Arrays:
    """Examples in memory as a data source of Grain."""

    def __init__(self, examples: list[np.ndarray]):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"ids": self.examples[index % len(self.examples)]}


def grain_batches(corpus: Corpus, form: str, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of rows that Grain's FirstFit packs from the examples of the stream."""
    config = config_lib.replace(make_config(form, seq_len, 4096), data={"examples_per_row": 1})
    stream = TrainingStream([corpus], [1.0], config, SPECIAL_IDS)
    rows = stream.batch(stream.resolve_cursor(Cursor()))
    lengths = (rows["segment_ids"] > 0).sum(1)
    examples = [ids[:n].copy() for ids, n in zip(rows["input_ids"], lengths, strict=True)]
    parent = grain.MapDataset.source(Arrays(examples)).repeat().to_iter_dataset(grain.ReadOptions(1, 1))
    packed = grain.experimental.FirstFitPackIterDataset(
        parent, length_struct={"ids": seq_len}, num_packing_bins=BINS, seed=0
    )
    return iter(packed.batch(BATCH_TOKENS // seq_len))


def rate(batches: Iterator[dict[str, np.ndarray]], seconds: float) -> float:
    """Tokens per second without padding, over about `seconds`."""
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(batches)
        tokens += int((batch["segment_ids" if "segment_ids" in batch else "ids_segment_ids"] > 0).sum())
    return tokens / (time.perf_counter() - start)


def bench_reader(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Million tokens/s of both readers in turn for every case."""
    harness.pin(1)
    results = []
    for directory in options.corpus:
        corpus = Corpus.open(directory)
        for form in options.formats:
            for seq_len in options.seq_lens:
                readers = {"ours": stream_batches(corpus, form, seq_len), "grain": grain_batches(corpus, form, seq_len)}
                for batches in readers.values():
                    rate(batches, 0.3)
                sides = {
                    name: lambda batches=batches: rate(batches, options.seconds) for name, batches in readers.items()
                }
                samples = harness.interleave(sides, options.rounds)
                results.append(
                    {
                        "corpus": Path(directory).name,
                        "format": form,
                        "seq_len": seq_len,
                        **{f"{name}_mtok_s": statistics.median(rates) / 1e6 for name, rates in samples.items()},
                        "ratio": harness.ratio(samples["ours"], samples["grain"]),
                        "fill": packing_efficiency(corpus, form, seq_len),
                    }
                )
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

    def records(self, indices: Sequence[int]) -> list[Record]:
        """Records of zeros."""
        records = []
        for index in indices:
            ends = np.cumsum(self.sentence_lengths[self.record_offsets[index] : self.record_offsets[index + 1]])
            records.append(Record(0, 0, np.zeros(ends[-1], np.uint16), ends))
        return records

    @classmethod
    def make(cls, documents: int, tokens: int) -> "LengthsOnly":
        """Sentences of 2 to 38 tokens, 20 on average, in documents with about equal numbers of sentences."""
        rng = np.random.default_rng(0)
        sentences = tokens // 20
        lengths = np.empty(sentences, np.uint16)
        for start in range(0, sentences, 1 << 22):
            part = lengths[start : start + (1 << 22)]
            part[:] = rng.integers(2, 39, len(part), dtype=np.uint16)
        offsets = np.linspace(0, sentences, documents + 1).astype(np.int64)
        corpus = object.__new__(cls)
        corpus.__dict__.update(
            directory="memory",
            split="train",
            name="memory",
            identity="memory",
            vocab_size=1 << 16,
            sentence_lengths=lengths,
            document_offsets=offsets,
            record_offsets=offsets,
            num_tokens=sum(int(lengths[i : i + (1 << 24)].sum(dtype=np.int64)) for i in range(0, sentences, 1 << 24)),
        )
        return corpus


def bench_plan(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds until a batch is ready in a new stream; its records are zeros and cost nothing to read."""
    harness.pin(1)
    corpus, results = LengthsOnly.make(options.documents, options.tokens), []
    arrays = harness.memory_megabytes()
    for form in FORMATS:
        for seq_len in options.seq_lens:
            timings = {}
            for name in ("first", "middle"):
                stream = TrainingStream([corpus], [1.0], make_config(form, seq_len, 256), SPECIAL_IDS)
                start = time.perf_counter()
                windows = stream.corpora[0].epoch_plan(seq_len).windows  # part of the timed work
                middle = Cursor(step=5, rows=1280, positions=(CorpusPosition(0, windows // 2, 100),))
                stream.batch(stream.resolve_cursor(Cursor() if name == "first" else middle))
                timings[f"{name}_s"] = time.perf_counter() - start
            peak = {"peak_mb": harness.memory_megabytes(), "arrays_mb": arrays}
            results.append({"format": form, "seq_len": seq_len, **timings, **peak})
    return results


def bench_wait(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train a preset and read the share of time spent waiting for rows from its metrics."""
    from bert_jax.data.mixture import CorpusWeight
    from bert_jax.training import pretraining
    from bert_jax.training.run_directory.metrics import read_metrics

    preset = load_config(options.preset)
    shapes = {"steps": options.steps, "batch_size": options.batch, "accumulation": 1, "warmup_steps": 1}
    config = config_lib.replace(
        preset,
        phases=(dataclasses.replace(preset.phases[0], **shapes),),
        log={"every": options.steps // 4},
        evaluation={"rows": 8, "batch_size": 8},
    )
    with tempfile.TemporaryDirectory() as directory:
        pretraining.pretrain(config, [CorpusWeight(Path(corpus)) for corpus in options.corpus], Path(directory) / "run")
        timings = [line["timing"] for line in read_metrics(Path(directory) / "run" / "metrics.jsonl")]
    timings = [timing for timing in timings if "step_seconds" in timing]
    step_seconds = statistics.median(timing["step_seconds"] for timing in timings)
    waits = harness.spread([timing["data_wait"] for timing in timings])
    return [{"preset": options.preset, "batch": options.batch, "step_s": step_seconds, "data_wait": waits}]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The results of a mode."""
    modes = {"reader": bench_reader, "plan": bench_plan, "wait": bench_wait}
    return {"mode": options.mode, "results": modes[options.mode](options)}


def render(report: dict[str, Any]) -> list[str]:
    """A line per result."""

    def text(value: Any) -> str:
        return (
            harness.show(value, ".3g")
            if isinstance(value, dict)
            else f"{value:.4g}"
            if isinstance(value, float)
            else value
        )

    return [
        harness.header(report),
        *("  ".join(f"{name} {text(value)}" for name, value in result.items()) for result in report["results"]),
    ]


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("mode", choices=["reader", "plan", "wait"])
    add("--corpus", action="append", default=[])
    add("--formats", type=listed(one_of(*FORMATS)), default=FORMATS)
    add("--seq-lens", type=listed(positive), default=[128, 512])
    add("--rounds", type=positive, default=5)
    add("--seconds", type=float, default=1.0)
    add("--documents", type=positive, default=10_000_000)
    add("--tokens", type=positive, default=2_000_000_000)
    add("--preset", default="bert_mini")
    add("--steps", type=positive, default=40)
    add("--batch", type=positive, default=32)


main = functools.partial(harness.run, __doc__, flags, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
