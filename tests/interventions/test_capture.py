"""Activations by name, interventions as data, and gradients by activations."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.interventions import capture as capture_lib
from bert_jax.interventions import intervention as interventions_lib
from bert_jax.interventions.capture import capture, gradients
from bert_jax.interventions.intervention import Intervention
from bert_jax.interventions.rows import batches, encode_texts, encode_words, mean_of_words, word_attention
from bert_jax.model import encoder
from bert_jax.model.activations import Edit
from tests.interventions.models import LAYERS, small_model

TEXTS = ("the river sings over the stone", "a light", "the mountain falls over a river. the quick light sings")


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def batch(model):
    (only,) = batches(encode_texts(TEXTS, model.tokenizer, 32), model.tokenizer.pad_id, 3 * 32)
    return only


def test_rows_are_shortest_first_and_filled_up(model):
    rows = encode_texts([*TEXTS, "slow " * 60], model.tokenizer, 64)
    found = list(batches(rows, model.tokenizer.pad_id, 64))
    assert [one.input_ids.shape for one in found] == [(2, 32), (2, 32), (1, 64)]
    assert [one.indices.tolist() for one in found] == [[1, 0], [2, -1], [3]]
    assert found[0].lengths.tolist() == [4, 8]


def test_rows_that_do_not_fit_are_none(model):
    assert encode_texts(["the river " * 20, "", "the river"], model.tokenizer, 16)[:2] == [None, None]
    assert encode_words([["the"] * 20, ["\u200b", "river"], ["river"]], model.tokenizer, 16)[:2] == [None, None]


def test_means_of_words(model):
    (row,) = encode_words([["the", "rivers", "unfathomable", "stone"]], model.tokenizer, 32)
    assert len(row.input_ids) > 6 and row.word_ids[[0, -1]].tolist() == [-1, -1]
    vectors = np.random.default_rng(0).normal(size=(2, 32, 5))
    expected = [vectors[:, np.flatnonzero(row.word_ids == word)].mean(1) for word in range(4)]
    np.testing.assert_allclose(mean_of_words(row, vectors), np.stack(expected, 1))


def test_word_attention_sums_over_keys_and_averages_queries(model):
    (row,) = encode_words([["river", "xyz", "wind"]], model.tokenizer, 16)
    probabilities = np.random.default_rng(0).random((2, 3, 16, 16))
    found = word_attention(row, probabilities)
    for one, other in np.ndindex(3, 3):
        queries, keys = np.flatnonzero(row.word_ids == one), np.flatnonzero(row.word_ids == other)
        expected = probabilities[:, :, queries][..., keys].sum(-1).mean(-1)
        np.testing.assert_allclose(found[:, :, one, other], expected, rtol=1e-6)


def test_pairs_have_types_and_words_of_both_texts(model):
    (row,) = encode_texts(["the river"], model.tokenizer, 16, second=["a light falls"])
    assert row.token_type_ids.tolist() == [0] * 4 + [1] * (len(row.input_ids) - 4)
    assert row.word_ids[:5].tolist() == [-1, 0, 1, -1, 2] and row.word_ids[-1] == -1


def test_names(model, batch):
    names = [
        "embeddings",
        "hidden_states",
        "layers.1.hidden",
        "layers.*.attention.probabilities",
        "mlm_logits",
        "pooled",
    ]
    found = capture(model, batch, names)
    rows, length = batch.input_ids.shape
    assert found["hidden_states"].shape == (LAYERS + 1, rows, length, 32)
    np.testing.assert_array_equal(found["embeddings"], found["hidden_states"][0])
    np.testing.assert_array_equal(found["layers.1.hidden"], found["hidden_states"][2])
    real = batch.attention_mask > 0
    np.testing.assert_allclose(found["layers.*.attention.probabilities"].sum(-1).swapaxes(2, 3)[:, real], 1, atol=1e-5)
    # As the model's own forward pass.
    outputs = model.forward(TEXTS)
    for text, index in enumerate(np.argsort(batch.indices)):
        n = batch.lengths[index]
        np.testing.assert_allclose(
            found["hidden_states"][-1][index, :n], outputs.last_hidden_state[text, :n], atol=1e-5
        )
    positions = np.array([[1, 2]] * rows)
    few = capture(model, batch, ["mlm_logits", "layers.*.mlm_logits"], positions=positions)
    np.testing.assert_allclose(few["mlm_logits"], found["mlm_logits"][:, 1:3], atol=1e-5)
    np.testing.assert_allclose(few["layers.*.mlm_logits"][-1], few["mlm_logits"], atol=1e-5)
    assert np.abs(few["layers.*.mlm_logits"][0] - few["mlm_logits"]).max() > 0.1
    alone = capture(model, batch, ["mlm_logits"], positions=positions)["mlm_logits"]
    np.testing.assert_allclose(alone, few["mlm_logits"], atol=1e-5)


def test_the_last_layer_is_computed_only_where_the_mlm_head_reads(model, batch, monkeypatch):
    """Unless something else reads it; an intervention there has its effect."""
    positions, counts = np.ones((len(batch.input_ids), 1), np.int32), []
    count = encoder.count_last_layer_positions
    monkeypatch.setattr(
        encoder, "count_last_layer_positions", lambda *sizes: counts.append(count(*sizes)) or counts[-1]
    )
    config = capture_lib.analysis_config(model.config)
    for outputs in (("mlm_logits",), ("hidden_states", "mlm_logits")):
        trace = functools.partial(capture_lib.compute, config, model.heads, (), outputs)
        shape = jax.eval_shape(trace, model.params, batch[:3], {}, positions)["mlm_logits"].shape
        assert shape == (len(batch.input_ids), 1, model.config.vocab_size)
    assert counts == [1]
    patch = Intervention("layers.2.hidden", positions=(1,), factor=0.0)
    (all_positions, at_one) = (
        capture(model, batch, ["mlm_logits"], [patch], positions=where)["mlm_logits"] for where in (None, positions)
    )
    np.testing.assert_allclose(at_one[:, 0], all_positions[:, 1], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.9.hidden", "the model has layers 0 to 2"),
        ("layers.0.attention.contxt", "no site 'attention.contxt'; did you mean 'attention.context'"),
        ("layer.0.hidden", "'layer.0.hidden' does not exist"),
        ("layers.x.hidden", "write layers.N.SITE"),
        ("mlm_logit", "did you mean 'mlm_logits'"),
        ("task_logits", "has no head that computes it"),
    ],
)
def test_unknown_names(model, batch, name, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        capture(model, batch, [name])


def test_a_removed_head_has_no_context(model, batch):
    name = "layers.1.attention.context"
    plain, masked = (
        capture(model, batch, ["layers.*.attention.context", "mlm_logits"], list(changes))
        for changes in ((), (Intervention(name, heads=(1,)),))
    )
    context, without = (one["layers.*.attention.context"] for one in (plain, masked))
    assert (without[1, :, :, 1] == 0).all() and np.abs(context[1, :, :, 1]).max() > 0.01
    np.testing.assert_array_equal(without[0], context[0])
    np.testing.assert_allclose(without[1, :, :, 0], context[1, :, :, 0], atol=1e-6)
    assert np.abs(plain["mlm_logits"] - masked["mlm_logits"]).max() > 1e-3


def test_interventions_of_one_site_follow_each_other(model, batch):
    name = "layers.2.hidden"
    doubled = [Intervention(name, factor=1.0, add=3.0), Intervention(name, positions=(1,), factor=2.0)]
    plain, changed = (capture(model, batch, [name], changes)[name] for changes in ((), doubled))
    np.testing.assert_allclose(changed[:, 0], plain[:, 0] + 3, atol=1e-5)
    np.testing.assert_allclose(changed[:, 1], 2 * (plain[:, 1] + 3), atol=1e-5)


def test_zeroed_attention_to_one_position(model, batch):
    site = "layers.*.attention.probabilities"
    found = capture(model, batch, [site], [Intervention(site, heads=(0,), keys=(0,))])[site]
    assert (found[:, :, 0, :, 0] == 0).all() and (found[:, :, 1, :, 0] > 0).any()


def test_patching_from_another_input(model, batch):
    """A layer's output at one position comes from the other input; at all positions, so does everything after it."""
    other = tuple(tuple(int(i) for i in np.roll(ids, 1)) for ids in batch.input_ids)
    target = capture(
        model,
        batch._replace(input_ids=np.array(other, np.int32), attention_mask=np.ones_like(batch.input_ids)),
        ["layers.0.hidden", "hidden_states"],
    )
    patch = Intervention("layers.0.hidden", positions=(2,), source=other)
    found = capture(model, batch, ["layers.0.hidden"], [patch])["layers.0.hidden"]
    plain = capture(model, batch, ["layers.0.hidden"])["layers.0.hidden"]
    np.testing.assert_allclose(found[:, 2], target["layers.0.hidden"][:, 2], atol=1e-6)
    np.testing.assert_allclose(found[:, 1], plain[:, 1], atol=1e-6)
    assert np.abs(found[:, 2] - plain[:, 2]).max() > 0.01
    with pytest.raises(UserError, match="its source has 1 rows"):
        capture(model, batch, ["layers.0.hidden"], [Intervention("layers.0.hidden", source=((1, 2),))])


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (Intervention("layers.0.hidden", heads=(0,)), "it has no axis of heads"),
        (Intervention("layers.0.attention.context", heads=(7,)), r"heads \[7\] are not from 0 to"),
        (Intervention("layers.0.attention.scores", keys=(99,)), r"keys \[99\] are not from 0 to"),
        (Intervention("layers.0.hidden", positions=()), r"positions \[\] are not"),
    ],
)
def test_wrong_interventions(model, batch, intervention, message):
    with pytest.raises(UserError, match=message):
        capture(model, batch, ["mlm_logits"], [intervention])


