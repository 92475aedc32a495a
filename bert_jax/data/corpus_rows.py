"""One corpus as a sequence of rows: reads rows from a position, and advances positions by a number of rows."""

import threading
from collections.abc import Iterator

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition
from bert_jax.data.epoch_plan import EpochPlan, Window
from bert_jax.data.row_reader import LoadedWindow, Rows, SpecialIds

WINDOWS_KEPT = 2
"""The window that is being read and the next one: 12 MB each (books, 16-bit ids), most of it tokens. A window that was
dropped is planned and read again."""


class CorpusRows:
    """One corpus as a sequence of rows. May be shared by threads."""

    def __init__(self, corpus: Corpus, data: DataConfig, special_ids: SpecialIds, seed: int):
        """Plans nothing yet."""
        self.corpus, self.data, self.special_ids, self.seed = corpus, data, special_ids, seed
        self._plans: dict[int, EpochPlan] = {}
        self._windows: dict[tuple[int, int, int], LoadedWindow] = {}
        self._lock = threading.Lock()

    def plan(self, seq_len: int) -> EpochPlan:
        """The plan for rows of one length.

        Raises:
          UserError: see `EpochPlan`.
        """
        if seq_len not in self._plans:
            self._plans[seq_len] = EpochPlan(self.corpus, self.data, seq_len, self.seed)
        return self._plans[seq_len]

    def window(self, seq_len: int, position: CorpusPosition) -> LoadedWindow:
        """The window of a position; the last few are cached."""
        key = seq_len, position.epoch, position.window
        with self._lock:
            if key not in self._windows:
                planned = self.plan(seq_len).window(position.epoch, position.window)
                separated = self.data.format == "full_sentences"
                self._windows[key] = LoadedWindow(self.corpus, planned, separated)
                while len(self._windows) > WINDOWS_KEPT:
                    del self._windows[next(iter(self._windows))]
            return self._windows[key]

    def window_spans(self, seq_len: int, position: CorpusPosition, count: int) -> Iterator[tuple[CorpusPosition, int]]:
        """The next `count` rows, split by window: (position of the first row, number of rows) of each span."""
        while count:
            left = len(self.window(seq_len, position).window) - position.row
            yield position, min(left, count)
            count -= min(left, count)
            position = self._next_window(seq_len, position)

    def advance(self, seq_len: int, position: CorpusPosition, count: int) -> CorpusPosition:
        """The position `count` rows later. The end of a window is returned as the start of the next one."""
        for start, taken in self.window_spans(seq_len, position, count):
            position = CorpusPosition(start.epoch, start.window, start.row + taken)
        if count and position.row == len(self.window(seq_len, position).window):
            return self._next_window(seq_len, position)
        return position

    def _next_window(self, seq_len: int, position: CorpusPosition) -> CorpusPosition:
        if position.window + 1 < self.plan(seq_len).windows:
            return CorpusPosition(position.epoch, position.window + 1, 0)
        return CorpusPosition(position.epoch + 1, 0, 0)

    def read_into(self, rows: Rows, slots: np.ndarray, position: CorpusPosition, skip: int) -> None:
        """Reads the next rows of this corpus into rows of a batch.

        Args:
          rows: a batch, with `mask_epoch`.
          slots: indices of the rows of the batch that this corpus provides, int64 [n].
          position: of this corpus at the start of the global batch.
          skip: rows of this corpus in the global batch that earlier processes read.
        """
        seq_len = rows["input_ids"].shape[1]
        copies, done = self.data.mask_copies, 0
        for start, count in self.window_spans(seq_len, position, skip + len(slots)):
            skipped = min(count, skip)
            skip -= skipped
            window_slots = slots[done : done + count - skipped]
            done += len(window_slots)
            rows["mask_epoch"][window_slots] = start.epoch if copies is None else start.epoch % copies
            window_rows = np.arange(start.row + skipped, start.row + count)
            self.window(seq_len, start).read_into(rows, window_slots, window_rows, self.special_ids)

    def epoch_windows(self, seq_len: int, epoch: int) -> Iterator[Window]:
        """All windows of an epoch, planned one at a time and not cached."""
        plan = self.plan(seq_len)
        return (plan.window(epoch, index) for index in range(plan.windows))
