"""What a task head reads: the mean over hidden states, and normalised [CLS] vectors, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from bert_jax.config import TaskHead
from bert_jax.model import bert
from bert_jax.model.cls_norm import EPSILON, ClsNorm
from bert_jax.model.heads import Heads
from tests.model.toy import BERT, ROWS, inputs

PRE_NORM = dataclasses.replace(BERT, norm_placement="pre")


def random_params(config, heads):
    """Parameters of which none has its initial value."""
    params = bert.init(config, jax.random.key(0), heads)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(x + rng.normal(0, 0.3, x.shape), jnp.float32), params)


def readings(states, batch, reads):
    """What a head reads of each state, [L + 1, B, n, H], in numpy."""
    if reads == "tokens":
        return states
    if reads == "mean":
        slots = [np.asarray(batch.segment_ids) == k + 1 for k in range(batch.cls_positions.shape[1])]
        return np.stack([(states * m[None, :, :, None]).sum(2) / m.sum(1)[None, :, None] for m in slots], 2)
    return np.stack([state[np.arange(len(state))[:, None], np.asarray(batch.cls_positions)] for state in states])


@pytest.mark.parametrize(
    ("config", "reads"), [(BERT, "tokens"), (BERT, "mean"), (PRE_NORM, "cls"), (PRE_NORM, "pooled")]
)
def test_mix(config, reads):
    heads = Heads(mlm=False, task=TaskHead("tagging", ("a", "b"), reads, mix=True))
    params, batch = random_params(config, heads), inputs(packed=True)
    model = bert.model_from_params(config, heads, params)
    output = jax.jit(lambda: model.encoder(batch, hidden_states=True))()
    encoded = jax.jit(lambda: model.encode(batch))()
    found, _ = model.task_features(batch, encoded)
    states = np.asarray(output.hidden_states, np.float64)
    np.testing.assert_array_equal(output.hidden_states[-1], output.hidden)
    assert encoded.hidden_states is None and encoded.readouts.shape == (config.num_layers + 1, *found.shape)
    weights = float(params["task"]["mix"]["scale"]) * scipy.special.softmax(params["task"]["mix"]["weights"])
    expected = np.einsum("l,lbnh->bnh", weights, readings(states, batch, reads))
    if reads == "pooled":
        pooler = params["encoder"]["pooler"]
        expected = np.tanh(expected @ np.asarray(pooler["kernel"]) + np.asarray(pooler["bias"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert model.task_logits(batch, encoded).shape == (*found.shape[:2], 2)


def test_a_new_mix_is_the_mean_and_other_heads_read_the_last_layer():
    heads = Heads(mlm=False, task=TaskHead("classification", ("a",), "cls", mix=True))
    params, batch = bert.init(BERT, jax.random.key(0), heads), inputs()
    model = bert.model_from_params(BERT, heads, params)
    output = jax.jit(lambda: model.encoder(batch, hidden_states=True))()
    found, _ = model.task_features(batch, jax.jit(lambda: model.encode(batch))())
    np.testing.assert_allclose(found, output.hidden_states.mean(0)[:, :1], rtol=1e-5, atol=1e-6)
    plain = Heads(mlm=False, task=TaskHead("classification", ("a",), "cls"))
    plain_model = bert.model_from_params(BERT, plain, bert.init(BERT, jax.random.key(0), plain))
    encoded = jax.jit(lambda: plain_model.encode(batch))()
    assert encoded.readouts is None and encoded.hidden.shape == (ROWS, 1, BERT.hidden_size)
    hidden = jax.jit(lambda: plain_model.encoder(batch).hidden)()
    np.testing.assert_allclose(encoded.hidden, hidden[:, :1], rtol=1e-5, atol=1e-6)


def test_a_new_head_is_normal_as_in_transformers():
    """Not truncated at two standard deviations, which leaves 0.88 of the standard deviation, as in the encoder."""
    task = TaskHead("classification", tuple(map(str, range(400))), "cls")
    params = bert.init(BERT, jax.random.key(0), Heads(mlm=False, task=task))
    deviation = BERT.initializer_range
    kernel, embedding = params["task"]["output"]["kernel"], params["encoder"]["embeddings"]["word"]
    assert abs(float(kernel.std()) / deviation - 1) < 0.03 and float(abs(kernel).max()) > 2.5 * deviation
    assert float(abs(embedding).max()) < 2.001 * deviation


def test_a_new_pooler_is_normal_in_fine_tuning_and_truncated_in_pretraining():
    task = TaskHead("classification", ("no", "yes"), "pooled")
    for heads, is_truncated in ((Heads(mlm=False, task=task), False), (Heads(pair=True), True)):
        kernel = bert.init(BERT, jax.random.key(0), heads)["encoder"]["pooler"]["kernel"]
        assert (float(abs(kernel).max()) < 2.001 * BERT.initializer_range) == is_truncated, heads


CLS = np.random.default_rng(3).normal(2, 3, (4, 3, 8)).astype(np.float32)
HAS_EXAMPLE = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)


def test_batch_normalisation_counts_only_examples():
    norm = ClsNorm("batch", 8)
    norm.scale[...], norm.bias[...] = jnp.full(8, 1.5), jnp.full(8, 0.25)
    found, new = norm(jnp.asarray(CLS), jnp.asarray(HAS_EXAMPLE), lambda x: x)
    vectors = CLS[HAS_EXAMPLE].astype(np.float64)
    mean, variance = vectors.mean(0), vectors.var(0)
    assert np.abs(CLS.reshape(-1, 8).mean(0) - mean).max() > 0.1, "the other slots should differ"
    np.testing.assert_allclose(found, 1.5 * (CLS - mean) / np.sqrt(variance + EPSILON) + 0.25, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(new["mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(new["variance"], 0.9 + 0.1 * variance, rtol=1e-5)


def test_the_other_normalisations():
    some = np.random.default_rng(4).normal(1, 0.1, 8).astype(np.float32)
    for kind, changes, expected in (
        ("centre", {"mean": some}, CLS - some),
        ("standardise", {"mean": some, "std": some}, (CLS - some) / (some + EPSILON)),
        ("batch", {"mean": some, "variance": some}, (CLS - some) / np.sqrt(some + EPSILON)),
    ):
        norm = ClsNorm(kind, 8)
        for name, value in changes.items():
            getattr(norm, name)[...] = jnp.asarray(value)
        found, new = norm(jnp.asarray(CLS), jnp.asarray(HAS_EXAMPLE), None)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=kind)
        assert not new
    heads = Heads(mlm=False, task=TaskHead("classification", ("a",), "cls", cls_norm="layer"))
    model, batch = bert.model_from_params(BERT, heads, bert.init(BERT, jax.random.key(0), heads)), inputs()
    found, _ = model.task_features(batch, model.encode(batch))
    np.testing.assert_allclose(found.mean(-1), 0, atol=1e-6)
    assert model.task.cls_norm.scale.shape == (BERT.hidden_size,)
