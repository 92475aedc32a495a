"""Rollout, norms and value zeroing against plain twins, and norms against the forward pass that they decompose."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.stats import spearmanr

from bert_jax.analysis.attention import flow, mixing
from bert_jax.analysis.attention.maps import PROBABILITIES
from bert_jax.analysis.attention.value_zeroing import value_zeroing_distances
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.intervention import Intervention
from bert_jax.interventions.rows import batches, encode_texts
from bert_jax.model import bert
from tests.interventions.models import LAYERS, small_model

TEXTS = ("the river sings over the stone", "a quick light", "the mountain falls over a river. the light sings")


@pytest.fixture(scope="module")
def rows():
    return encode_texts(TEXTS, small_model().tokenizer, 32)


@pytest.fixture(scope="module")
def batch(rows):
    (only,) = batches(rows, small_model().tokenizer.pad_id, 3 * 32)
    return only


def pre_norm_model() -> LoadedModel:
    """Pre-norm with rotary positions and local attention; the layers share their parameters."""
    model = small_model()
    changes = {"norm_placement": "pre", "positions": "rotary", "attention_window": 2, "global_every": 3}
    changes["parameter_groups"] = 1
    config = dataclasses.replace(model.config, **changes)
    params = jax.jit(lambda key: bert.init(config, key, model.heads))(jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.asarray(x + rng.normal(0, 0.15, x.shape), np.float32), params)
    return LoadedModel(config, model.heads, params, model.tokenizer)


def attention_of(rng, *shape):
    return rng.dirichlet(np.full(shape[-1], 0.3), shape[:-1])


def test_rollout_is_the_sum_over_paths():
    attention = attention_of(np.random.default_rng(0), 3, 4, 4)
    found = mixing.rollout(mixing.with_residual(attention))
    edges = [0.5 * one + 0.5 * np.eye(4) for one in attention]
    expected = np.zeros((4, 4))
    for top in range(4):
        for upper in range(4):
            for lower in range(4):
                for bottom in range(4):
                    expected[top, bottom] += edges[2][top, upper] * edges[1][upper, lower] * edges[0][lower, bottom]
    np.testing.assert_allclose(found[-1], expected, atol=1e-12)
    np.testing.assert_allclose(found[0], edges[0])
    np.testing.assert_allclose(found.sum(-1), 1)


def test_norms_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    heads, n, width, hidden = 2, 5, 3, 7
    attention, value = attention_of(rng, heads, n, n), rng.normal(size=(n, heads, width))
    kernel, inputs, scale = (
        rng.normal(size=(heads, width, hidden)),
        rng.normal(size=(n, hidden)),
        rng.normal(size=hidden),
    )
    transformed = mixing.transformed_values(value, kernel)
    vectors = mixing.attended_vectors(attention, transformed)
    of_head = mixing.attended_vectors(attention[1:], transformed[:, 1:])
    total = mixing.add_residual(vectors, inputs)
    sums = rng.normal(size=(n, hidden))
    normalised = mixing.normalise_vectors(total, sums, scale, 1e-3)
    for i in range(n):
        for j in range(n):
            sent = [attention[h, i, j] * (value[j, h] @ kernel[h]) for h in range(heads)]
            np.testing.assert_allclose(of_head[i, j], sent[1])
            np.testing.assert_allclose(vectors[i, j], sent[0] + sent[1])
            together = sent[0] + sent[1] + (inputs[i] if i == j else 0)
            deviation = np.sqrt(np.mean((sums[i] - sums[i].mean()) ** 2) + 1e-3)
            np.testing.assert_allclose(normalised[i, j], (together - together.mean()) / deviation * scale)


def test_vectors_and_bias_sum_to_the_layer_norm_of_the_model(batch):
    """The decomposition of the model's own attention block: its parts sum to what the block computes."""
    model, layer = small_model(), 1
    found = capture(model, batch, [PROBABILITIES, flow.VALUE, flow.OUTPUT, "hidden_states"])
    parameters = jax.tree.map(lambda x: np.asarray(x[layer]), model.params["encoder"]["layers"])
    b, n = 2, int(batch.lengths[2])
    hidden, output = found["hidden_states"][layer, b, :n], found[flow.OUTPUT][layer, b, :n]
    transformed = mixing.transformed_values(found[flow.VALUE][layer, b, :n], parameters["attention_out"]["kernel"])
    vectors = mixing.attended_vectors(found[PROBABILITIES][layer, b, :, :n, :n], transformed)
    bias = parameters["attention_out"]["bias"]
    np.testing.assert_allclose(vectors.sum(1) + bias, output, atol=1e-5)
    norm, epsilon = parameters["attention_norm"], model.config.norm_epsilon
    sums = hidden + output
    parts = np.concatenate([mixing.add_residual(vectors, hidden), np.broadcast_to(bias, (n, 1, len(bias)))], axis=1)
    parts = mixing.normalise_vectors(parts, sums, norm["scale"], epsilon)
    centred = sums - sums.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * norm["scale"]
    np.testing.assert_allclose(parts.sum(1), expected, atol=1e-5)
    arrays = (found[PROBABILITIES][:, b, :, :n, :n], found[flow.VALUE][:, b, :n], found[flow.OUTPUT][:, b, :n])
    norms, with_residual = flow.layer_norms(model, *arrays, found["hidden_states"][:, b, :n])
    assert norms.shape == (LAYERS, n, n)
    np.testing.assert_allclose(norms[layer], np.linalg.norm(vectors, axis=-1), atol=1e-5)
    np.testing.assert_allclose(with_residual[layer], np.linalg.norm(parts[:, :-1], axis=-1), atol=1e-5)


