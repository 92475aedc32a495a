"""Rows of one corpus by position, and positions by counting rows."""

import threading
from collections.abc import Iterator

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Position
from bert_jax.data.epoch_plan import Plan, Window
from bert_jax.data.row_reader import LoadedWindow, Marks, Rows

WINDOWS_KEPT = 2
"""What is read now and what comes next: 12 MB for each (books, 16-bit ids), most of it tokens. One that is asked
for again is planned and read again."""


class CorpusRows:
    """One corpus as a sequence of rows. May be shared by threads."""

    def __init__(self, corpus: Corpus, data: DataConfig, marks: Marks, seed: int):
        """Plans nothing yet."""
        self.corpus, self.data, self.marks, self.seed = corpus, data, marks, seed
        self._plans: dict[int, Plan] = {}
        self._windows: dict[tuple[int, int, int], LoadedWindow] = {}
        self._lock = threading.Lock()

    def plan(self, seq_len: int) -> Plan:
        """The plan for rows of one length.

        Raises:
          UserError: see `Plan`.
        """
        if seq_len not in self._plans:
            self._plans[seq_len] = Plan(self.corpus, self.data, seq_len, self.seed)
        return self._plans[seq_len]

    def window(self, seq_len: int, position: Position) -> LoadedWindow:
        """The window of a position; the last few are kept."""
        key = seq_len, position.epoch, position.window
        with self._lock:
            if key not in self._windows:
                planned = self.plan(seq_len).window(position.epoch, position.window)
                separated = self.data.format == "full_sentences"
                self._windows[key] = LoadedWindow(self.corpus, planned, separated)
                while len(self._windows) > WINDOWS_KEPT:
                    del self._windows[next(iter(self._windows))]
            return self._windows[key]

    def runs(self, seq_len: int, position: Position, count: int) -> Iterator[tuple[Position, int]]:
        """The next `count` rows as runs of rows of one window: where each starts, and how many it has."""
        while count:
            left = len(self.window(seq_len, position).window) - position.row
            yield position, min(left, count)
            count -= min(left, count)
            position = self._next_window(seq_len, position)

    def advance(self, seq_len: int, position: Position, count: int) -> Position:
        """The position `count` rows on. A row that follows in the same window is named as such."""
        for start, taken in self.runs(seq_len, position, count):
            position = Position(start.epoch, start.window, start.row + taken)
        if count and position.row == len(self.window(seq_len, position).window):
            return self._next_window(seq_len, position)
        return position

    def _next_window(self, seq_len: int, position: Position) -> Position:
        if position.window + 1 < self.plan(seq_len).windows:
            return Position(position.epoch, position.window + 1, 0)
        return Position(position.epoch + 1, 0, 0)

    def fill(self, rows: Rows, slots: np.ndarray, position: Position, before: int) -> None:
        """Put rows of this corpus into rows of a batch.

        Args:
          rows: a batch, with `mask_epoch`.
          slots: which rows of the batch are this corpus's, int64 [n].
          position: of the global batch.
          before: this corpus's rows of the global batch that other processes read, in front of these.
        """
        seq_len = rows["input_ids"].shape[1]
        copies, done = self.data.mask_copies, 0
        for start, count in self.runs(seq_len, position, before + len(slots)):
            skipped = min(count, before)
            before -= skipped
            here = slots[done : done + count - skipped]
            done += len(here)
            rows["mask_epoch"][here] = start.epoch if copies is None else start.epoch % copies
            wanted = np.arange(start.row + skipped, start.row + count)
            self.window(seq_len, start).fill(rows, here, wanted, self.marks)

    def epoch(self, seq_len: int, epoch: int) -> Iterator[Window]:
        """All windows of an epoch, planned one by one and not kept."""
        plan = self.plan(seq_len)
        return (plan.window(epoch, index) for index in range(plan.windows))
