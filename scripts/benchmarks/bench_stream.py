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
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grain
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]

from bert_jax import config as config_lib  # noqa: E402
from bert_jax.config import Config, DataConfig, ObjectiveConfig, Phase  # noqa: E402
from bert_jax.config.presets import load_config  # noqa: E402
from bert_jax.data.batches import TrainingStream  # noqa: E402
from bert_jax.data.corpus import Corpus  # noqa: E402
from bert_jax.data.cursor import CorpusPosition, Cursor  # noqa: E402
from bert_jax.data.record import Record  # noqa: E402
from bert_jax.data.row_reader import SpecialIds  # noqa: E402

FORMATS = ("segment_pair", "sentence_order", "full_sentences", "doc_sentences", "sentence_pair")
SPECIAL_IDS = SpecialIds(0, 1, 2)
BINS = 128
"""Packing bins of Grain; it was fastest with this number."""


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
    stream = TrainingStream([corpus], [1.0], make_config(form, seq_len, 32_768 // seq_len), SPECIAL_IDS)
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
    return iter(packed.batch(32_768 // seq_len))


def rate(batches: Iterator[dict[str, np.ndarray]], seconds: float) -> float:
    """Tokens per second without padding, over about `seconds`."""
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(batches)
        tokens += int((batch["segment_ids" if "segment_ids" in batch else "ids_segment_ids"] > 0).sum())
    return tokens / (time.perf_counter() - start)


def bench_reader(args: argparse.Namespace) -> list[dict]:
    """Time both readers in turn for every case; medians over rounds."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = []
    for directory in args.corpus:
        for form in args.formats.split(","):
            for seq_len in map(int, args.seq_lens.split(",")):
                corpus = Corpus.open(directory)
                sides = {"ours": stream_batches(corpus, form, seq_len), "grain": grain_batches(corpus, form, seq_len)}
                samples: dict[str, list[float]] = {name: [] for name in sides}
                for side in sides.values():
                    rate(side, 0.3)
                for _ in range(args.rounds):
                    for name, side in sides.items():
                        samples[name].append(rate(side, args.seconds))
                ratios = [a / b for a, b in zip(samples["ours"], samples["grain"], strict=True)]
                results.append(
                    {
                        "corpus": Path(directory).name,
                        "format": form,
                        "seq_len": seq_len,
                        "ours_mtok_s": statistics.median(samples["ours"]) / 1e6,
                        "grain_mtok_s": statistics.median(samples["grain"]) / 1e6,
                        "ratio": statistics.median(ratios),
                        "ratio_range": [min(ratios), max(ratios)],
                        "fill": packing_efficiency(corpus, form, seq_len),
                    }
                )
                show(results[-1])
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


def bench_plan(args: argparse.Namespace) -> list[dict]:
    """Seconds until a batch is ready in a new stream; its records are zeros and cost nothing to read."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    corpus, results = LengthsOnly.make(args.documents, args.tokens), []
    arrays = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for form in FORMATS:
        for seq_len in (128, 512):
            timings = {}
            for name in ("first", "middle"):
                stream = TrainingStream([corpus], [1.0], make_config(form, seq_len, 256), SPECIAL_IDS)
                start = time.perf_counter()
                windows = stream.corpora[0].plan(seq_len).windows  # part of the timed work
                middle = Cursor(step=5, rows=1280, positions=(CorpusPosition(0, windows // 2, 100),))
                stream.batch(stream.resolve_cursor(Cursor() if name == "first" else middle))
                timings[f"{name}_s"] = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            results.append({"format": form, "seq_len": seq_len, **timings, "peak_mb": peak, "arrays_mb": arrays})
            show(results[-1])
    return results


def bench_wait(args: argparse.Namespace) -> list[dict]:
    """Train a preset and read the share of time spent waiting for rows from its metrics."""
    from bert_jax.data.mixture_spec import CorpusWeight
    from bert_jax.training import pretraining
    from bert_jax.training.run_directory.metrics import read_metrics

    preset = load_config(args.preset)
    phase = dataclasses.replace(
        preset.phases[0], steps=args.steps, batch_size=args.batch, accumulation=1, warmup_steps=1
    )
    config = dataclasses.replace(
        config_lib.replace(preset, log={"every": args.steps // 4}, evaluation={"rows": 8, "batch_size": 8}),
        phases=(phase,),
    )
    with tempfile.TemporaryDirectory() as directory:
        pretraining.pretrain(config, [CorpusWeight(Path(corpus)) for corpus in args.corpus], Path(directory) / "run")
        timings = [line["timing"] for line in read_metrics(Path(directory) / "run" / "metrics.jsonl")]
    timings = [timing for timing in timings if "step_seconds" in timing]
    shares = [timing["data_wait"] for timing in timings]
    result = {
        "preset": args.preset,
        "batch": args.batch,
        "step_s": statistics.median(timing["step_seconds"] for timing in timings),
        "data_wait": statistics.median(shares),
        "data_wait_range": [min(shares), max(shares)],
    }
    show(result)
    return [result]


def show(result: dict) -> None:
    """Print a result on one line."""
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()), flush=True)


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["reader", "plan", "wait"])
    parser.add_argument("--corpus", action="append", default=[])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--seq-lens", default="128,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=2_000_000_000)
    parser.add_argument("--preset", default="bert_mini")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {"reader": bench_reader, "plan": bench_plan, "wait": bench_wait}[args.mode](args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
