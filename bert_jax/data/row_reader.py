"""Rows of tokens of one corpus: records are read once per window, compiled code writes the rows."""

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.batch import RowArrays, Rows, SpecialIds
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition
from bert_jax.data.epoch_plan import EpochPlanner, WindowPlan, expand_ranges
from bert_jax.data.manifest import token_dtype
from bert_jax.data.record import Record
from bert_jax.errors import UserError
from bert_jax.numba_cache import cached_njit
from bert_jax.storage.paths import is_remote

WINDOWS_KEPT = 2
"""The window that is being read and the next one: 12 MB each (books, 16-bit ids), most of it tokens, and up to 7 MB of
random segments. A window that was dropped is planned and read again; a batch holds all of its windows."""


class _Text(NamedTuple):
    """Tokens and layout of a window, for compiled code."""

    tokens: np.ndarray
    """of the window"""
    random_tokens: np.ndarray
    """of random segments, which are outside of the window"""
    random_starts: np.ndarray
    """first of them of each example, int64 [num_examples]"""
    sentence_lengths: np.ndarray
    """of the corpus"""
    document_offsets: np.ndarray
    """of the corpus; empty if no [SEP] is needed between documents"""


class LoadedWindow:
    """A window and those of its tokens that were read so far. May be shared by threads."""

    def __init__(self, corpus: Corpus, window: WindowPlan, separated: bool):
        """Reads nothing yet; with `separated`, a [SEP] follows each document of an example."""
        self.corpus, self.window = corpus, window
        self._records = expand_ranges(window.chunks)
        lengths, offsets = np.asarray(corpus.sentence_lengths), np.asarray(corpus.record_offsets)
        self._starts = _token_starts(lengths, offsets, self._records)
        self._tokens = np.empty(self._starts[-1], token_dtype(corpus.vocab_size))
        self._loaded = np.zeros(len(self._records), np.bool_)
        self._random_records: dict[int, Record] = {}  # outside of the window, by index
        self._lock = threading.Lock()
        self.last_read = (0, 0)
        """First and last row, in the order of the text, that were read together last; (0, 0): none yet"""
        # Used to find documents that begin inside an example.
        none = np.zeros(0, np.int64)
        self._layout = (lengths, np.asarray(corpus.document_offsets) if separated else none)

    def read_into(self, rows: Rows, slots: np.ndarray, window_rows: np.ndarray, special_ids: SpecialIds) -> None:
        """Reads rows of the window into rows of a batch.

        Args:
          rows: from `empty_rows`.
          slots: indices of rows of the batch, int64 [n].
          window_rows: indices of rows of the window, int64 [n].
          special_ids: ids of the special tokens.

        Raises:
          UserError: a record is damaged; the message names the shard and the document.
        """
        members, counts, places = _row_members(self.window.row_starts, self.window.members, window_rows)
        examples = self.window.examples[members]
        self._load(examples)
        if len(window_rows):
            self.last_read = int(window_rows.min()), int(window_rows.max())
        text = _Text(self._tokens, *self._random_segments(examples), *self._layout)
        out = RowArrays(*(rows[name] for name in RowArrays._fields))
        _write_rows(examples, np.repeat(slots, counts), places, text, special_ids, out)

    def load(self, window_rows: np.ndarray) -> None:
        """Reads the records of rows of the window, int64 [n], for a later `read_into`."""
        members, *_ = _row_members(self.window.row_starts, self.window.members, window_rows)
        examples = self.window.examples[members]
        self._load(examples)
        self._random_segments(examples)

    def _load(self, examples: np.ndarray) -> None:
        with self._lock:
            missing = _missing_records(examples, self._starts, self._loaded)
            for index, record in zip(missing, self._read(self._records[missing]), strict=True):
                self._tokens[self._starts[index] : self._starts[index + 1]] = record.tokens
                self._loaded[index] = True

    def _read(self, indices: np.ndarray) -> list[Record]:
        records = self.corpus.records(indices.tolist())
        for index, record in zip(indices, records, strict=True):
            if record.tokens.max(initial=0) >= self.corpus.vocab_size:
                raise UserError(
                    f"corpus {self.corpus.directory}: record {index} of split '{self.corpus.split}' (document "
                    f"{record.document}) has token id {record.tokens.max()}, but its vocabulary has "
                    f"{self.corpus.vocab_size}: build the corpus again"
                )
        return records

    def _random_segments(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the random segments, and the index of the first one of each example."""
        starts = np.zeros(len(examples), np.int64)
        chosen = np.flatnonzero((examples["b_offset"] < 0) & (examples["b_tokens"] > 0))
        if not len(chosen):
            return self._tokens[:0], starts
        offsets = self.corpus.record_offsets
        first = np.searchsorted(offsets, examples["b_start"][chosen], "right") - 1
        with self._lock:
            records = self._random_records
            missing = np.array([index for index in np.unique(first).tolist() if index not in records], np.int64)
            records.update(zip(missing.tolist(), self._read(missing), strict=True))
        out = np.empty(examples["b_tokens"][chosen].sum(), self._tokens.dtype)
        at = 0
        for example, index in zip(chosen, first.tolist(), strict=True):
            row = examples[example]
            record, inside = records[index], int(row["b_start"] - offsets[index])
            skip = int(row["b_skip"]) + (int(record.sentence_ends[inside - 1]) if inside else 0)
            size = int(row["b_tokens"])
            out[at : at + size] = record.tokens[skip : skip + size]
            starts[example] = at
            at += size
        return out, starts


class CorpusRows:
    """One corpus as a sequence of rows. May be shared by threads."""

    def __init__(self, corpus: Corpus, data: DataConfig, special_ids: SpecialIds, seed: int):
        """Plans nothing yet."""
        self.corpus, self.data, self.special_ids, self.seed = corpus, data, special_ids, seed
        self._plans: dict[int, EpochPlanner] = {}
        self._windows: dict[tuple[int, int, int], LoadedWindow] = {}
        self._lock = threading.Lock()
        self._in_store = is_remote(corpus.directory)
        self._prefetched = (0, -1, -1)
        """The last window after which the next one was read ahead: row length, epoch, window"""

    def epoch_planner(self, seq_len: int) -> EpochPlanner:
        """The plan for rows of one length.

        Raises:
          UserError: see `EpochPlanner`.
        """
        if seq_len not in self._plans:
            of_other_length = next(iter(self._plans.values()), None)
            self._plans[seq_len] = (
                of_other_length.with_seq_len(seq_len)
                if of_other_length
                else EpochPlanner(self.corpus, self.data, seq_len, self.seed)
            )
        return self._plans[seq_len]

    def window(self, seq_len: int, position: CorpusPosition) -> LoadedWindow:
        """The window of a position; the last few are cached."""
        key = seq_len, position.epoch, position.window
        with self._lock:
            if key not in self._windows:
                planned = self.epoch_planner(seq_len).window(position.epoch, position.window)
                separated = self.data.format == "full_sentences"
                self._windows[key] = LoadedWindow(self.corpus, planned, separated)
                while len(self._windows) > WINDOWS_KEPT + self._in_store:
                    del self._windows[next(iter(self._windows))]
            return self._windows[key]

    def _window_spans(self, seq_len: int, position: CorpusPosition, count: int) -> Iterator[tuple[CorpusPosition, int]]:
        """The next `count` rows, split by window: (position of the first row, number of rows) of each span."""
        while count:
            left = len(self.window(seq_len, position).window) - position.row
            yield position, min(left, count)
            count -= min(left, count)
            position = self._next_window(seq_len, position)

    def advance(self, seq_len: int, position: CorpusPosition, count: int) -> CorpusPosition:
        """The position `count` rows later. The end of a window is returned as the start of the next one."""
        for start, taken in self._window_spans(seq_len, position, count):
            position = CorpusPosition(start.epoch, start.window, start.row + taken)
        if count and position.row == len(self.window(seq_len, position).window):
            return self._next_window(seq_len, position)
        return position

    def _next_window(self, seq_len: int, position: CorpusPosition) -> CorpusPosition:
        if position.window + 1 < self.epoch_planner(seq_len).windows:
            return CorpusPosition(position.epoch, position.window + 1, 0)
        return CorpusPosition(position.epoch + 1, 0, 0)

    def read_into(self, rows: Rows, slots: np.ndarray, position: CorpusPosition, count: int, first: int = 0) -> None:
        """Reads a share of the next rows of this corpus into rows of a batch.

        The rows of the global batch are sorted by their relative place in their window. So in all batches, a process
        reads from the same part of each window, which is loaded once.

        Args:
          rows: a batch, with `mask_epoch`.
          slots: indices of the rows of the batch that this corpus provides, int64 [n].
          position: of this corpus at the start of the global batch.
          count: rows of this corpus in the global batch.
          first: index of the first of the n rows among them, sorted; earlier processes read those before it.
        """
        seq_len, copies = rows["input_ids"].shape[1], self.data.mask_copies
        spans = [(start, self.window(seq_len, start), n) for start, n in self._window_spans(seq_len, position, count)]
        orders = [loaded.window.order[start.row : start.row + n] for start, loaded, n in spans]
        places = [(order + 0.5) / len(loaded.window) for (_, loaded, _), order in zip(spans, orders, strict=True)]
        chosen = np.argsort(np.concatenate(places), kind="stable")[first : first + len(slots)]
        window_rows = np.concatenate(orders)[chosen]
        span_of_row = np.repeat(np.arange(len(spans)), [n for *_, n in spans])[chosen]
        for i, (start, loaded, _) in enumerate(spans):
            own = span_of_row == i
            rows["mask_epoch"][slots[own]] = start.epoch if copies is None else start.epoch % copies
            loaded.read_into(rows, slots[own], window_rows[own], self.special_ids)

    def prefetch(self, seq_len: int, position: CorpusPosition) -> None:
        """If the corpus is in a store, reads the rest of a position's window and the next window in a thread.

        Of both it reads the part between the first and the last row that this process read last: a process reads from
        the same part of every window. Does nothing if no row of the window was read, and the second time.
        """
        key = seq_len, position.epoch, position.window
        with self._lock:
            loaded = self._windows.get(key)
            if not self._in_store or self._prefetched == key or loaded is None or loaded.last_read == (0, 0):
                return
            self._prefetched = key
        threading.Thread(target=self._load_ahead, args=(seq_len, position), daemon=True).start()

    def _load_ahead(self, seq_len: int, position: CorpusPosition) -> None:
        loaded = self.window(seq_len, position)
        low, high = (row / len(loaded.window) for row in loaded.last_read)
        for part in (position, self._next_window(seq_len, position)):
            loaded = self.window(seq_len, part)
            rows = np.arange(int(low * len(loaded.window)), min(len(loaded.window), int(high * len(loaded.window)) + 1))
            try:
                loaded.load(rows)
            except (UserError, OSError):  # reported when a batch needs the rows
                return

    def epoch_windows(self, seq_len: int, epoch: int) -> Iterator[WindowPlan]:
        """All windows of an epoch, planned one at a time and not cached."""
        plan = self.epoch_planner(seq_len)
        return (plan.window(epoch, index) for index in range(plan.windows))


@cached_njit
def _token_starts(lengths, offsets, records):
    """First token of each record in the window's buffer, and the end of the last, int64 [n + 1]."""
    starts = np.zeros(len(records) + 1, np.int64)
    for i in range(len(records)):
        tokens = 0
        for sentence in range(offsets[records[i]], offsets[records[i] + 1]):
            tokens += lengths[sentence]
        starts[i + 1] = starts[i] + tokens
    return starts


@cached_njit
def _row_members(row_starts, members, rows):
    """Examples of `rows`, row by row; the number of examples of each row; and the place of each example in its row."""
    counts = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        counts[i] = row_starts[rows[i] + 1] - row_starts[rows[i]]
    out = np.empty(counts.sum(), np.int64)
    places = np.empty(len(out), np.int64)
    at = 0
    for i in range(len(rows)):
        for place in range(counts[i]):
            out[at] = members[row_starts[rows[i]] + place]
            places[at] = place
            at += 1
    return out, counts, places


@cached_njit
def _missing_records(examples, starts, loaded):
    """Records of the window that contain tokens of these examples and were not read yet, ascending."""
    needed = np.zeros(len(loaded), np.bool_)
    for example in examples:
        for offset, size in ((example.a_offset, example.a_tokens), (example.b_offset, example.b_tokens)):
            if size and offset >= 0:
                record = np.searchsorted(starts, offset, "right") - 1
                while record < len(loaded) and starts[record] < offset + size:
                    needed[record] = not loaded[record]
                    record += 1
    return np.flatnonzero(needed)


@cached_njit
def _write_rows(examples, slots, places, text, special_ids, out):
    """Writes [CLS] A [SEP] B [SEP], or [CLS] A [SEP], one example after the other in each row."""
    end = 0
    for i in range(len(examples)):
        example, row, place = examples[i], slots[i], places[i]
        start = 0 if place == 0 else end
        out.input_ids[row, start] = special_ids.cls_id
        at = start + 1
        if len(text.document_offsets):
            at = _copy_documents(out.input_ids[row], at, example, text, special_ids.sep_id)
        else:
            for token in range(example.a_offset, example.a_offset + example.a_tokens):
                out.input_ids[row, at] = text.tokens[token]
                at += 1
        out.input_ids[row, at] = special_ids.sep_id
        at += 1
        if example.b_tokens:
            first_of_b = at
            source, first = text.tokens, np.int64(example.b_offset)
            if example.b_offset < 0:
                source, first = text.random_tokens, text.random_starts[i]
            for token in range(first, first + example.b_tokens):
                out.input_ids[row, at] = source[token]
                at += 1
            out.input_ids[row, at] = special_ids.sep_id
            at += 1
            out.token_type_ids[row, first_of_b:at] = 1
        out.segment_ids[row, start:at] = place + 1
        for position in range(start, at):
            out.position_ids[row, position] = position - start
        out.example_id[row, place] = example.example_id
        out.pair_labels[row, place] = example.pair_label
        out.cls_positions[row, place] = start
        end = at


@cached_njit
def _copy_documents(ids, at, example, text, sep_id):
    """Copies A with a [SEP] before every document that begins inside it; returns the end position."""
    next_document = np.searchsorted(text.document_offsets, example.a_start, "right")
    token, end = np.int64(example.a_offset), example.a_offset + example.a_tokens
    left = text.sentence_lengths[example.a_start] - example.a_skip
    for sentence in range(example.a_start, example.a_stop):
        if sentence > example.a_start:
            left = np.int64(text.sentence_lengths[sentence])
            if sentence == text.document_offsets[next_document]:
                next_document += 1
                ids[at] = sep_id
                at += 1
        for _ in range(min(left, end - token)):
            ids[at] = text.tokens[token]
            token += 1
            at += 1
    return at
