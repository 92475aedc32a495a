"""Rows of tokens for every step: this process's share of the global batch, prefetched.

Every batch is a function of (corpora, config, cursor). Reader threads, reader processes and prefetching do not
change it.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np
from absl import flags

from bert_jax.command.stacks import write_stacks_on_signal
from bert_jax.config import Config, DataConfig
from bert_jax.data.batch import Rows, SpecialIds, empty_rows
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition, Cursor, batch_size
from bert_jax.data.mixture import order_by_phase
from bert_jax.data.row_reader import CorpusRows
from bert_jax.data.sampling import check_weights

READ_THREADS = 2
NO_SHARED_MEMORY = grain.experimental.DatasetOptions(min_shm_size=1 << 62)
CURSORS_KEPT = 64
"""Readers ask for steps close to each other; each cursor is computed from the nearest cached one before it."""
HELD_OUT_SEED = 0
"""Of examples and order of validation splits: the same for every run, so that runs can be compared."""


class HostBatch(NamedTuple):
    """The batch of one step on the host."""

    rows: Rows
    """This process's rows; `row` is the index of each in the global batch."""
    size: int
    """Rows of the global batch."""
    next_cursor: Cursor
    """Position of the stream after this batch."""


class TrainingStream:
    """The training stream of a mixture of corpora. Can be pickled; may be shared by threads."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        shares: Sequence[float],
        config: Config,
        special_ids: SpecialIds,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Opens no further file.

        Args:
          corpora: their order is part of what determines the stream.
          shares: of each corpus, in rows, in phases without `corpus_weights`; positive, summing to 1.
          config: of the run.
          special_ids: ids of the special tokens of a row.
          process_index, process_count: which share of each batch to read; shares are equal and consecutive.

        Raises:
          UserError: see `order_by_phase` and `check_weights`.
        """
        self.corpora = [CorpusRows(corpus, config.data, special_ids, config.seed) for corpus in corpora]
        check_weights(corpora, config.data)
        self.mixture_orders = order_by_phase(config, [corpus.name for corpus in corpora], shares)
        self.config, self.special_ids = config, special_ids
        self.shares, self.process_index, self.process_count = tuple(shares), process_index, process_count
        self._init_args = (tuple(corpora), self.shares, config, special_ids, process_index, process_count)
        self._cursors: dict[tuple[Cursor, int], Cursor] = {}
        self._lock = threading.Lock()

    def __reduce__(self):
        return TrainingStream, self._init_args

    def normalize_cursor(self, cursor: Cursor) -> Cursor:
        """The cursor with a position for every corpus, moved to the end of the skipped interval that contains it."""
        positions = cursor.positions or (CorpusPosition(),) * len(self.corpora)
        cursor = dataclasses.replace(cursor, positions=positions)
        skipped = cursor.row_after_skipped() - cursor.rows
        return self._advance(cursor, skipped) if skipped else cursor

    def next_cursor(self, cursor: Cursor) -> Cursor:
        """The cursor after the step at `cursor`."""
        cursor = dataclasses.replace(self._advance(cursor, batch_size(self.config, cursor)), step=cursor.step + 1)
        return self.normalize_cursor(cursor.in_phase(self.config.locate_step(cursor.step)[0]))

    def _advance(self, cursor: Cursor, count: int) -> Cursor:
        """The cursor `count` rows later, whether a step uses these rows or not."""
        seq_len = self.config.phases[cursor.phase].seq_len
        corpus_of_row = self.mixture_orders[cursor.phase].corpus_of_rows(cursor.rows, count)
        rows_by_corpus = np.bincount(corpus_of_row, minlength=len(self.corpora))
        positions = tuple(
            corpus.advance(seq_len, position, int(corpus_rows))
            for corpus, position, corpus_rows in zip(self.corpora, cursor.positions, rows_by_corpus, strict=True)
        )
        return dataclasses.replace(cursor, rows=cursor.rows + count, positions=positions)

    def cursor_at(self, start: Cursor, step: int) -> Cursor:
        """The cursor before `step`, counted from `start`; nothing before `start` is planned."""
        with self._lock:
            cached = [done for origin, done in self._cursors if origin == start and done <= step]
            nearest = max(cached, default=None)
            cursor = self.normalize_cursor(start) if nearest is None else self._cursors[start, nearest]
            while cursor.step < step:
                cursor = self.next_cursor(cursor)
                self._cursors[start, cursor.step] = cursor
                while len(self._cursors) > CURSORS_KEPT:
                    del self._cursors[next(iter(self._cursors))]
            return cursor

    def rows_at(self, cursor: Cursor) -> Rows:
        """This process's rows of the step at `cursor`; they may span windows and epochs."""
        seq_len, size = self.config.phases[cursor.phase].seq_len, batch_size(self.config, cursor)
        count = size // self.process_count
        first = self.process_index * count
        rows = empty_rows(
            count, seq_len, self.config.data.max_examples_per_row(seq_len), self.special_ids.pad_id, first
        )
        corpus_of_row = self.mixture_orders[cursor.phase].corpus_of_rows(cursor.rows, size)
        for i, (corpus, position) in enumerate(zip(self.corpora, cursor.positions, strict=True)):
            of_corpus = corpus_of_row == i
            slots = np.flatnonzero(of_corpus[first : first + count])
            if len(slots):
                corpus.read_into(rows, slots, position, int(of_corpus.sum()), first=int(of_corpus[:first].sum()))
                corpus.prefetch(seq_len, position)
        return rows

    def batches(self, start: Cursor) -> Generator[HostBatch, None, None]:
        """Batches from `start` to the end of the run, prepared ahead by reader threads or processes.

        Closing or dropping the generator ends the readers.
        """
        data = self.config.data
        dataset = grain.MapDataset.source(_RemainingSteps(self, start))
        if data.reader_processes:
            if not flags.FLAGS.is_parsed():  # Grain reads absl's flags, which other programs parse at their start
                flags.FLAGS.mark_as_parsed()
            workers = grain.MultiprocessingOptions(data.reader_processes, per_worker_buffer_size=data.prefetch)
            dataset = dataset.to_iter_dataset(grain.ReadOptions(1, 1))
            # Through a pipe: shared memory remains after a run is killed, and a batch is small.
            dataset = grain.experimental.WithOptionsIterDataset(dataset, NO_SHARED_MEMORY)
            dataset = dataset.mp_prefetch(workers, worker_init_fn=_init_reader_process)
        else:
            dataset = dataset.to_iter_dataset(grain.ReadOptions(min(READ_THREADS, data.prefetch), data.prefetch))
        with contextlib.closing(iter(dataset)) as batches:
            yield from batches


