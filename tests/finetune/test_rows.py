"""Encoded examples and packed rows: every example once an epoch, with its tokens and labels, on any batch size."""

import dataclasses

import numpy as np
import pytest
from etils import epath
from jax.sharding import AbstractMesh, AxisType

from bert_jax.data.batch import SpecialIds
from bert_jax.data.cursor import Cursor
from bert_jax.finetune.encoding import EncodedExamples, encode_choices, encode_examples, encode_sentences
from bert_jax.finetune.example_rows import ExampleRows
from bert_jax.finetune.seed_run import _row_counts
from bert_jax.finetune.tables import Example
from bert_jax.finetune.tagging import TaggedSentence
from bert_jax.tokenizers import tokenizer
from bert_jax.training.micro_batch import TrainSteps
from bert_jax.training.programs import put_step_inputs
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.sharding import put_rows
from tests.finetune.tiny_task import EXAMPLES, MODEL, ROWS, arrays, make_programs, make_task

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef", *(f"##{c}" for c in "abcdef")]


@pytest.fixture(scope="module")
def letters():
    return tokenizer.wordpiece(PIECES, True, "test")


def ids(tokenizer, text):
    return [tokenizer.token_to_id(piece) for piece in text.split()]


def truncated_as_in_bert(first, second, room):
    """`_truncate_seq_pair` of google-research/bert run_classifier.py."""
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def test_pairs_are_truncated_as_in_bert(letters):
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 12, size=(200, 2)).tolist()
    examples = [Example((" ".join("a" * a), " ".join("b" * b)), 1) for a, b in sizes]
    encoded = encode_examples(examples, letters, 13, 2)
    for i, (a, b) in enumerate(sizes):
        kept_a, kept_b = truncated_as_in_bert(a, b, 10)
        row = encoded.input_ids[encoded.starts[i] : encoded.starts[i + 1]].tolist()
        text = " ".join(["[CLS]", *"a" * kept_a, "[SEP]", *"b" * kept_b, "[SEP]"])
        assert row == ids(letters, text), (a, b)
        types = encoded.token_type_ids[encoded.starts[i] : encoded.starts[i + 1]].tolist()
        assert types == [0] * (kept_a + 2) + [1] * (kept_b + 1)
    assert encoded.truncated == sum(a + b > 10 for a, b in sizes) > 0


def test_single_texts_and_labels(letters):
    encoded = encode_examples([Example(("ab c",), 0.5), Example(("",), None)], letters, 5, 0)
    assert encoded.input_ids.tolist() == ids(letters, "[CLS] a ##b c [SEP] [CLS] [SEP]")
    assert encoded.labels.dtype == np.float32 and encoded.labels[0] == 0.5 and np.isnan(encoded.labels[1])
    assert encode_examples([Example(("a",), None)], letters, 5, 2).labels.tolist() == [-1]
    assert not encode_examples([Example(("a", "b"), 0)], letters, 9, 1).token_type_ids.any()


def test_sentences(letters):
    sentences = [TaggedSentence(("ab", "c", "def"), ("X", "O", "Z")), TaggedSentence(("a",), ("O",))]
    encoded, first_tokens = encode_sentences(sentences, ("O", "X"), letters, 6)
    assert encoded.input_ids.tolist() == ids(letters, "[CLS] a ##b c d [SEP] [CLS] a [SEP]")
    assert encoded.labels.tolist() == [-1, 1, -1, 0, -1, -1, -1, 0, -1]
    assert first_tokens.tolist() == [1, 3, 4, 7]
    assert encoded.truncated == 1 and encoded.labels_tokens


