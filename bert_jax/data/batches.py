"""Rows of tokens for every update: this process's share of the global batch, prefetched.

Everything is a function of (corpora, config, cursor); readers, processes and prefetch change nothing.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Generator, Sequence
from typing import NamedTuple

import grain
import numpy as np
from absl import flags

from bert_jax.config import Config
from bert_jax.data.corpus import Corpus
from bert_jax.data.corpus_rows import CorpusRows
from bert_jax.data.cursor import Cursor, Position, batch_size
from bert_jax.data.mixture import Turns
from bert_jax.data.reader_process import begin
from bert_jax.data.row_reader import Marks, Rows, empty_rows

READ_THREADS = 2
NO_SHARED_MEMORY = grain.experimental.DatasetOptions(min_shm_size=1 << 62)
CURSORS_KEPT = 64
"""Readers ask for nearby updates, and each cursor is found by counting on from one before it."""


class HostBatch(NamedTuple):
    """What the loop gets for one update."""

    rows: Rows
    """This process's rows; `row` is each one's index in the global batch."""
    size: int
    """Rows of the global batch."""
    following: Cursor
    """Where the stream stands after them."""


class Stream:
    """The training stream of a mixture of corpora. Can be pickled; may be shared by threads."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        shares: Sequence[float],
        config: Config,
        marks: Marks,
        process: int = 0,
        processes: int = 1,
    ):
        """Opens nothing that is not open yet.

        Args:
          corpora: in an order that is part of what decides the stream.
          shares: of each corpus, in rows; positive, summing to 1.
          config: of the run.
          marks: what stands around text.
          process, processes: whose share of each batch this is; equal and consecutive.

        Raises:
          UserError: a share that is too small to be kept.
        """
        self.corpora = [CorpusRows(corpus, config.data, marks, config.seed) for corpus in corpora]
        self.turns, self.config, self.marks = Turns(shares), config, marks
        self.shares, self.place = tuple(shares), (process, processes)
        self._made_of = (tuple(corpora), self.shares, config, marks, process, processes)
        self._cursors: dict[tuple[Cursor, int], Cursor] = {}
        self._lock = threading.Lock()

    def __reduce__(self):
        return Stream, self._made_of

    def start(self, cursor: Cursor) -> Cursor:
        """The cursor with a position for every corpus, behind the intervals to be skipped that it stands in."""
        positions = cursor.positions or (Position(),) * len(self.corpora)
        cursor = dataclasses.replace(cursor, positions=positions)
        skipped = cursor.behind_skipped() - cursor.rows
        return self._behind(cursor, skipped) if skipped else cursor

    def following(self, cursor: Cursor) -> Cursor:
        """The cursor after the update at `cursor`."""
        cursor = dataclasses.replace(self._behind(cursor, batch_size(self.config, cursor)), step=cursor.step + 1)
        return self.start(cursor.in_phase(self.config.locate_step(cursor.step)[0]))

    def _behind(self, cursor: Cursor, count: int) -> Cursor:
        """The cursor behind some more rows, whether an update sees them or not."""
        seq_len = self.config.phases[cursor.phase].seq_len
        taken = np.bincount(self.turns.of(cursor.rows, count), minlength=len(self.corpora))
        positions = tuple(
            corpus.advance(seq_len, position, int(own))
            for corpus, position, own in zip(self.corpora, cursor.positions, taken, strict=True)
        )
        return dataclasses.replace(cursor, rows=cursor.rows + count, positions=positions)

    def cursor_at(self, start: Cursor, step: int) -> Cursor:
        """The cursor before update `step`, counted on from `start`; nothing before `start` is planned."""
        with self._lock:
            known = [done for origin, done in self._cursors if origin == start and done <= step]
            at = max(known, default=None)
            cursor = self.start(start) if at is None else self._cursors[start, at]
            while cursor.step < step:
                cursor = self.following(cursor)
                self._cursors[start, cursor.step] = cursor
                while len(self._cursors) > CURSORS_KEPT:
                    del self._cursors[next(iter(self._cursors))]
            return cursor

    def batch(self, cursor: Cursor) -> Rows:
        """This process's rows of the update at `cursor`; they may straddle windows and epochs."""
        seq_len, size = self.config.phases[cursor.phase].seq_len, batch_size(self.config, cursor)
        process, processes = self.place
        share = size // processes
        first = process * share
        rows = empty_rows(share, seq_len, self.config.data.slots(seq_len), self.marks.pad_id)
        rows["row"] = np.arange(first, first + share, dtype=np.int32)
        rows["mask_epoch"] = np.zeros(share, np.int32)
        turns = self.turns.of(cursor.rows, first + share)
        for i, (corpus, position) in enumerate(zip(self.corpora, cursor.positions, strict=True)):
            slots = np.flatnonzero(turns[first:] == i)
            if len(slots):
                corpus.fill(rows, slots, position, before=int((turns[:first] == i).sum()))
        return rows

    def read(self, start: Cursor) -> Generator[HostBatch, None, None]:
        """Batches from `start` to the end of the run, prepared ahead by reader threads or processes.

        Closing it, or dropping it, ends them.
        """
        data = self.config.data
        dataset = grain.MapDataset.source(_Updates(self, start))
        if data.reader_processes:
            if not flags.FLAGS.is_parsed():  # Grain reads absl's flags, which other programs parse at their start
                flags.FLAGS.mark_as_parsed()
            workers = grain.MultiprocessingOptions(data.reader_processes, per_worker_buffer_size=data.prefetch)
            dataset = dataset.to_iter_dataset(grain.ReadOptions(1, 1))
            # Through a pipe: shared memory outlives a killed run, and a batch is small.
            dataset = grain.experimental.WithOptionsIterDataset(dataset, NO_SHARED_MEMORY)
            dataset = dataset.mp_prefetch(workers, worker_init_fn=begin)
        else:
            dataset = dataset.to_iter_dataset(grain.ReadOptions(min(READ_THREADS, data.prefetch), data.prefetch))
        with contextlib.closing(iter(dataset)) as batches:
            yield from batches


class _Updates:
    """The updates that are still to come, by index, as Grain wants a source."""

    def __init__(self, stream: Stream, start: Cursor):
        self.stream, self.start = stream, start

    def __len__(self) -> int:
        return self.stream.config.total_steps - self.start.step

    def __getitem__(self, index: int) -> HostBatch:
        step = self.start.step + int(index)
        here = self.stream.cursor_at(self.start, step)
        rows = self.stream.batch(here)
        return HostBatch(rows, batch_size(self.stream.config, here), self.stream.cursor_at(self.start, step + 1))