@pytest.mark.parametrize("make_model", [small_model, pre_norm_model], ids=["post", "pre, rotary, local, shared"])
def test_value_zeroing_is_that_of_a_rerun_per_token(batch, make_model):
    model = make_model()
    found = value_zeroing_distances(model, batch)
    rows, length = batch.input_ids.shape
    assert found.shape == (LAYERS, rows, length, length)
    largest = 0.0
    for layer in range(LAYERS):
        name = f"layers.{layer}.hidden"
        plain = capture(model, batch, [name])[name]
        for token in (0, 2, 4):
            without = [Intervention(f"layers.{layer}.attention.value", positions=(token,))]
            changed = capture(model, batch, [name], without)[name]
            cosine = (plain * changed).sum(-1) / np.linalg.norm(plain, axis=-1) / np.linalg.norm(changed, axis=-1)
            for b, n in enumerate(batch.lengths):
                np.testing.assert_allclose(found[layer, b, :n, token], 1 - cosine[b, :n], atol=1e-5)
                largest = max(largest, float(found[layer, b, :n, token].max()))
    assert largest > 1e-2
    assert (found[:, 0, : batch.lengths[0], batch.lengths[0] :] == 0).all()


def test_local_attention_sends_nothing_from_afar(batch):
    """Layers 1 and 2 of the model have a window of two tokens, layer 0 is global."""
    found = value_zeroing_distances(pre_norm_model(), batch)[:, 2]
    assert (found[1:, 1, 4:] == 0).all() and (found[1:, 1, 1:4] > 0).all() and (found[0, 1, 4:10] > 0).all()


def test_rank_agreement_is_spearmans():
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 6, 6)), rng.integers(0, 3, (2, 6, 6)).astype(float)
    found = mixing.rank_agreement(first, second)
    others = [np.arange(6) != i for i in range(6)]
    for layer in range(2):
        expected = [spearmanr(first[layer, i, keys], second[layer, i, keys]).statistic for i, keys in enumerate(others)]
        np.testing.assert_allclose(found[layer], np.mean(expected))
    np.testing.assert_allclose(mixing.rank_agreement(first, np.exp(3 * first)), 1)
    np.testing.assert_allclose(mixing.rank_agreement(first, -first), -1)
    constant = first.copy()
    constant[0, 2], constant[1] = 7, 7
    expected = [spearmanr(first[0, i, others[i]], second[0, i, others[i]]).statistic for i in (0, 1, 3, 4, 5)]
    found = mixing.rank_agreement(constant, second)
    np.testing.assert_allclose(found[0], np.mean(expected))
    assert np.isnan(found[1])


def test_contributions_of_texts(rows):
    model = small_model()
    found = dict(flow.text_contributions(model, rows))
    assert sorted(found) == [0, 1, 2]
    for index, one in found.items():
        n = len(rows[index].input_ids)
        for measure in one:
            assert measure.shape == (LAYERS, n, n)
            np.testing.assert_allclose(measure.sum(-1), 1, atol=1e-6)
        for rolled in one.rollouts.values():
            np.testing.assert_allclose(rolled.sum(-1), 1, atol=1e-6)
    summary = flow.measure_flow(model, rows).summary
    expected = np.mean([mixing.rank_agreement(one.norms, one.value_zeroing) for one in found.values()], axis=0)
    np.testing.assert_allclose(summary["agreement_with_value_zeroing"]["norms"]["value"], expected)
    np.testing.assert_allclose(np.diag(summary["rollout_agreement"]), 1)