def test_interventions_are_plain_data():
    changes = [
        Intervention("layers.*.hidden", positions=(1, 2), factor=0.5),
        Intervention("layers.0.hidden", source=((1, 2),)),
    ]
    saved = interventions_lib.to_json(changes)
    assert saved[0] == {"name": "layers.*.hidden", "positions": [1, 2], "factor": 0.5}
    assert interventions_lib.read_json(json.loads(json.dumps(saved))) == changes
    with pytest.raises(UserError, match="intervention: "):
        interventions_lib.read_json([{"name": "layers.0.hidden", "head": 1}])


def token_loss(found, labels):
    logits = jax.nn.log_softmax(found["mlm_logits"])
    return -jnp.take_along_axis(logits[:, 1], labels[:, None], axis=-1).sum()


def test_gradients_by_activations_are_finite_differences(model, batch):
    labels, name = np.arange(len(batch.input_ids)) + 7, "layers.1.attention.context"
    _, by_name = gradients(model, batch, [name], token_loss, labels)
    gradient, step = by_name[name], 1e-2

    def changed(sign):
        one = Intervention(name, heads=(1,), positions=(2,), factor=1.0, add=sign * step)
        return token_loss(capture(model, batch, ["mlm_logits"], [one]), labels)

    expected = (changed(1) - changed(-1)) / (2 * step)
    assert abs(expected) > 1e-3
    np.testing.assert_allclose(gradient[:, 2, 1].sum(), expected, rtol=0.03)


def test_reference_attention_is_taken_where_it_is_needed(model):
    assert capture_lib.analysis_config(model.config, ["mlm_logits"]).attention != "reference"
    assert capture_lib.analysis_config(model.config, ["layers.0.attention.scores"]).attention == "reference"
    assert capture_lib.analysis_config(model.config, edits={"attention.probabilities": Edit()}).attention == "reference"