def split(count, seed, by_token=False):
    """Examples of 2 to 20 tokens with random ids; the label of each is its index, or its token's."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(rng.integers(2, 21, size=count))])
    tokens = rng.integers(5, 17, size=starts[-1]).astype(np.int32)
    labels = np.arange(starts[-1] if by_token else count, dtype=np.int32)
    return EncodedExamples(tokens, tokens % 2, starts, labels, 0)


def unpacked(rows):
    """(example, tokens, types, labels) of every packed example of a batch."""
    for row, slot in np.argwhere(rows["example_id"] >= 0):
        inside = rows["segment_ids"][row] == slot + 1
        assert rows["position_ids"][row, inside].tolist() == list(range(inside.sum()))
        assert rows["cls_positions"][row, slot] == np.flatnonzero(inside)[0]
        by_token = rows["labels"].shape == rows["input_ids"].shape
        labels = rows["labels"][row, inside].tolist() if by_token else [rows["labels"][row, slot]]
        yield rows["example_id"][row, slot], rows["input_ids"][row, inside], rows["token_type_ids"][row, inside], labels


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("batch", "slots"), [(4, 1), (5, 3), (64, 8)])
def test_every_example_once_an_epoch(batch, slots, by_token):
    examples = split(23, 1, by_token)
    rows_of_split = ExampleRows(examples, 32, slots, SpecialIds(0, 2, 3), seed=7)
    per_epoch = rows_of_split.batches_per_epoch(batch)
    counts = sorted(set(rows_of_split.row_counts(2 * per_epoch, batch).tolist()))
    orders = []
    for epoch in range(2):
        found = []
        for i in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            rows = rows_of_split.training_rows(i, batch, counts)
            assert len(rows["input_ids"]) in counts and rows["example_id"][-1].max() >= 0
            for example, tokens, types, labels in unpacked(rows):
                found.append(example)
                span = slice(examples.starts[example], examples.starts[example + 1])
                assert (tokens == examples.input_ids[span]).all() and (types == examples.token_type_ids[span]).all()
                assert labels == (list(range(span.start, span.stop)) if by_token else [example])
        assert sorted(found) == list(range(23))
        orders.append(found)
    assert orders[0] != orders[1] or batch > 23
    in_order = [example for rows in rows_of_split.in_order(3) for example, *_ in unpacked(rows)]
    assert sorted(in_order) == list(range(23))


def test_the_texts_of_a_choice_are_neighbours(letters):
    """In one row, each a segment of its own with its own positions; the label is that of all."""
    rng = np.random.default_rng(3)
    texts = [["".join(rng.choice(list("abcdef"), rng.integers(1, 5))) for _ in range(4)] for _ in range(17)]
    encoded = encode_choices([Example(tuple(one), i % 3) for i, one in enumerate(texts)], letters, 16, 2)
    pairs = [Example((one[0], ending), 0) for one in texts for ending in one[1:]]
    alone = encode_examples(pairs, letters, 16, 2)
    assert encoded.count == 17 and encoded.labels.tolist() == [i % 3 for i in range(17)]
    split = ExampleRows(encoded, 64, 4, SpecialIds(0, 2, 3), seed=5)
    found = []
    for rows in split.in_order(2):
        for row, slot in np.argwhere(rows["example_id"] >= 0):
            example = rows["example_id"][row, slot]
            assert rows["labels"][row, slot] == example % 3
            for choice in range(3):
                segment = 3 * slot + choice
                inside = np.flatnonzero(rows["segment_ids"][row] == segment + 1)
                text = slice(alone.starts[3 * example + choice], alone.starts[3 * example + choice + 1])
                assert (rows["input_ids"][row, inside] == alone.input_ids[text]).all()
                assert (rows["token_type_ids"][row, inside] == alone.token_type_ids[text]).all()
                assert (rows["position_ids"][row, inside] == np.arange(len(inside))).all()
                assert rows["cls_positions"][row, segment] == inside[0]
            found.append(example)
    assert sorted(found) == list(range(17)) and rows["cls_positions"].shape[1] == 12


def test_packing_saves_rows():
    examples = split(200, 2)
    packed = ExampleRows(examples, 64, 8, SpecialIds(0, 2, 3), seed=0)
    alone = ExampleRows(examples, 64, 1, SpecialIds(0, 2, 3), seed=0)
    assert packed.row_counts(6, 32).max() <= 8 < alone.row_counts(6, 32).max()


@pytest.mark.parametrize(
    ("needed", "devices", "counts"),
    [
        ([5] * 298 + [3], 1, (6,)),
        ([1] * 400, 1, (1,)),
        ([5] * 99, 4, (8,)),
        ([4] * 210 + [5] * 170 + [9] * 20, 1, (4, 5, 10)),
        ([4] * 210 + [5] * 170 + [9] * 20, 4, (4, 8, 12)),
    ],
)
def test_numbers_of_rows(needed, devices, counts):
    mesh = AbstractMesh((devices, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    assert _row_counts(np.array(needed), mesh) == counts


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_step_is_the_same_with_fewer_rows_of_padding(tmp_path):
    task = make_task(model=dataclasses.replace(MODEL, hidden_dropout=0.3, attention_dropout=0.3))
    needed = int(task.train.row_counts(1, EXAMPLES)[0])
    results = []
    for counts in ((ROWS,), (needed, ROWS)):
        programs = make_programs(dataclasses.replace(task, row_counts=counts))
        batch = next(programs.task.batches(Cursor()))
        step, rows, _ = TrainSteps(programs, Ledger(epath.Path(tmp_path) / "ledger"), (1,)).of_batch(0, batch.size)
        inputs = put_rows(batch.rows, programs.mesh, rows), put_step_inputs(0.01, 1, 0, programs.mesh)
        results.append((rows, *step(programs.init_state(), *inputs)))
    (padded, state, metrics), (fewer, other, other_metrics) = results
    assert fewer == needed < padded == ROWS
    assert float(metrics["loss"]) == pytest.approx(float(other_metrics["loss"]), rel=1e-6)
    # Adam's moments are the gradients and their squares; its first update is little more than the gradients' signs.
    for name, array in arrays(state.optimizer).items():
        np.testing.assert_allclose(arrays(other.optimizer)[name], array, atol=1e-7, rtol=1e-4, err_msg=name)
