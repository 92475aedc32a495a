"""Text embeddings: packing into rows and passes, which does not change the vectors."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bert_jax
from bert_jax.convert.sentence_transformers import SentenceEmbedding
from bert_jax.inference import embedding, loaded_model
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model import bert, families
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import map_with_paths

pytestmark = pytest.mark.usefixtures("quick_compilation")

LIMIT = 64
WORDS = ("the", "river", "sings", "over", "old", "stone", "and", "wind")


@pytest.fixture(scope="module")
def model(tiny_run):
    return bert_jax.load(tiny_run)


def mixed_texts(model, lengths):
    """Texts with these numbers of tokens, special ones included."""
    draw = np.random.default_rng(3)
    known = [word for word in WORDS if len(model.tokenizer.encode(word)) == 1]
    assert len(known) >= 3
    texts = [" ".join(draw.choice(known, length - 2)) for length in lengths]
    assert [len(model.tokenizer.encode(text)) + 2 for text in texts] == list(lengths)
    return texts


@functools.partial(jax.jit, static_argnums=(0, 1))
def last_layer(config, heads, params, inputs):
    return bert.model_from_params(config, heads, params).encoder(inputs).hidden


def alone(model, texts, pooling=("mean", "cls")):
    """The simple way: one text per row, padded to LIMIT, the reference attention."""
    vectors = []
    for text in texts:
        ids = [model.tokenizer.cls_id, *model.tokenizer.encode(text), model.tokenizer.sep_id]
        row, real = np.full((1, LIMIT), model.tokenizer.pad_id), np.arange(LIMIT)[None] < len(ids)
        row[real] = ids
        inputs = EncoderInputs(
            *(x.astype(np.int32) for x in (row, 0 * row, real, np.arange(LIMIT)[None], np.zeros((1, 1))))
        )
        hidden = np.asarray(last_layer(model.config, model.heads, model.params, inputs))[0, : len(ids)]
        vectors.append(np.concatenate([hidden.mean(0) if mode == "mean" else hidden[0] for mode in pooling]))
    return np.stack(vectors)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 700), max_size=150),
    copies=st.sampled_from([1, 40]),
    batch_size=st.integers(1, 40),
    devices=st.sampled_from([1, 3]),
)
def test_a_plan_is_a_partition(lengths, copies, batch_size, devices):
    lengths = lengths * copies
    passes = embedding.plan_passes(lengths, batch_size, devices)
    members = [i for one in passes for row in one.rows for i in row]
    assert sorted(members) == list(range(len(lengths)))
    most = batch_size * max((one.seq_len for one in passes), default=0)
    full = {one.seq_len: devices * most // one.seq_len for one in passes}
    for one in passes:
        assert one.num_rows % devices == 0
        assert one.num_rows - len(one.rows) < max(devices, full[one.seq_len] / embedding.LAST_PASS_PARTS)
        assert one.num_rows >= len(one.rows)
        for row in one.rows:
            assert 0 < len(row) <= one.seq_len // embedding.TOKENS_PER_TEXT_SLOT
            assert sum(lengths[i] for i in row) <= one.seq_len
    lengths_of_rows = [one.seq_len for one in passes]
    assert lengths_of_rows == sorted(lengths_of_rows, reverse=True)
    if passes:
        longest = passes[0].seq_len
        assert max(lengths) <= longest < max(2 * max(lengths), embedding.ROW_LENGTH_STEP + 1)
        assert all(one.num_rows * one.seq_len <= batch_size * longest * devices for one in passes)


def test_rows_are_nearly_full_and_few_lengths():
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.gamma(2.0, 50.0, 3000).astype(int) + 2, 2, 256).tolist()
    passes = embedding.plan_passes(lengths, 16)
    assert 4 <= len({one.seq_len for one in passes}) <= 8
    assert sum(lengths) / sum(one.seq_len * one.num_rows for one in passes) > 0.89


def test_a_length_needs_tokens_enough_for_rows_of_its_own():
    assert [one.seq_len for one in embedding.plan_passes([5, 40, 100, 7], 16)] == [128]
    many = [30] * (embedding.MIN_TOKENS_PER_LENGTH // 30 + 1)
    assert {one.seq_len for one in embedding.plan_passes([*many, 100], 16)} == {128, 32}
    assert {one.seq_len for one in embedding.plan_passes([*many[2:], 100], 16)} == {128}
    assert {one.seq_len for one in embedding.plan_passes([90] * 200, 16)} == {96}


@pytest.mark.parametrize("batch_size", [1, 16])
def test_vectors_are_those_of_each_text_alone(model, batch_size, monkeypatch):
    """Packed: rows of several lengths, each with several texts; a plan that did not pack would prove nothing."""
    monkeypatch.setattr(embedding, "MIN_TOKENS_PER_LENGTH", 100)
    lengths = [2, 64, 3, 17, 31, 32, 33, 8, 63, 5, 2, 16, 48, 15, 12, 9]
    passes = embedding.plan_passes(lengths, batch_size)
    assert {one.seq_len for one in passes} == {32, 64} and max(len(row) for one in passes for row in one.rows) > 2
    texts = mixed_texts(model, [length for length in lengths if length > 2])
    texts = [texts.pop(0) if length > 2 else "" for length in lengths]
    vectors = model.encode(texts, ("mean", "cls"), batch_size=batch_size)
    np.testing.assert_allclose(vectors, alone(model, texts), rtol=0, atol=1e-5)
    for half in np.split(np.round(vectors, 4), 2, axis=1):
        assert len({vector.tobytes() for vector in half}) > 12


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
    rng = np.random.default_rng(1)
    params = map_with_paths(
        lambda name, leaf: (name.endswith("/scale") + 0.05 * rng.standard_normal(leaf.shape)).astype(np.float32),
        bert.shapes(config, Heads()),
    )
    here = LoadedModel(config, Heads(), params, model.tokenizer)
    texts = mixed_texts(model, [5, 30, 9, 12, 60, 3])
    assert len(embedding.plan_passes([5, 30, 9, 12, 60, 3], 16)[0].rows) < len(texts)
    pooling = ("mean",) if family == "causal" else ("mean", "cls")
    np.testing.assert_allclose(here.encode(texts, pooling), alone(here, texts, pooling), rtol=0, atol=1e-5)


def test_texts_that_are_too_long_are_cut_with_one_warning(model):
    (long,) = mixed_texts(model, [40])
    head = " ".join(long.split()[:8])
    vectors = model.encode([long, head], max_length=10)  # without a warning: they would be errors here
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
    assert np.abs(vectors[0] - model.encode([long], max_length=11)[0]).max() > 1e-3
    np.testing.assert_array_equal(model.encode([long], max_length=40), model.encode([long]))
    too_long = "stone " * 80
    with pytest.warns(UserWarning) as caught:
        vectors = model.encode(["the", too_long, too_long])
    assert [str(warning.message).partition(":")[0] for warning in caught] == [
        f"2 of 3 texts have more than {LIMIT} tokens and were truncated"
    ]
    np.testing.assert_array_equal(vectors, model.encode(["the", too_long, too_long], max_length=LIMIT))


def test_an_iterator_is_read_in_pieces(model, monkeypatch, capsys):
    """No piece is read before the one before it is through."""
    texts = mixed_texts(model, [5, 30, 9, 12, 40, 3, 7])
    expected, read, at_work = model.encode(texts), [], []
    monkeypatch.setattr(loaded_model, "CHUNK_TEXTS", 3)
    encode = embedding.encode_ids
    monkeypatch.setattr(
        embedding, "encode_ids", lambda ids, *a, **k: (at_work.append(len(read)), encode(ids, *a, **k))[1]
    )
    found = model.encode((read.append(text) or text for text in texts), progress=True)
    assert at_work == [3, 6, 7]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert "encoding" in capsys.readouterr().err
    for empty in (model.encode(iter([])), model.encode([])):
        assert empty.shape == (0, 64) and empty.dtype == np.float32


@pytest.mark.parametrize("skip", [0, 2])
def test_poolings_of_packed_rows(model, skip):
    """Each by its definition, over the tokens of a text alone; `skip` is a prompt that is not pooled."""
    lengths = [6, 30, 9, 12, 60, 4]
    texts = mixed_texts(model, lengths)
    assert len(embedding.plan_passes(lengths, 16)[0].rows) < len(texts)
    prompt = " ".join(texts[0].split()[: skip - 1]) if skip else ""
    sentence = SentenceEmbedding(("max", "mean", "mean_sqrt_len_tokens", "cls"), include_prompt=False, normalize=True)
    here = LoadedModel(model.config, model.heads, model.params, model.tokenizer, sentence)
    expected, separate = [], here.forward([f"{prompt} {text}".strip() for text in texts])
    for states, mask in zip(separate.last_hidden_state, separate.attention_mask > 0, strict=True):
        hidden = states[mask][skip:]
        vector = np.concatenate([hidden.max(0), hidden.mean(0), hidden.sum(0) / np.sqrt(len(hidden)), hidden[0]])
        expected.append(vector)
    found = here.encode(texts, prompt=f"{prompt} " if skip else None, normalize=False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    unit = here.encode(texts, prompt=f"{prompt} " if skip else None)
    np.testing.assert_allclose(unit, expected / lengths, rtol=0, atol=1e-6)


def test_forward_gives_every_layer_of_each_text(model):
    texts = mixed_texts(model, [5, 20])
    found = model.forward(texts, hidden_states=True, attentions=True)
    assert found.input_ids.shape == found.attention_mask.shape == (2, 20)
    assert found.attention_mask.sum(1).tolist() == [5, 20]
    layers, heads = model.config.num_layers, model.config.num_heads
    assert found.hidden_states.shape == (layers + 1, 2, 20, 64) and found.attentions.shape == (layers, 2, heads, 20, 20)
    np.testing.assert_array_equal(found.hidden_states[-1], found.last_hidden_state)
    np.testing.assert_allclose(found.attentions[:, 0, :, :5].sum(-1), 1.0, atol=1e-5)
    assert found.attentions[:, 0, :, :5, 5:].max() == 0.0  # padding is not attended to
    np.testing.assert_allclose(found.last_hidden_state[0, :5].mean(0), alone(model, texts[:1], ("mean",))[0], atol=1e-5)
    plain = model.forward(texts)
    assert plain.hidden_states is None and plain.attentions is None and plain.pooled.shape == (2, 64)
    np.testing.assert_allclose(plain.last_hidden_state[1], found.last_hidden_state[1], atol=1e-5)


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
    vectors = embedding.encode_ids(ids, 0, 1, run)
    assert events[:4] == ["run 0", "run 1", "run 2", "read 0"] and len(events) == 10
    np.testing.assert_array_equal(vectors, np.repeat(np.arange(5.0)[:, None], 3, 1))
