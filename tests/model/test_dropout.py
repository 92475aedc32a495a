"""Dropout's counter hash: rates, independence, and bits that depend only on a row's own index.

Seeds are fixed, so the tests are deterministic; chance exceeds a threshold with the stated probability.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.model.dropout import DropoutKey, dropout, hash_combine
from tests.model.toy import BERT, encode, inputs, parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

RATE = 0.1
ALPHA = 1e-4


def keeps(key, rows, shape=(64, 96), words=()) -> np.ndarray:
    """1 where an element is kept, [rows, *shape]; the words are those of layer and site."""
    dropout_key = DropoutKey(key, jnp.asarray(rows, jnp.int32)).fold_in(*words)
    return np.asarray(dropout(jnp.ones((len(rows), *shape)), RATE, dropout_key)) > 0


def test_no_dropout_without_a_key_or_rate():
    x = jnp.arange(12.0).reshape(2, 6)
    dropout_key = DropoutKey(hash_combine(jnp.uint32(0)), jnp.arange(2))
    assert dropout(x, RATE, None) is x and dropout(x, 0.0, dropout_key) is x


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.9])
def test_rate_and_mean(rate):
    """A million elements; two-sided binomial test at alpha 1e-4."""
    x = jnp.full((16, 64, 1024), 3.0)
    y = np.asarray(dropout(x, rate, DropoutKey(hash_combine(jnp.uint32(1), 2), jnp.arange(16))))
    kept = int((y > 0).sum())
    assert stats.binomtest(kept, y.size, 1 - rate).pvalue > ALPHA
    np.testing.assert_allclose(y[y > 0], 3.0 / (1 - rate), rtol=1e-6)
    deviation = 3.0 * np.sqrt(rate / (1 - rate) / y.size)
    assert abs(y.mean(dtype=np.float64) - 3.0) < stats.norm.isf(ALPHA / 2) * deviation


def test_gradient_is_masked_like_the_values():
    dropout_key = DropoutKey(jnp.uint32(5), jnp.arange(3))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)), jnp.float32)
    gradient = jax.grad(lambda x: dropout(x, RATE, dropout_key).sum())(x)
    np.testing.assert_allclose(gradient, np.where(dropout(x, RATE, dropout_key) != 0, 1 / (1 - RATE), 0), rtol=1e-6)


def masks_by_key() -> dict[str, np.ndarray]:
    """Masks of keys and rows that differ in row, layer, site, step or seed."""
    masks = {}
    for seed, step in ((0, 0), (0, 1), (1, 0), (0, 1000)):
        key = hash_combine(jnp.uint32(seed), 0x0D0, step)
        for layer, site in ((0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (12, 3)):
            kept = keeps(key, [0, 1, 255, 65536], words=(layer, site))
            masks |= {f"seed {seed} step {step} layer {layer} site {site} row {r}": m for r, m in enumerate(kept)}
    return masks


def test_masks_of_keys_are_independent():
    """Correlation of every pair of masks, unshifted and shifted by one element or one row of elements.

    Under independence each is normal with standard deviation 1 / sqrt(n); the maximum stays below the bound that
    chance exceeds with probability 1e-4 (Bonferroni).
    """
    masks = masks_by_key()
    assert len(masks) == 96
    flat = np.stack([mask.ravel() for mask in masks.values()]).astype(np.float64)
    flat = (flat - flat.mean(1, keepdims=True)) / flat.std(1, keepdims=True)
    n, pairs = flat.shape[1], 3 * 96 * 96
    bound = stats.norm.isf(ALPHA / pairs / 2) / np.sqrt(n)
    names = list(masks)
    for shift in (0, 1, 96):
        correlation = np.abs(flat @ np.roll(flat, shift, axis=1).T / n)
        if shift == 0:
            np.fill_diagonal(correlation, 0.0)
        worst = np.unravel_index(correlation.argmax(), correlation.shape)
        assert correlation.max() < bound, (names[worst[0]], names[worst[1]], shift)


def test_order_of_words_matters():
    words = list(itertools.permutations((0, 1, 2)))
    assert len({int(hash_combine(jnp.uint32(9), *order)) for order in words}) == len(words)


def test_bits_of_a_row_do_not_depend_on_its_neighbours():
    config = dataclasses.replace(BERT, hidden_dropout=0.2, attention_dropout=0.2)
    batch, params, key = inputs(lengths=(12, 9)), parameters(BERT), hash_combine(jnp.uint32(4), 11)
    both = encode(config, params, batch, dropout_key=DropoutKey(key, jnp.array([3, 7]))).hidden
    alone = jax.tree.map(lambda x: x[1:], batch)
    second = encode(config, params, alone, dropout_key=DropoutKey(key, jnp.array([7]))).hidden
    np.testing.assert_allclose(both[1], second[0], rtol=1e-4, atol=1e-5)
    for other in (DropoutKey(key, jnp.array([3])), DropoutKey(hash_combine(jnp.uint32(4), 12), jnp.array([7]))):
        assert np.abs(encode(config, params, alone, dropout_key=other).hidden - second).max() > 0.1
    # Equal rows with different indices in the batch get different bits.
    twice = jax.tree.map(lambda x: jnp.concatenate([x[1:], x[1:]]), batch)
    hidden = encode(config, params, twice, dropout_key=DropoutKey(key, jnp.array([3, 7]))).hidden
    assert np.abs(hidden[0] - hidden[1]).max() > 0.1
    no_dropout = encode(config, params, batch).hidden
    np.testing.assert_allclose(no_dropout, encode(BERT, params, batch).hidden, rtol=1e-5, atol=1e-6)


def test_every_layer_and_site_has_its_own_bits():
    """A pre-norm stack whose sub-layers return 10 and 1 everywhere: differences of hidden states are the masks."""
    config = dataclasses.replace(BERT, num_layers=4, norm_placement="pre", hidden_dropout=0.5)
    params = jax.tree.map(lambda x: x, parameters(config))
    for name, value in (("attention_out", 10.0), ("down", 1.0)):
        dense = params["encoder"]["layers"][name]
        params["encoder"]["layers"][name] = {
            "kernel": jnp.zeros_like(dense["kernel"]),
            "bias": jnp.full_like(dense["bias"], value),
        }
    dropout_key = DropoutKey(hash_combine(jnp.uint32(2)), jnp.arange(3))
    states = np.asarray(encode(config, params, inputs(), dropout_key=dropout_key, hidden_states=True).hidden_states)
    masks = [states[0] != 0]
    for layer in range(3):  # the last state is normalised
        added = np.round((states[layer + 1] - states[layer]) / 2)
        assert set(np.unique(added)) == {0, 1, 10, 11}
        masks += [added >= 10, added % 10 == 1]
    flat = np.stack([mask.ravel() for mask in masks]).astype(float)
    assert np.abs(flat.mean(1) - 0.5).max() < 0.1
    correlation = np.abs(np.corrcoef(flat)) - np.eye(len(masks))
    assert correlation.max() < stats.norm.isf(ALPHA / 42) / np.sqrt(flat.shape[1])


def test_attention_probabilities_are_dropped():
    """In every layer; they are recorded before it."""
    batch, params, dropout_key = inputs(), parameters(BERT), DropoutKey(jnp.uint32(1), jnp.arange(3))
    config = dataclasses.replace(BERT, attention_dropout=0.5)
    site = "attention.probabilities"
    options = {"hidden_states": True, "activations": (site,)}
    with_dropout = encode(config, params, batch, dropout_key=dropout_key, **options)
    no_dropout = encode(BERT, params, batch, **options)
    np.testing.assert_allclose(with_dropout.hidden_states[0], no_dropout.hidden_states[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(with_dropout.activations[site][0], no_dropout.activations[site][0], rtol=1e-5, atol=1e-6)
    assert np.abs(with_dropout.hidden_states[1] - no_dropout.hidden_states[1]).max() > 0.1
    np.testing.assert_allclose(with_dropout.activations[site].sum(-1), 1.0, atol=1e-5)
