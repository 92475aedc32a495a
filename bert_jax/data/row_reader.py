"""Reads the tokens of planned rows: records are read once per window, compiled code writes the rows."""

import threading
from typing import NamedTuple

import numba
import numpy as np

from bert_jax.data.corpus import Corpus, token_dtype
from bert_jax.data.epoch_plan import Window
from bert_jax.errors import UserError

Rows = dict[str, np.ndarray]


class SpecialIds(NamedTuple):
    """Ids of the special tokens of a row."""

    pad_id: int
    cls_id: int
    sep_id: int


def empty_rows(count: int, seq_len: int, slots: int, pad_id: int) -> Rows:
    """Rows of padding with `slots` examples each; example_id is -1 for slots without an example."""
    rows = {name: np.zeros((count, seq_len), np.int32) for name in ("token_type_ids", "segment_ids", "position_ids")}
    rows["input_ids"] = np.full((count, seq_len), pad_id, np.int32)
    rows["example_id"] = np.full((count, slots), -1, np.int32)
    rows["pair_labels"] = np.full((count, slots), -1, np.int32)
    rows["cls_positions"] = np.zeros((count, slots), np.int32)
    return rows


class LoadedWindow:
    """A window and those of its tokens that were read so far. May be shared by threads."""

    def __init__(self, corpus: Corpus, window: Window, separated: bool):
        """Reads nothing yet; with `separated`, a [SEP] follows each document of an example."""
        self.corpus, self.window = corpus, window
        self._records = np.concatenate([np.arange(first, last) for first, last in window.chunks])
        lengths, offsets = np.asarray(corpus.sentence_lengths), np.asarray(corpus.record_offsets)
        self._starts = _token_starts(lengths, offsets, self._records)
        self._tokens = np.empty(self._starts[-1], token_dtype(corpus.vocab_size))
        self._loaded = np.zeros(len(self._records), np.bool_)
        self._lock = threading.Lock()
        # Used to find documents that begin inside an example.
        none = np.zeros(0, np.int64)
        self._text = (lengths, np.asarray(corpus.document_offsets) if separated else none)

    def read_into(self, rows: Rows, slots: np.ndarray, window_rows: np.ndarray, special_ids: SpecialIds) -> None:
        """Reads rows of the window into rows of a batch.

        Args:
          rows: from `empty_rows`.
          slots: indices of rows of the batch, int64 [n].
          window_rows: indices of rows of the window, in the order of training, int64 [n].
          special_ids: ids of the special tokens.

        Raises:
          UserError: a record is damaged; the message names the shard and the document.
        """
        members, counts, places = _row_members(
            self.window.row_starts, self.window.members, self.window.order[window_rows]
        )
        examples = self.window.examples[members]
        self._load(examples)
        random_tokens, starts = self._random_segments(examples)
        _write_rows(
            examples,
            np.repeat(slots, counts),
            places,
            self._tokens,
            random_tokens,
            starts,
            *self._text,
            special_ids.cls_id,
            special_ids.sep_id,
            rows["input_ids"],
            rows["token_type_ids"],
            rows["segment_ids"],
            rows["position_ids"],
            rows["example_id"],
            rows["pair_labels"],
            rows["cls_positions"],
        )

    def _load(self, examples: np.ndarray) -> None:
        with self._lock:
            missing = _missing_records(examples, self._starts, self._loaded)
            for index, record in zip(missing, self._read(self._records[missing]), strict=True):
                self._tokens[self._starts[index] : self._starts[index + 1]] = record.tokens
                self._loaded[index] = True

    def _read(self, indices: np.ndarray) -> list:
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
        last = np.searchsorted(offsets, examples["b_stop"][chosen], "left")
        indices = np.unique(np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]))
        records = dict(zip(indices.tolist(), self._read(indices), strict=True))
        out = np.empty(examples["b_tokens"][chosen].sum(), self._tokens.dtype)
        at = 0
        for example, a, b in zip(chosen, first.tolist(), last.tolist(), strict=True):
            row = examples[example]
            record, inside = records[a], int(row["b_start"] - offsets[a])
            skip = int(row["b_skip"]) + (int(record.sentence_ends[inside - 1]) if inside else 0)
            whole = record.tokens if b - a == 1 else np.concatenate([records[i].tokens for i in range(a, b)])
            size = int(row["b_tokens"])
            out[at : at + size] = whole[skip : skip + size]
            starts[example] = at
            at += size
        return out, starts


@numba.njit(cache=True, nogil=True)
def _token_starts(lengths, offsets, records):
    """First token of each record in the window's buffer, and the end of the last, int64 [n + 1]."""
    starts = np.zeros(len(records) + 1, np.int64)
    for i in range(len(records)):
        tokens = 0
        for sentence in range(offsets[records[i]], offsets[records[i] + 1]):
            tokens += lengths[sentence]
        starts[i + 1] = starts[i] + tokens
    return starts


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _write_rows(
    examples, slots, places, tokens, random_tokens, starts, lengths, documents, cls_id, sep_id,
    input_ids, token_type_ids, segment_ids, position_ids, example_id, pair_labels, cls_positions,
):  # fmt: skip
    """Writes [CLS] A [SEP] B [SEP], or [CLS] A [SEP], one example after the other in each row."""
    end = 0
    for i in range(len(examples)):
        example, row, place = examples[i], slots[i], places[i]
        start = 0 if place == 0 else end
        input_ids[row, start] = cls_id
        at = start + 1
        if len(documents):
            at = _copy_documents(input_ids[row], at, example, tokens, lengths, documents, sep_id)
        else:
            for token in range(example.a_offset, example.a_offset + example.a_tokens):
                input_ids[row, at] = tokens[token]
                at += 1
        input_ids[row, at] = sep_id
        at += 1
        if example.b_tokens:
            first_of_b = at
            source, first = (random_tokens, starts[i]) if example.b_offset < 0 else (tokens, np.int64(example.b_offset))
            for token in range(first, first + example.b_tokens):
                input_ids[row, at] = source[token]
                at += 1
            input_ids[row, at] = sep_id
            at += 1
            token_type_ids[row, first_of_b:at] = 1
        segment_ids[row, start:at] = place + 1
        for position in range(start, at):
            position_ids[row, position] = position - start
        example_id[row, place] = example.example_id
        pair_labels[row, place] = example.pair_label
        cls_positions[row, place] = start
        end = at


@numba.njit(cache=True, nogil=True)
def _copy_documents(ids, at, example, tokens, lengths, documents, sep_id):
    """Copies A with a [SEP] before every document that begins inside it; returns the end position."""
    next_document = np.searchsorted(documents, example.a_start, "right")
    token, end = np.int64(example.a_offset), example.a_offset + example.a_tokens
    left = lengths[example.a_start] - example.a_skip
    for sentence in range(example.a_start, example.a_stop):
        if sentence > example.a_start:
            left = np.int64(lengths[sentence])
            if sentence == documents[next_document]:
                next_document += 1
                ids[at] = sep_id
                at += 1
        for _ in range(min(left, end - token)):
            ids[at] = tokens[token]
            token += 1
            at += 1
    return at
