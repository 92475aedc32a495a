"""Rows of tokens, checked without the plan that they were made from."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import DataConfig
from bert_jax.data import epoch_plan as plan_module
from bert_jax.data.batch import empty_rows
from bert_jax.data.cursor import CorpusPosition
from bert_jax.data.row_reader import CorpusRows
from bert_jax.errors import UserError
from tests.data.memory import FIRST, FORMATS, PAIRS, SPECIAL_IDS, make_corpus, random_documents


def read_epoch(corpus, seq_len, **data):
    """All rows of epoch 0, as one batch."""
    source = CorpusRows(corpus, DataConfig(**data), SPECIAL_IDS, 0)
    total = sum(len(window) for window in source.epoch_windows(seq_len, 0))
    rows = empty_rows(total, seq_len, source.data.max_examples_per_row(seq_len), SPECIAL_IDS.pad_id)
    rows["mask_epoch"] = np.full(total, -1, np.int32)
    source.read_into(rows, np.arange(total), CorpusPosition(), total)
    assert (rows["mask_epoch"] == 0).all()
    return rows


def split(row, ids):
    """The examples of a row: (place, token ids, types, positions)."""
    for place in range(1, row["segment_ids"].max() + 1):
        where = np.flatnonzero(row["segment_ids"] == place)
        assert (np.diff(where) == 1).all()
        yield place - 1, where, ids[where], row["token_type_ids"][where], row["position_ids"][where]


def check_row(row, form, document_of) -> tuple[list[int], int]:
    """All invariants of one row; returns the corpus tokens that count as shown, and its number of examples."""
    seen, end = [], 0
    for place, where, ids, types, positions in split(row, row["input_ids"]):
        assert where[0] == end == row["cls_positions"][place]
        end = where[-1] + 1
        assert positions.tolist() == list(range(len(ids)))
        assert ids[0] == SPECIAL_IDS.cls_id and ids[-1] == SPECIAL_IDS.sep_id and row["example_id"][place] >= 0
        ends = np.flatnonzero(ids == SPECIAL_IDS.sep_id)
        segments = [part[part >= FIRST] - FIRST for part in np.split(ids, ends)[:-1]]
        assert all(len(segment) and (np.diff(segment) == 1).all() for segment in segments)
        assert len(ids) == sum(map(len, segments)) + len(segments) + 1
        label, documents = row["pair_labels"][place], [{*map(document_of, segment)} for segment in segments]
        assert all(len(documents_of_one) == 1 for documents_of_one in documents)
        if form in PAIRS:
            a, b = segments
            assert types.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
            follows = documents[0] == documents[1]
            expected = (a[0] > b[0]) if follows and form == "sentence_order" else not follows
            assert label == expected
            seen += [*a, *b] if follows else [*a]
        else:
            assert label == -1 and not types.any() and (form == "full_sentences" or len(segments) == 1)
            assert len(set.union(*documents)) == len(documents)
            seen += [token for segment in segments for token in segment]
    assert (row["input_ids"][end:] == SPECIAL_IDS.pad_id).all() and not row["segment_ids"][end:].any()
    assert not row["position_ids"][end:].any() and not row["token_type_ids"][end:].any()
    count = int(row["segment_ids"].max())
    assert (row["example_id"][count:] == -1).all() and (row["pair_labels"][count:] == -1).all()
    return [int(token) for token in seen], count


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.integers(1, 9), st.integers(1, 90)), min_size=1, max_size=8), min_size=2, max_size=20
    ),
    st.sampled_from(FORMATS),
    st.sampled_from(["sentence", "row"]),
    st.integers(1, 6),
    st.integers(8, 70),
)
def test_rows_say_what_they_are(documents, form, end, slots, seq_len):
    """Lengths, separators, types, segments, labels, positions; every token once or counted as truncated."""
    corpus = make_corpus(documents)
    rows = read_epoch(corpus, seq_len, format=form, example_end=end, examples_per_row=slots)
    sentence_of = np.repeat(np.arange(len(corpus.sentence_lengths)), corpus.sentence_lengths)

    def document_of(token):
        return int(np.searchsorted(corpus.document_offsets, sentence_of[token], "right")) - 1

    seen, examples = Counter(), 0
    for i in range(len(rows["input_ids"])):
        row = {name: array[i] for name, array in rows.items()}
        tokens, count = check_row(row, form, document_of)
        assert 1 <= count <= slots
        seen.update(tokens)
        examples += count
    source = CorpusRows(corpus, DataConfig(format=form, example_end=end), SPECIAL_IDS, 0)
    truncated = sum(window.truncated_tokens for window in source.epoch_windows(seq_len, 0))
    assert not seen or max(seen.values()) == 1
    assert len(seen) + truncated == corpus.num_tokens
    assert examples == sum(len(window.examples) for window in source.epoch_windows(seq_len, 0))


@pytest.mark.parametrize("form", FORMATS)
def test_any_rows_in_any_order(monkeypatch, form):
    """Rows read one by one, backwards and by many readers are the rows of the epoch. A batch is in the order of the
    text.
    """
    monkeypatch.setattr(plan_module, "CHUNK_TOKENS", 200)
    monkeypatch.setattr(plan_module, "WINDOW_CHUNKS", 4)
    corpus = make_corpus(random_documents(5, 150))
    whole = read_epoch(corpus, 48, format=form, examples_per_row=4)
    total = len(whole["input_ids"])
    source = CorpusRows(corpus, DataConfig(format=form, examples_per_row=4), SPECIAL_IDS, 0)
    position, positions = CorpusPosition(), []
    for _ in range(total):
        positions.append(position)
        position = source.advance(48, position, 1)
    assert position == CorpusPosition(1) and positions[-1].window == source.epoch_planner(48).windows - 1 >= 4
    index_of = {example: i for i, example in enumerate(whole["example_id"][:, 0].tolist())}
    read_alone = []
    for i in reversed(range(total)):
        rows = empty_rows(1, 48, 4, SPECIAL_IDS.pad_id, first=i)
        source.read_into(rows, np.zeros(1, np.int64), positions[i], 1)
        index = index_of[int(rows["example_id"][0, 0])]
        read_alone.append(index)
        for name in set(rows) - {"row"}:
            np.testing.assert_array_equal(rows[name][0], whole[name][index], err_msg=name)
    assert sorted(read_alone) == list(range(total)) != read_alone[::-1]
    count = total // 2
    assert source.advance(48, positions[3], count) == positions[3 + count]
    batch, share = (empty_rows(n, 48, 4, SPECIAL_IDS.pad_id) for n in (count, 5))
    source.read_into(batch, np.arange(count), positions[3], count)
    source.read_into(share, np.arange(5), positions[3], count, first=7)
    for name in set(share) - {"row"}:
        np.testing.assert_array_equal(share[name], batch[name][7:12], err_msg=name)
    in_window = len(source.window(48, positions[3]).window) - 3
    source.read_into(batch, np.arange(in_window), positions[3], in_window)
    assert (np.diff([index_of[example] for example in batch["example_id"][:in_window, 0].tolist()]) > 0).all()


def test_a_window_reads_each_record_once(monkeypatch):
    corpus, read = make_corpus(random_documents(6, 80)), Counter()
    original = type(corpus).records

    def spy(self, indices):
        read.update(indices)
        return original(self, indices)

    monkeypatch.setattr(type(corpus), "records", spy)
    source = CorpusRows(corpus, DataConfig(format="doc_sentences", examples_per_row=4), SPECIAL_IDS, 0)
    position = CorpusPosition()
    while position.epoch == 0:
        rows = empty_rows(3, 32, 4, SPECIAL_IDS.pad_id) | {"mask_epoch": np.zeros(3, np.int32)}
        source.read_into(rows, np.arange(3), position, 3)
        if not position.row:
            assert len(read) < (len(corpus.record_offsets) - 1) / 2  # only what these rows need
        position = source.advance(32, position, 3)
    assert set(read) == set(range(len(corpus.record_offsets) - 1)) and max(read.values()) <= 2


def test_processes_read_different_records(monkeypatch):
    """Over all batches of an epoch, a record is read by one process, or by two if their shares meet inside of it."""
    monkeypatch.setattr(plan_module, "WINDOW_CHUNKS", 4)
    monkeypatch.setattr(plan_module, "CHUNK_TOKENS", 2000)
    corpus, read = make_corpus([[20] * 50] * 40, per_record=50), Counter()
    original = type(corpus).records

    def spy(self, indices):
        read.update(indices)
        return original(self, indices)

    monkeypatch.setattr(type(corpus), "records", spy)
    for process in range(8):
        source = CorpusRows(corpus, DataConfig(format="doc_sentences", examples_per_row=1), SPECIAL_IDS, 0)
        position = CorpusPosition()
        while position.epoch == 0:
            rows = empty_rows(2, 64, 1, SPECIAL_IDS.pad_id)
            source.read_into(rows, np.arange(2), position, 16, first=2 * process)
            position = source.advance(64, position, 16)
    records = len(corpus.record_offsets) - 1
    assert set(read) == set(range(records)) and read.total() < 1.5 * records


def test_token_ids_are_below_the_vocabulary_size():
    corpus = make_corpus(random_documents(3, 20))
    corpus.__dict__["vocab_size"] = FIRST + corpus.num_tokens
    read_epoch(corpus, 32, format="doc_sentences")
    corpus.__dict__["vocab_size"] -= 1
    with pytest.raises(UserError, match="has token id"):
        read_epoch(corpus, 32, format="doc_sentences")
