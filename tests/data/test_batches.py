"""The stream: the same batches for any number of readers and processes, from any cursor."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.data import epoch_plan as plan_module
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition, Cursor
from bert_jax.data.mixture import CYCLE_ROWS
from bert_jax.errors import UserError
from tests.data.memory import SPECIAL_IDS, make_corpus, random_documents


@pytest.fixture(scope="module", autouse=True)
def small_windows():
    """Several windows per epoch of a small corpus."""
    patch = pytest.MonkeyPatch()
    patch.setattr(plan_module, "CHUNK_TOKENS", 100)
    patch.setattr(plan_module, "WINDOW_CHUNKS", 6)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.fixture
def make(corpus, special_ids, two_phases):
    def make_stream(config=two_phases, process=0, processes=1, **data):
        return TrainingStream([corpus], [1.0], config_lib.replace(config, data=data), special_ids, process, processes)

    return make_stream


@pytest.fixture(scope="module")
def whole(corpus, special_ids, two_phases):
    """Every batch of the run."""
    return list(TrainingStream([corpus], [1.0], two_phases, special_ids).batches(Cursor()))


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def assert_same_batches(left, right):
    left = list(left)
    assert left
    for one, two in zip(left, right, strict=True):
        assert (one.next_cursor, one.size) == (two.next_cursor, two.size)
        assert_same(one.rows, two.rows)


def assert_same_set(batch, smaller):
    """The rows of a batch are those of smaller ones, in another order."""
    joined = {name: np.concatenate([rows[name] for rows in smaller]) for name in batch}
    left, right = (np.lexsort([rows["mask_epoch"], *rows["example_id"].T]) for rows in (batch, joined))
    for name in set(batch) - {"row"}:
        np.testing.assert_array_equal(batch[name][left], joined[name][right], err_msg=name)


def test_shapes_and_kinds(whole, two_phases):
    assert len(whole) == 12
    for i, (rows, size, following) in enumerate(whole):
        phase = two_phases.phases[i >= 7]
        batch, seq = phase.batch_size, phase.seq_len
        assert following.step == i + 1 and size == batch
        assert {name: array.shape for name, array in rows.items()} == {
            **dict.fromkeys(("input_ids", "token_type_ids", "segment_ids", "position_ids"), (batch, seq)),
            **dict.fromkeys(("example_id", "pair_labels", "cls_positions"), (batch, 4)),
            **dict.fromkeys(("row", "mask_epoch"), (batch,)),
        }
        assert {array.dtype for array in rows.values()} == {np.dtype(np.int32)}
        np.testing.assert_array_equal(rows["row"], np.arange(batch))


def test_cursors_against_counting_rows_one_by_one(whole, make, two_phases):
    """Slow reference: rows are counted, windows and epochs end as planned, every phase starts a new epoch; the rows of
    a batch are sorted by their relative place in their window.
    """
    stream = make()
    (source,) = stream.corpora
    at, step, epochs_seen, straddled = [0, 0, 0], 0, set(), 0
    for number, phase in enumerate(two_phases.phases):
        plan = source.epoch_planner(phase.seq_len)
        if at[1:] != [0, 0]:
            at = [at[0] + 1, 0, 0]
        for _ in range(phase.steps):
            here = stream.cursor_at(Cursor(), step)
            assert (here.step, here.phase, here.positions) == (step, number, (CorpusPosition(*at),))
            epochs, batch = [], []
            for r in range(phase.batch_size):
                window = plan.window(at[0], at[1])
                row = window.order[at[2]]
                first = window.members[window.row_starts[row]]
                batch.append(((row + 0.5) / len(window), r, window.examples["example_id"][first], at[0]))
                at[2] += 1
                if at[2] == len(window):
                    at = [at[0], at[1] + 1, 0]
                if at[1] == plan.windows:
                    at = [at[0] + 1, 0, 0]
            _, _, examples, epochs = zip(*sorted(batch), strict=True)
            assert whole[step].rows["example_id"][:, 0].tolist() == list(examples)
            assert whole[step].rows["mask_epoch"].tolist() == list(epochs)
            epochs_seen |= set(epochs)
            straddled += len(set(epochs)) > 1
            step += 1
    assert len(epochs_seen) >= 2 and straddled >= 1  # or the corpus is too large for this test
    assert whole[-1].next_cursor.step == two_phases.total_steps


def test_a_phase_that_ends_with_an_epoch_skips_none(make, two_phases):
    first, second = two_phases.phases
    (source,) = make().corpora
    rows = sum(len(window) for window in source.epoch_windows(first.seq_len, 0))
    whole_epoch = dataclasses.replace(first, steps=1, batch_size=rows)
    stream = make(dataclasses.replace(two_phases, phases=(whole_epoch, second)))
    assert stream.cursor_at(Cursor(), 1) == Cursor(1, 1, rows, (CorpusPosition(1),))
    one_more = dataclasses.replace(whole_epoch, batch_size=rows + 1)
    stream = make(dataclasses.replace(two_phases, phases=(one_more, second)))
    assert stream.cursor_at(Cursor(), 1) == Cursor(1, 1, rows + 1, (CorpusPosition(2),))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_one_batch(whole, make, processes):
    streams = [make(process=i, processes=processes).batches(Cursor()) for i in range(processes)]
    for (rows, size, following), *shares in zip(whole, *streams, strict=True):
        assert {share.next_cursor for share in shares} == {following} and {share.size for share in shares} == {size}
        assert len({len(share.rows["row"]) for share in shares}) == 1
        joined = {name: np.concatenate([share.rows[name] for share in shares]) for name in rows}
        assert_same(joined, rows)


def test_a_process_reads_only_its_own_records(corpus, special_ids, two_phases, monkeypatch):
    read = {0: set(), 1: set()}
    original = Corpus.records
    config = config_lib.replace(two_phases, data={"format": "doc_sentences"}, objective={"pair": "none"})
    for process in (0, 1):

        def spy(self, indices, process=process):
            read[process].update(indices)
            return original(self, indices)

        monkeypatch.setattr(Corpus, "records", spy)
        stream = TrainingStream([corpus], [1.0], config, special_ids, process, 2)
        stream.rows_at(stream.normalize_cursor(Cursor()))
    assert read[0] and read[1] and read[0] != read[1]
    assert max(map(len, read.values())) < len(corpus.record_offsets) - 1


def test_prefetch_changes_nothing(whole, make):
    for prefetch in (1, 7):
        assert_same_batches(whole, make(prefetch=prefetch).batches(Cursor()))


def test_resume_from_every_cursor(whole, make):
    for step, (_, _, cursor) in enumerate(whole[:-1]):
        # A new stream, and a cursor from a checkpoint: no state is kept.
        saved = Cursor.from_dict(json.loads(json.dumps(dataclasses.asdict(cursor))))
        assert saved == cursor
        resumed = list(itertools.islice(make().batches(saved), 2))
        assert_same_batches(whole[step + 1 : step + 3], resumed)
    assert list(make().batches(whole[-1].next_cursor)) == []


def test_resume_plans_no_earlier_window(make, monkeypatch):
    planned, original = [], plan_module.EpochPlanner.window

    def spy(self, epoch, index):
        planned.append((epoch, index))
        return original(self, epoch, index)

    monkeypatch.setattr(plan_module.EpochPlanner, "window", spy)
    next(iter(make().batches(Cursor(step=5, phase=0, rows=120, positions=(CorpusPosition(70, 2, 3),)))))
    assert min(planned) == (70, 2)


def test_more_steps_change_no_earlier_row(whole, make, two_phases):
    longer = dataclasses.replace(two_phases.phases[1], steps=50)
    extended = make(dataclasses.replace(two_phases, phases=(two_phases.phases[0], longer)))
    assert_same_batches(whole, itertools.islice(extended.batches(Cursor()), 12))
    first = dataclasses.replace(two_phases.phases[0], steps=40)
    extended = make(dataclasses.replace(two_phases, phases=(first, two_phases.phases[1])))
    for one, two in zip(whole[:7], itertools.islice(extended.batches(Cursor()), 7), strict=True):
        assert_same(one.rows, two.rows)


def test_seed_decides(whole, make, two_phases):
    other = next(iter(make(dataclasses.replace(two_phases, seed=1)).batches(Cursor())))
    assert (other.rows["input_ids"] != whole[0].rows["input_ids"]).any()


def test_a_ramp_moves_the_cursor_by_what_it_reads(make, two_phases):
    sizes = {"batch_size": 24, "accumulation": 3, "start_batch_size": 8}
    ramp = dataclasses.replace(two_phases.phases[0], steps=9, ramp_steps=6, **sizes)
    ramped = list(make(dataclasses.replace(two_phases, phases=(ramp,))).batches(Cursor()))
    assert [update.size for update in ramped] == [8, 8, 16, 16, 24, 24, 24, 24, 24]
    flat = dataclasses.replace(ramp, batch_size=8, accumulation=1, start_batch_size=None, ramp_steps=0, steps=21)
    stream = make(dataclasses.replace(two_phases, phases=(flat,)))
    eights = iter([update.rows for update in stream.batches(Cursor())])
    for update in ramped:
        assert_same_set(update.rows, list(itertools.islice(eights, update.size // 8)))
    assert ramped[-1].next_cursor.positions == stream.cursor_at(Cursor(), 21).positions


def test_skipped_intervals(whole, make, two_phases):
    """After going back to step 3, the rows of steps 4 to 6 and 9 are skipped; the others are unchanged."""
    back = whole[2].next_cursor.skipping_rows(4 * 24, 7 * 24).skipping_rows(9 * 24, 10 * 24)
    updates = list(make().batches(back))
    assert [update.next_cursor.step for update in updates] == list(range(4, 13))
    # A phase keeps its number of steps: the second begins three batches later.
    longer = dataclasses.replace(two_phases.phases[0], steps=12)
    straight = list(make(dataclasses.replace(two_phases, phases=(longer,))).batches(Cursor()))
    for update, number in zip(updates[:4], (3, 7, 8, 10), strict=True):
        assert_same(update.rows, straight[number].rows)
    assert updates[4].rows["input_ids"].shape[1] == two_phases.phases[1].seq_len
    # Resuming from a cursor after them, or inside one, changes nothing.
    assert_same_batches(make().batches(updates[0].next_cursor), updates[1:])
    inside = whole[4].next_cursor.skipping_rows(4 * 24, 7 * 24)
    assert make().normalize_cursor(inside).rows == 7 * 24


def test_skipped_rows_in_a_ramp(make, two_phases):
    """Batches grow with the step, so batches after an interval differ: intervals are in rows."""
    sizes = {"batch_size": 24, "accumulation": 3, "start_batch_size": 8}
    ramp = dataclasses.replace(two_phases.phases[0], steps=12, ramp_steps=8, **sizes)
    stream = make(dataclasses.replace(two_phases, phases=(ramp,)))
    cursors = [stream.cursor_at(Cursor(), step) for step in range(10)]
    back = cursors[2].skipping_rows(cursors[2].rows, cursors[9].rows)
    assert stream.normalize_cursor(back).positions == cursors[9].positions and stream.normalize_cursor(back).step == 2
    first, skipped = next(stream.batches(back)).rows, stream.rows_at(cursors[2])
    rows = stream.rows_at(cursors[9])
    assert len(first["row"]) < len(rows["row"])
    expected = rows["input_ids"].tolist()
    assert all(row in expected for row in first["input_ids"].tolist())
    assert not any(row in expected for row in skipped["input_ids"].tolist())


def test_weights_of_a_phase(two_phases):
    """A phase has its own shares; a corpus without weight keeps its position; a resumed stream is the same."""
    corpora = [make_corpus(random_documents(i, 20 * i), name=f"part{i}") for i in (1, 2, 3)]
    weights = (("part3", 1.0), ("part1", 3.0), ("part2", 0.0))
    phases = two_phases.phases[0], dataclasses.replace(two_phases.phases[0], corpus_weights=weights)
    config = dataclasses.replace(two_phases, phases=(*phases, two_phases.phases[0]))
    stream = TrainingStream(corpora, [0.2, 0.25, 0.55], config, SPECIAL_IDS)
    batches = list(stream.batches(Cursor()))
    steps = config.phases[0].steps
    first, second, third = (batches[i * steps - 1].next_cursor for i in (1, 2, 3))
    assert [order.counts.tolist() for order in stream.mixture_orders][:2] == [[2000, 2500, 5500], [7500, 0, 2500]]
    assert second.positions[1].row == 0 and second.positions[1].epoch <= first.positions[1].epoch + 1
    assert third.positions[1] != second.positions[1], "read again in a phase without weights"
    assert_same_batches(batches[steps + 2 :], stream.batches(batches[steps + 1].next_cursor))
    for changed, message in (
        ((("part1", 1.0), ("part4", 1.0)), "phases.1.corpus_weights: there is no corpus 'part4'"),
        ((("part1", 1.0), ("part2", 1.0)), "phases.1.corpus_weights has no weight for corpus 'part3'"),
        ((("part1", 1.0), ("part2", 1e-9), ("part3", 0.0)), "a corpus has a share of 1e-09 of the mixture"),
    ):
        wrong = dataclasses.replace(phases[1], corpus_weights=changed)
        with pytest.raises(UserError, match=re.escape(message)):
            TrainingStream(
                corpora, [0.2, 0.25, 0.55], dataclasses.replace(config, phases=(phases[0], wrong)), SPECIAL_IDS
            )


def test_mixture_order(two_phases):
    """Exact shares in every cycle; each corpus's rows are those it has alone, in its own order and epochs."""
    corpora = [make_corpus(random_documents(i, 20 * i), name=f"part{i}") for i in (1, 2, 3)]
    shares = [0.2, 0.25, 0.55]
    config = dataclasses.replace(two_phases, phases=(dataclasses.replace(two_phases.phases[0], steps=84),))
    config = config_lib.replace(config, data={"examples_per_row": 1})
    stream = TrainingStream(corpora, shares, config, SPECIAL_IDS)
    updates = list(stream.batches(Cursor()))
    rows = {name: np.concatenate([update.rows[name] for update in updates]) for name in updates[0].rows}
    corpus_of_row = stream.mixture_orders[0].corpus_of_rows(0, len(rows["row"]))
    cycle = stream.mixture_orders[0].corpus_of_rows(0, CYCLE_ROWS)
    np.testing.assert_array_equal(np.bincount(cycle), np.array(shares) * CYCLE_ROWS)
    np.testing.assert_allclose(np.bincount(corpus_of_row) / len(corpus_of_row), shares, atol=2 / len(corpus_of_row))
    for i, corpus in enumerate(corpora):
        count = int((corpus_of_row == i).sum())
        alone = dataclasses.replace(config.phases[0], steps=1, batch_size=count, accumulation=1)
        alone = TrainingStream([corpus], [1.0], dataclasses.replace(config, phases=(alone,)), SPECIAL_IDS)
        assert_same_set(next(alone.batches(Cursor())).rows, [{n: rows[n][corpus_of_row == i] for n in rows}])
    epochs = [position.epoch for position in updates[-1].next_cursor.positions]
    assert len(set(epochs)) > 1  # they go round at their own pace
    resumed = TrainingStream(corpora, shares, config, SPECIAL_IDS).batches(updates[40].next_cursor)
    assert_same_batches(updates[41:44], itertools.islice(resumed, 3))
    halves = [TrainingStream(corpora, shares, config, SPECIAL_IDS, i, 2).batches(Cursor()) for i in (0, 1)]
    for update, left, right in zip(updates[:20], *halves, strict=False):
        assert_same(update.rows, {n: np.concatenate([left.rows[n], right.rows[n]]) for n in update.rows})
