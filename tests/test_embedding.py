"""Texts to vectors: what shares rows and passes, and that nobody can tell from the vectors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bert_jax
from bert_jax import embedding
from bert_jax.errors import UserError
from bert_jax.inference import Model
from bert_jax.model import families, whole
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads

LIMIT = 64
WORDS = ("the", "river", "sings", "over", "old", "stone", "and", "wind")


@pytest.fixture(scope="module")
def model(tiny_run):
    return bert_jax.load(tiny_run)


def mixed_texts(model, lengths):
    """Texts of so many tokens, special ones included."""
    draw = np.random.default_rng(3)
    known = [word for word in WORDS if len(model.tokenizer.encode(word)) == 1]
    assert len(known) >= 3
    texts = [" ".join(draw.choice(known, length - 2)) for length in lengths]
    assert [len(model.tokenizer.encode(text)) + 2 for text in texts] == list(lengths)
    return texts


def alone(model, text, pooling):
    """The obvious way: one row of exactly the text, the reference attention."""
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode(text), model.tokenizer.sep_id]
    zeros = jnp.zeros((1, len(ids)), jnp.int32)
    inputs = EncoderInputs(jnp.array([ids]), zeros, zeros + 1, jnp.arange(len(ids))[None], zeros[:, :1])
    hidden = whole.bind(model.config, model.heads, model.params).encoder(inputs).hidden[0]
    return np.asarray(hidden.mean(0) if pooling == "mean" else hidden[0])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 700), max_size=150),
    copies=st.sampled_from([1, 40]),
    batch_size=st.integers(1, 40),
)
def test_a_plan_is_a_partition(lengths, copies, batch_size):
    lengths = lengths * copies
    passes = embedding.plan(lengths, batch_size)
    members = [i for one in passes for row in one.rows for i in row]
    assert sorted(members) == list(range(len(lengths)))
    for one in passes:
        assert one.num_rows == 2 ** (one.num_rows - 1).bit_length() and one.num_rows // 2 < len(one.rows)
        assert one.num_rows >= len(one.rows)
        for row in one.rows:
            assert 0 < len(row) <= one.seq_len // embedding.SHORTEST
            assert sum(lengths[i] for i in row) <= one.seq_len
    lengths_of_rows = [one.seq_len for one in passes]
    assert lengths_of_rows == sorted(lengths_of_rows, reverse=True)
    if passes:
        longest = passes[0].seq_len
        assert max(lengths) <= longest < max(2 * max(lengths), embedding.STEP + 1)
        assert all(one.num_rows * one.seq_len <= batch_size * longest for one in passes)


def test_rows_are_nearly_full_and_few_lengths():
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.gamma(2.0, 50.0, 3000).astype(int) + 2, 2, 256).tolist()
    passes = embedding.plan(lengths, 16)
    assert 4 <= len({one.seq_len for one in passes}) <= 8
    assert sum(lengths) / sum(one.seq_len * len(one.rows) for one in passes) > 0.9
    assert sum(lengths) / sum(one.seq_len * one.num_rows for one in passes) > 0.89


def test_a_length_needs_tokens_enough_for_rows_of_its_own():
    assert [one.seq_len for one in embedding.plan([5, 40, 100, 7], 16)] == [128]
    many = [30] * (embedding.OWN_ROWS // 30 + 1)
    assert {one.seq_len for one in embedding.plan([*many, 100], 16)} == {128, 32}
    assert {one.seq_len for one in embedding.plan([*many[2:], 100], 16)} == {128}
    assert {one.seq_len for one in embedding.plan([90] * 200, 16)} == {96}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_vectors_are_those_of_each_text_alone(model, pooling, batch_size, monkeypatch):
    """Packed: rows of several lengths, each with several texts; a plan that did not pack would prove nothing."""
    monkeypatch.setattr(embedding, "OWN_ROWS", 100)
    lengths = [2, 64, 3, 17, 31, 32, 33, 8, 63, 5, 2, 16, 48, 15, 12, 9]
    passes = embedding.plan(lengths, batch_size)
    assert {one.seq_len for one in passes} == {32, 64} and max(len(row) for one in passes for row in one.rows) > 2
    texts = mixed_texts(model, [length for length in lengths if length > 2])
    texts = [texts.pop(0) if length > 2 else "" for length in lengths]
    vectors = model.encode(texts, pooling, batch_size=batch_size)
    expected = np.stack([alone(model, text, pooling) for text in texts])
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    assert len({vector.tobytes() for vector in np.round(vectors, 4)}) > 12


def other(config):
    params = whole.init(config, jax.random.key(1), Heads())
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), params)


@pytest.mark.parametrize("family", ["roberta", "albert", "modern", "causal"])
def test_other_families(model, family):
    size = model.config.vocab_size
    config = {
        "roberta": lambda: families.roberta(1, 64, vocab_size=size),
        "albert": lambda: families.albert(2, 64, 2, vocab_size=size),
        "modern": lambda: dataclasses.replace(
            families.modern(4, 64, 96, max_positions=LIMIT, vocab_size=size), attention_window=4
        ),
        "causal": lambda: dataclasses.replace(families.bert(1, 64, vocab_size=size), direction="causal"),
    }[family]()
    here = Model(config, Heads(), other(config), model.tokenizer)
    texts = mixed_texts(model, [5, 30, 9, 12, 60, 3])
    assert len(embedding.plan([5, 30, 9, 12, 60, 3], 16)[0].rows) < len(texts)
    for pooling in ("mean",) if family == "causal" else ("mean", "cls"):
        expected = np.stack([alone(here, text, pooling) for text in texts])
        np.testing.assert_allclose(here.encode(texts, pooling), expected, rtol=0, atol=1e-5)


def test_max_length_cuts_and_its_absence_refuses(model):
    (long,) = mixed_texts(model, [40])
    head = " ".join(long.split()[:8])
    vectors = model.encode([long, head], max_length=10)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
    assert np.abs(vectors[0] - model.encode([long], max_length=11)[0]).max() > 1e-3
    np.testing.assert_array_equal(model.encode([long], max_length=40), model.encode([long]))
    too_long = "stone " * 80
    assert model.encode([too_long], max_length=LIMIT).shape == (1, 64)
    with pytest.raises(UserError, match=r"text 1 has .* position table 64: .* max_length 64 to cut it"):
        model.encode(["the", too_long])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 2}, "max_length 2 is outside 3 to 64"),
        ({"max_length": 65}, "max_length 65 is outside 3 to 64"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"pooling": "max"}, "pooling 'max' is not one of mean, cls"),
    ],
)
def test_impossible_arguments(model, arguments, message):
    """Without texts, too: a mistake does not wait for the first of them."""
    for texts in (["the"], []):
        with pytest.raises(UserError) as caught:
            model.encode(texts, **arguments)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_no_texts(model):
    empty = model.encode([])
    assert empty.shape == (0, 64) and empty.dtype == np.float32


def test_passes_are_dispatched_before_the_first_is_read():
    """Else the device would idle while the host reads."""
    events = []

    class Result:
        def __init__(self, number, shape):
            self.number, self.shape = number, shape

        def __array__(self, dtype=None, copy=None):
            events.append(f"read {self.number}")
            return np.full(self.shape, self.number, np.float32)

    def run(inputs):
        number = sum(event.startswith("run") for event in events)
        events.append(f"run {number}")
        return Result(number, (*inputs.cls_positions.shape, 3))

    ids = [np.full(32, 7, np.uint32)] * 5
    vectors = embedding.vectors_of(ids, 3, 0, 1, run)
    assert events[:4] == ["run 0", "run 1", "run 2", "read 0"] and len(events) == 10
    np.testing.assert_array_equal(vectors, np.repeat(np.arange(5.0)[:, None], 3, 1))
