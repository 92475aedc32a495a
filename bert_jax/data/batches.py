"""Rows of tokens for every update: this process's share of the global batch, prefetched.

Everything is a function of (corpus, config, cursor); readers, processes and prefetch change nothing.
"""

import threading
from collections.abc import Iterator
from typing import NamedTuple

import grain
import numpy as np

from bert_jax.config import Config
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.data.plan import EpochPlan, plan_epoch
from bert_jax.tokenizer import Tokenizer

READ_THREADS = 2
Rows = dict[str, np.ndarray]


class HostBatch(NamedTuple):
    """What the loop gets for one update."""

    rows: Rows
    """This process's rows; `row` is each one's index in the global batch."""
    following: Cursor
    """Where the stream stands after them."""


class Stream:
    """The training stream of a corpus; also reads validation rows, with a cursor of its own."""

    def __init__(self, corpus: Corpus, config: Config, tokenizer: Tokenizer, process: int = 0, processes: int = 1):
        self.corpus = corpus
        self.config = config
        self.tokenizer = tokenizer
        self.process, self.processes = process, processes
        self._plans: dict[tuple[int, int], EpochPlan] = {}
        self._lengths: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def plan(self, seq_len: int, epoch: int) -> EpochPlan:
        """The plan of an epoch; the last two are kept, because a batch may straddle them."""
        with self._lock:
            if (seq_len, epoch) not in self._plans:
                plan = plan_epoch(self.corpus, self.config.data, seq_len, self.config.seed, epoch)
                self._plans[seq_len, epoch], self._lengths[seq_len, epoch] = plan, len(plan)
                while len(self._plans) > 2:
                    del self._plans[next(iter(self._plans))]
            return self._plans[seq_len, epoch]

    def _rows_in(self, seq_len: int, epoch: int) -> int:
        return self._lengths.get((seq_len, epoch)) or len(self.plan(seq_len, epoch))

    def cursor_at(self, start: Cursor, step: int) -> Cursor:
        """The cursor before update `step`, counted on from `start`; epochs before `start` are not planned."""
        cursor = start
        while True:
            phase = self.config.phases[cursor.phase]
            phase_end = sum(p.steps for p in self.config.phases[: cursor.phase + 1])
            updates = min(step, phase_end) - cursor.step
            epoch, row = cursor.epoch, cursor.row + updates * phase.batch_size
            while row >= self._rows_in(phase.seq_len, epoch):
                row -= self._rows_in(phase.seq_len, epoch)
                epoch += 1
            cursor = Cursor(cursor.step + updates, cursor.phase, epoch, row)
            if cursor.step < phase_end or cursor.phase + 1 == len(self.config.phases):
                return cursor
            # A new phase opens an epoch of its own, unless the old one has just ended.
            cursor = Cursor(cursor.step, cursor.phase + 1, epoch + (row > 0), 0)

    def batch(self, cursor: Cursor) -> Rows:
        """This process's rows of the update at `cursor`; they may straddle two or more epochs."""
        phase = self.config.phases[cursor.phase]
        share = phase.batch_size // self.processes
        first = self.process * share
        ids, epochs = [], []
        epoch, row = cursor.epoch, cursor.row + first
        while len(ids) < share:
            length = self._rows_in(phase.seq_len, epoch)
            if row >= length:
                row, epoch = row - length, epoch + 1
                continue
            take = min(share - len(ids), length - row)
            ids.extend(self.plan(phase.seq_len, epoch).example_at(np.arange(row, row + take)))
            epochs.extend([epoch] * take)
            row += take
        copies = self.config.data.mask_copies
        rows = empty_rows(share, phase.seq_len, self.tokenizer.pad_id)
        rows["row"] = np.arange(first, first + share, dtype=np.int32)
        rows["mask_epoch"] = np.array([e if copies is None else e % copies for e in epochs], np.int32)
        for i, (epoch, example) in enumerate(zip(epochs, ids, strict=True)):
            self._fill(rows, i, self.plan(phase.seq_len, epoch), int(example))
        return rows

    def rows_of_epoch(self, seq_len: int, epoch: int, start: int, stop: int, limit: int) -> Rows:
        """Rows [start, stop) of an epoch in its training order, for evaluation; from `limit` on they are empty."""
        plan = self.plan(seq_len, epoch)
        rows = empty_rows(stop - start, seq_len, self.tokenizer.pad_id)
        rows["row"] = np.arange(stop - start, dtype=np.int32)
        rows["mask_epoch"] = np.zeros(stop - start, np.int32)
        for i, example in enumerate(plan.example_at(np.arange(start, min(stop, limit)))):
            self._fill(rows, i, plan, int(example))
        return rows

    def _fill(self, rows: Rows, i: int, plan: EpochPlan, example: int) -> None:
        """[CLS] A [SEP] B [SEP] into row i (google-research/bert create_pretraining_data.py)."""
        row = plan.rows[example]
        a = self.corpus.sentences(row["a_start"], row["a_stop"])[row["a_skip"] :][: row["a_tokens"]]
        b = self.corpus.sentences(row["b_start"], row["b_stop"])[row["b_skip"] :][: row["b_tokens"]]
        a_end, length = len(a) + 2, len(a) + len(b) + 3
        ids = rows["input_ids"][i]
        ids[0] = self.tokenizer.cls_id
        ids[a_end - 1] = ids[length - 1] = self.tokenizer.sep_id
        ids[1 : a_end - 1], ids[a_end : length - 1] = a, b
        rows["token_type_ids"][i, a_end:length] = 1
        rows["segment_ids"][i, :length] = 1
        rows["position_ids"][i, :length] = np.arange(length)
        rows["example_id"][i, 0] = example
        rows["pair_labels"][i, 0] = row["pair_label"]

    def read(self, start: Cursor) -> Iterator[HostBatch]:
        """Batches from `start` to the end of the run, prepared ahead by reader threads."""
        source = _Updates(self, start)
        options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=self.config.data.prefetch)
        return iter(grain.MapDataset.source(source).to_iter_dataset(options))


class _Updates:
    """The updates that are still to come, by index, as Grain wants a source."""

    def __init__(self, stream: Stream, start: Cursor):
        self.stream, self.start = stream, start

    def __len__(self) -> int:
        return self.stream.config.total_steps - self.start.step

    def __getitem__(self, index: int) -> HostBatch:
        step = self.start.step + int(index)
        here = self.stream.cursor_at(self.start, step)
        return HostBatch(self.stream.batch(here), self.stream.cursor_at(self.start, step + 1))


def empty_rows(count: int, seq_len: int, pad_id: int) -> Rows:
    """Rows of padding, one packed example's room each; example_id -1 says that there is none."""
    rows = {name: np.zeros((count, seq_len), np.int32) for name in ("token_type_ids", "segment_ids", "position_ids")}
    rows["input_ids"] = np.full((count, seq_len), pad_id, np.int32)
    rows["example_id"] = np.full((count, 1), -1, np.int32)
    rows["pair_labels"] = np.zeros((count, 1), np.int32)
    rows["cls_positions"] = np.zeros((count, 1), np.int32)
    return rows
