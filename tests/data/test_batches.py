"""The stream: one set of batches, whoever reads them, from wherever, however fast."""

import dataclasses
import gc
import itertools
import threading
import time

import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.data.batches import Stream, empty_rows
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from bert_jax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus):
    return Tokenizer.load(tiny_corpus)


@pytest.fixture
def make(corpus, tokenizer, two_phases):
    def make_stream(config=two_phases, process=0, processes=1, **data):
        return Stream(corpus, config_lib.replace(config, data=data), tokenizer, process, processes)

    return make_stream


@pytest.fixture(scope="module")
def whole(corpus, tokenizer, two_phases):
    """Every update of the run."""
    return list(Stream(corpus, two_phases, tokenizer).read(Cursor()))


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_shapes_and_kinds(whole, two_phases):
    assert len(whole) == 12
    for i, (rows, following) in enumerate(whole):
        phase = two_phases.phases[i >= 7]
        batch, seq = phase.batch_size, phase.seq_len
        assert following.step == i + 1
        assert {name: array.shape for name, array in rows.items()} == {
            **dict.fromkeys(("input_ids", "token_type_ids", "segment_ids", "position_ids"), (batch, seq)),
            **dict.fromkeys(("example_id", "pair_labels", "cls_positions"), (batch, 1)),
            **dict.fromkeys(("row", "mask_epoch"), (batch,)),
        }
        assert {array.dtype for array in rows.values()} == {np.dtype(np.int32)}
        np.testing.assert_array_equal(rows["row"], np.arange(batch))


def test_rows_say_what_the_plan_says(whole, make, corpus, tokenizer, two_phases):
    """[CLS] A [SEP] B [SEP], rebuilt from the plan sentence by sentence."""
    stream, sizes = make(), set()
    for i, (rows, _) in enumerate(whole):
        seq_len = two_phases.phases[i >= 7].seq_len
        for r in range(len(rows["row"])):
            plan = stream.plan(seq_len, int(rows["mask_epoch"][r]))
            planned = plan.rows[rows["example_id"][r, 0]]
            segments = []
            for side in ("a", "b"):
                sentences = [
                    corpus.sentences(s, s + 1) for s in range(planned[f"{side}_start"], planned[f"{side}_stop"])
                ]
                segments.append(np.concatenate(sentences)[planned[f"{side}_skip"] :][: planned[f"{side}_tokens"]])
            a, b = segments
            expected = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
            n, types = len(expected), [0] * (len(a) + 2) + [1] * (len(b) + 1)
            assert n <= seq_len
            padding = seq_len - n
            sizes.add(padding)
            assert rows["input_ids"][r].tolist() == expected + [tokenizer.pad_id] * padding
            assert rows["token_type_ids"][r].tolist() == types + [0] * padding
            assert rows["segment_ids"][r].tolist() == [1] * n + [0] * padding
            assert rows["position_ids"][r].tolist() == list(range(n)) + [0] * padding
            assert rows["pair_labels"][r, 0] == planned["pair_label"] and rows["cls_positions"][r, 0] == 0
    assert 0 in sizes and len(sizes) > 5


def test_cursors_against_counting_rows_one_by_one(whole, make, two_phases):
    """A slow twin: rows are counted, epochs end where their plan does, phases open epochs of their own."""
    stream = make()
    epoch, row, step, epochs_seen, straddled = 0, 0, 0, set(), 0
    for number, phase in enumerate(two_phases.phases):
        if row:
            epoch, row = epoch + 1, 0
        for _ in range(phase.steps):
            assert stream.cursor_at(Cursor(), step) == Cursor(step, number, epoch, row)
            epochs = []
            for r in range(phase.batch_size):
                plan = stream.plan(phase.seq_len, epoch)
                assert whole[step].rows["example_id"][r, 0] == plan.example_at(row)[0]
                epochs.append(epoch)
                row += 1
                if row == len(plan):
                    epoch, row = epoch + 1, 0
            assert whole[step].rows["mask_epoch"].tolist() == epochs
            epochs_seen |= set(epochs)
            straddled += len(set(epochs)) > 1
            step += 1
    assert len(epochs_seen) >= 2 and straddled >= 1  # or the corpus is too large for this test
    assert whole[-1].following.step == two_phases.total_steps


def test_a_phase_that_ends_with_an_epoch_skips_none(make, two_phases):
    first, second = two_phases.phases
    whole_epoch = dataclasses.replace(first, steps=1, batch_size=len(make().plan(24, 0)))
    stream = make(dataclasses.replace(two_phases, phases=(whole_epoch, second)))
    assert stream.cursor_at(Cursor(), 1) == Cursor(1, 1, 1, 0)
    assert next(iter(stream.read(Cursor()))).following == Cursor(1, 1, 1, 0)
    one_more = dataclasses.replace(whole_epoch, batch_size=whole_epoch.batch_size + 1)
    stream = make(dataclasses.replace(two_phases, phases=(one_more, second)))
    assert stream.cursor_at(Cursor(), 1) == Cursor(1, 1, 2, 0)