class _RemainingSteps:
    """The remaining steps of a run by index: a random-access source for Grain."""

    def __init__(self, stream: TrainingStream, start: Cursor):
        self.stream, self.start = stream, start

    def __len__(self) -> int:
        return self.stream.config.total_steps - self.start.step

    def __getitem__(self, index: int) -> HostBatch:
        step = self.start.step + int(index)
        cursor = self.stream.cursor_at(self.start, step)
        rows = self.stream.rows_at(cursor)
        return HostBatch(rows, batch_size(self.stream.config, cursor), self.stream.cursor_at(self.start, step + 1))


def _init_reader_process(worker_index: int, worker_count: int) -> None:
    """In a reader process: ignores SIGTERM, SIGHUP and SIGINT; exits as soon as the parent is gone, however it ended.

    A scheduler sends SIGTERM to every process of a job: a reader that exited on it would prevent the last save.
    """
    del worker_index, worker_count
    write_stacks_on_signal()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(multiprocessing.parent_process(),), daemon=True).start()


def _exit_with_parent(parent: "multiprocessing.process.BaseProcess | None") -> None:
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


class HeldOutRows:
    """Validation splits of a mixture, one after the other, with one example per row: the same for every run, whatever
    its training data and schedule.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        data: DataConfig,
        special_ids: SpecialIds,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Plans nothing yet; only the format and the end of examples are read from `data`."""
        fixed = DataConfig(format=data.format, example_end=data.example_end, examples_per_row=1)
        self.corpora = [CorpusRows(corpus, fixed, special_ids, HELD_OUT_SEED) for corpus in corpora]
        self.special_ids, self.process_index, self.process_count = special_ids, process_index, process_count

    def count(self, corpus: CorpusRows, seq_len: int, limit: int) -> int:
        """Rows of a split, at most `limit`."""
        rows = 0
        for window in corpus.epoch_windows(seq_len, 0):
            rows += len(window)
            if rows >= limit:
                return limit
        return rows

    def batches(self, seq_len: int, limit: int, batch_size: int) -> Iterator[tuple[str, Rows]]:
        """This process's share of every batch, with the name of its corpus; rows after the last are empty.

        Args:
          seq_len: tokens per row.
          limit: rows of each corpus.
          batch_size: rows of a global batch; a multiple of the number of processes.
        """
        share = batch_size // self.process_count
        first = self.process_index * share
        for corpus in self.corpora:
            total, position = self.count(corpus, seq_len, limit), CorpusPosition()
            for start in range(0, total, batch_size):
                rows = empty_rows(share, seq_len, 1, self.special_ids.pad_id, first)
                count = min(batch_size, total - start)
                used = min(max(count - first, 0), share)
                if used:
                    corpus.read_into(rows, np.arange(used), position, count, first)
                yield corpus.corpus.name, rows
                position = corpus.advance(seq_len, position, count)
