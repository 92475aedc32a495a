"""Simulates what a run reads from a store, by the share of its corpus that the host's cache holds.

    python scripts/benchmarks/bench_cache.py --documents 2000 --tokens 200000000     # books
    python scripts/benchmarks/bench_cache.py --documents 300000 --tokens 200000000   # Wikipedia

A record takes 1.7 bytes per token. `--shards` is the number of shards of the corpus, of which the cache holds a share;
a window of the stream has 4 million tokens. Bytes from the store are given per byte of the records that the run uses,
in the second epoch, for one process:

- parts: bert_jax. The shards that had room at the start are kept; of the others, the wanted records are read.
- shards: whole shards are copied when they are needed, and the least recently used is removed.
- records: wanted records are kept, and the least recently used are removed.
"""

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from bench_stream import BATCH_TOKENS, FORMATS, SPECIAL_IDS, LengthsOnly, make_config

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, one_of, positive
from bert_jax.data.batches import TrainingStream
from bert_jax.data.cursor import Cursor
from bert_jax.data.record import Record
from bert_jax.data.shard_parts import MERGED_GAP

BYTES_PER_TOKEN = 1.7


class WatchedCorpus(LengthsOnly):
    """Records which records are read together."""

    calls: list[np.ndarray]

    def records(self, indices: Sequence[int]) -> list[Record]:
        """Records of zeros."""
        self.calls.append(np.asarray(sorted(set(indices)), np.int64))
        return super().records(indices)


class Keep:
    """Copies of some sizes up to a limit; the least recently used are removed."""

    def __init__(self, limit: float):
        """Holds nothing yet; `limit` in bytes."""
        self._limit, self._held, self._sizes = limit, 0.0, OrderedDict()

    def has(self, key: int, size: float) -> bool:
        """Whether it holds a key; it holds it afterwards."""
        found = key in self._sizes
        if found:
            self._sizes.move_to_end(key)
            return True
        self._sizes[key] = size
        self._held += size
        while self._held > self._limit and len(self._sizes) > 1:
            self._held -= self._sizes.popitem(last=False)[1]
        return False


def epoch_calls(corpus: WatchedCorpus, form: str, seq_len: int, epochs: int) -> Iterator[tuple[int, np.ndarray]]:
    """Epoch and records of every call of a run."""
    stream = TrainingStream([corpus], [1.0], make_config(form, seq_len, BATCH_TOKENS // seq_len), SPECIAL_IDS)
    cursor = stream.normalize_cursor(Cursor())
    while (epoch := cursor.positions[0].epoch) < epochs:
        stream.rows_at(cursor)
        yield from ((epoch, call) for call in corpus.calls if len(call))
        corpus.calls.clear()
        cursor = stream.next_cursor(cursor)


def requests_and_bytes(records: np.ndarray, starts: np.ndarray) -> tuple[int, float]:
    """Of reading some records of one shard, whose records begin at `starts`, with gaps closed as in `ShardParts`."""
    begin, end = starts[records], starts[records + 1]
    new = np.flatnonzero(begin[1:] - end[:-1] > MERGED_GAP) + 1
    first, last = np.append(0, new), np.append(new, len(records)) - 1
    return len(first), float((end[last] - begin[first]).sum())


def simulate(corpus: WatchedCorpus, form: str, seq_len: int, shares: Sequence[float], shards: int) -> list[dict]:
    """A row for each share of the corpus that fits into the cache."""
    lengths = np.add.reduceat(np.asarray(corpus.sentence_lengths, np.int64), corpus.record_offsets[:-1])
    starts = np.append(0, np.cumsum(lengths * BYTES_PER_TOKEN))
    shard_of = np.minimum((starts[:-1] / starts[-1] * shards).astype(np.int64), shards - 1)
    shard_bytes = starts[-1] / shards
    caches = {share: (Keep(share * starts[-1] + 1), Keep(share * starts[-1] + 1)) for share in shares}
    totals = {share: dict.fromkeys(("requests", "parts", "shards", "records"), 0.0) for share in shares}
    used = 0.0
    for epoch, call in epoch_calls(corpus, form, seq_len, 2):
        size = starts[call + 1] - starts[call]
        used += epoch * size.sum()
        for share in shares:
            of_shards, of_records = caches[share]
            row = totals[share]
            row["records"] += epoch * sum(n for key, n in zip(call, size, strict=True) if not of_records.has(key, n))
            for shard in np.unique(shard_of[call]):
                row["shards"] += epoch * shard_bytes * (not of_shards.has(int(shard), shard_bytes))
                if epoch and shard >= int(share * shards):
                    requests, count = requests_and_bytes(call[shard_of[call] == shard], starts)
                    row["requests"] += requests
                    row["parts"] += count
    return [
        {"format": form, "seq_len": seq_len, "cache, share of the corpus": share}
        | {f"{name}, bytes per byte used": totals[share][name] / used for name in ("parts", "shards", "records")}
        | {"parts, requests per million tokens": totals[share]["requests"] / corpus.num_tokens * 1e6}
        for share in shares
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rows of all formats."""
    rows: list[dict] = []
    for form in options.formats:
        corpus = WatchedCorpus.make(options.documents, options.tokens)
        corpus.__dict__["calls"] = []
        rows += simulate(corpus, form, options.seq_len, options.shares, options.shards)
    return {"cache": rows}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--documents", type=positive, default=2000)
    add("--tokens", type=positive, default=200_000_000)
    add("--formats", type=listed(one_of(*FORMATS)), default=("segment_pair", "doc_sentences"))
    add("--seq-len", type=positive, default=512)
    add("--shards", type=positive, default=60)
    add("--shares", type=listed(float), default=[0.1, 0.25, 0.5, 0.75, 1.0])


main = partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