def test_epochs_show_every_example_once(make, two_phases):
    long = dataclasses.replace(two_phases, phases=(dataclasses.replace(two_phases.phases[0], steps=60),))
    stream = make(long)
    seen = {}
    for rows, _ in stream.read(Cursor()):
        for epoch, example in zip(rows["mask_epoch"], rows["example_id"][:, 0], strict=True):
            seen.setdefault(int(epoch), []).append(int(example))
    assert len(seen) >= 4
    for epoch, examples in list(seen.items())[:-1]:
        assert sorted(examples) == list(range(len(stream.plan(24, epoch))))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_one_batch(whole, make, processes):
    streams = [make(process=i, processes=processes).read(Cursor()) for i in range(processes)]
    for (rows, following), *shares in zip(whole, *streams, strict=True):
        assert {share.following for share in shares} == {following}
        assert len({len(share.rows["row"]) for share in shares}) == 1
        joined = {name: np.concatenate([share.rows[name] for share in shares]) for name in rows}
        assert_same(joined, rows)


@pytest.mark.parametrize("prefetch", [1, 7])
def test_prefetch_changes_nothing(whole, make, prefetch):
    for one, two in zip(whole, make(prefetch=prefetch).read(Cursor()), strict=True):
        assert one.following == two.following
        assert_same(one.rows, two.rows)


def test_resume_from_every_cursor(whole, make):
    for step, (_, cursor) in enumerate(whole[:-1]):
        # A fresh stream: nothing is remembered from before.
        resumed = list(itertools.islice(make().read(cursor), 2))
        for one, two in zip(whole[step + 1 : step + 3], resumed, strict=step < len(whole) - 2):
            assert one.following == two.following
            assert_same(one.rows, two.rows)
    assert list(make().read(whole[-1].following)) == []


def test_resume_plans_no_earlier_epoch(make, two_phases, monkeypatch):
    from bert_jax.data import batches

    planned, original = [], batches.plan_epoch

    def spy(corpus, data, seq_len, seed, epoch):
        planned.append(epoch)
        return original(corpus, data, seq_len, seed, epoch)

    monkeypatch.setattr(batches, "plan_epoch", spy)
    next(iter(make().read(Cursor(step=5, phase=0, epoch=70, row=3))))
    assert min(planned) == 70


def test_more_steps_change_no_earlier_row(whole, make, two_phases):
    longer = dataclasses.replace(two_phases.phases[1], steps=50)
    extended = make(dataclasses.replace(two_phases, phases=(two_phases.phases[0], longer)))
    for one, two in zip(whole, itertools.islice(extended.read(Cursor()), 12), strict=True):
        assert_same(one.rows, two.rows)
    first = dataclasses.replace(two_phases.phases[0], steps=40)
    extended = make(dataclasses.replace(two_phases, phases=(first, two_phases.phases[1])))
    for one, two in zip(whole[:7], itertools.islice(extended.read(Cursor()), 7), strict=True):
        assert_same(one.rows, two.rows)


def test_seed_decides(whole, make, two_phases):
    other = next(iter(make(dataclasses.replace(two_phases, seed=1)).read(Cursor())))
    assert (other.rows["input_ids"] != whole[0].rows["input_ids"]).any()


def test_copies_repeat_masks_and_examples_separately(make, two_phases):
    long = dataclasses.replace(two_phases, phases=(dataclasses.replace(two_phases.phases[0], steps=60),))

    def epochs_and_texts(**data):
        found = {}
        for rows, following in make(long, **data).read(Cursor()):
            for example, ids, epoch in zip(
                rows["example_id"][:, 0], rows["input_ids"], rows["mask_epoch"], strict=True
            ):
                found.setdefault(int(epoch), {})[int(example)] = ids.tobytes()
            last = following
        return found, last

    plain, last = epochs_and_texts()
    assert last.epoch >= 4 and plain.keys() == set(range(last.epoch + 1))
    static, _ = epochs_and_texts(mask_copies=2)
    assert static.keys() == {0, 1}
    repeated, _ = epochs_and_texts(example_copies=1)
    assert repeated.keys() >= {0, 1, 2}
    assert repeated[0] == repeated[1] == plain[0] != plain[1]


def test_evaluation_rows_stop_at_the_limit(make):
    stream = make()
    rows = stream.rows_of_epoch(24, 0, 4, 12, limit=7)
    assert (rows["example_id"][:3] >= 0).all() and (rows["example_id"][3:] == -1).all()
    assert (rows["segment_ids"][3:] == 0).all() and (rows["mask_epoch"] == 0).all()
    np.testing.assert_array_equal(rows["example_id"][:3, 0], stream.plan(24, 0).example_at(np.arange(4, 7)))


def test_empty_rows_are_padding():
    rows = empty_rows(2, 8, 9)
    assert (rows["input_ids"] == 9).all() and (rows["segment_ids"] == 0).all() and (rows["example_id"] == -1).all()


def test_one_document_is_refused(tmp_path, tokenizer, two_phases):
    from data_prep.writer import CorpusWriter

    with CorpusWriter(tmp_path / "c", "one", tokenizer) as writer:
        for split in ("train", "validation"):
            writer.add(split, np.arange(10), np.array([5, 5]), text_bytes=9)
        writer.finish({"sources": [{"spec": "test"}]})
    stream = Stream(Corpus.open(tmp_path / "c"), two_phases, tokenizer)
    with pytest.raises(UserError, match="need at least 2"):
        next(iter(stream.read(Cursor())))


def test_readers_end_with_their_iterator(make):
    """Neither a finished, nor a dropped, nor a never started iterator leaves a thread."""
    list(make().read(Cursor()))
    gc.collect()
    time.sleep(0.3)
    before = set(threading.enumerate())
    half_read = make().read(Cursor())
    next(half_read)
    assert set(threading.enumerate()) - before  # there are threads to leak
    finished = make().read(Cursor())
    list(finished)
    untouched = make().read(Cursor())
    del half_read, finished, untouched
    gc.collect()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before
