"""Losses under masks of heads and units, and their derivatives, beside a float64 twin and finite differences."""

import math

import jax
import numpy as np
import pytest

from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions import pruning_masks
from bert_jax.interventions.importance import importance, normalize_by_layer, without_least_important
from bert_jax.interventions.pruning_masks import ACTIVATIONS, CONTEXT
from tests.interventions.models import LAYERS, masked_examples, small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPE = (LAYERS, 2)


@pytest.fixture(scope="module")
def texts():
    return masked_examples()


def twin_losses(
    model: LoadedModel, batch: pruning_masks.ExampleBatch, mask: np.ndarray, units: np.ndarray
) -> np.ndarray:
    """The losses of examples in NumPy and float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    embeddings, layers = params["encoder"]["embeddings"], params["encoder"]["layers"]

    def norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt(np.square(x - x.mean(-1, keepdims=True)).mean(-1, keepdims=True) + 1e-12) * p["scale"]
            + p["bias"]
        )

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    ids, types, present = batch.inputs
    x = embeddings["word"][ids] + embeddings["token_type"][types] + embeddings["position"][: ids.shape[1]]
    x = norm(x, embeddings["norm"])
    for layer in range(LAYERS):
        p = jax.tree.map(lambda one, layer=layer: one[layer], layers)
        query, key, value = np.moveaxis(np.einsum("bsh,hcnd->bscnd", x, p["qkv"]["kernel"]) + p["qkv"]["bias"], 2, 0)
        scores = np.einsum("bqnd,bsnd->bnqs", query, key) / math.sqrt(query.shape[-1])
        scores = np.where(present[:, None, None] > 0, scores, -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context = np.einsum("bnqs,bsnd->bqnd", weights, value) * mask[layer][:, None]
        out = np.einsum("bqnd,ndh->bqh", context, p["attention_out"]["kernel"]) + p["attention_out"]["bias"]
        x = norm(x + out, p["attention_norm"])
        up = gelu(x @ p["up"]["kernel"] + p["up"]["bias"]) * units[layer]
        x = norm(x + up @ p["down"]["kernel"] + p["down"]["bias"], p["feed_forward_norm"])
    x = np.take_along_axis(x, batch.positions[..., None], 1)
    head = params["mlm"]
    x = norm(gelu(x @ head["transform"]["kernel"] + head["transform"]["bias"]), head["norm"])
    logits = x @ embeddings["word"].T + head["bias"]
    logits -= logits.max(-1, keepdims=True)
    likelihoods = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(likelihoods, np.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    valid = batch.labels >= 0
    return -(chosen * valid).sum(1) / np.maximum(valid.sum(1), 1)


def test_derivatives_are_finite_differences_of_a_float64_twin(texts):
    """Of heads, and of every seventh unit."""
    model, (batch,) = small_model(), texts.batches
    masks = {CONTEXT: np.ones(SHAPE), ACTIVATIONS: np.ones((LAYERS, model.config.intermediate_size))}
    masks[CONTEXT][1, 0], masks[ACTIVATIONS][:, ::3] = 0.25, 0.5
    evaluation = pruning_masks.evaluate(model, texts, masks)
    used = batch.indices >= 0
    order = batch.indices[used]
    np.testing.assert_allclose(
        (evaluation.sums / evaluation.weights)[order], twin_losses(model, batch, *masks.values())[used], rtol=1e-5
    )
    found = pruning_masks.mask_derivatives(model, texts, masks)
    for site, every in ((CONTEXT, 1), (ACTIVATIONS, 7)):
        expected = np.zeros_like(found[site])
        for layer, i in [at for at in np.ndindex(*masks[site].shape) if at[1] % every == 0]:
            sides = []
            for step in (1e-5, -1e-5):
                moved = {name: mask.copy() for name, mask in masks.items()}
                moved[site][layer, i] *= 1 + step
                sides.append(twin_losses(model, batch, *moved.values())[used])
            expected[order, layer, i] = (sides[0] - sides[1]) / 2e-5
        expected = expected[:, :, ::every]
        assert np.abs(expected).min(axis=(0, 1, 2)) > 0 and np.abs(expected).max() > 0.02
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found[site][:, :, ::every], expected, atol=atol, rtol=1e-3)


def test_importances():
    derivatives = np.array([[[1.0, -2]], [[-3, -2]]])
    assert importance(derivatives).tolist() == [[2, 2]]
    np.testing.assert_allclose(normalize_by_layer(np.array([[3.0, 4], [0, 0]])), [[0.6, 0.8], [0, 0]])
    mask = np.array([[True, False], [True, True]])
    assert without_least_important(np.array([[5.0, 0], [5, 6]]), mask, 1).tolist() == [[False, False], [True, True]]
