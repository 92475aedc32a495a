"""Activations are recorded and edited at every site, and edits of zeros give gradients by activations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.model.activations import REFERENCE_SITES, SITES, Edit
from tests.model.toy import BERT, encode, inputs, loss, parameters

pytestmark = pytest.mark.slow

SIZES = {"B": 3, "S": 12, "T": 12, "N": 3, "D": 8, "H": 24, "C": 24, "F": 40}
CONFIGS = {
    "bert": BERT,
    "modern": dataclasses.replace(BERT, positions="rotary", norm_placement="pre", feed_forward="gated"),
    "albert": dataclasses.replace(BERT, parameter_groups=1, embedding_size=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sites_have_their_shapes(name):
    config = CONFIGS[name]
    found = encode(config, parameters(config), inputs(), activations=tuple(SITES)).activations
    expected = {site: (3, *(SIZES[axis] for axis in axes.split())) for site, axes in SITES.items()}
    assert {site: x.shape for site, x in found.items()} == expected


def test_recorded_activations_follow_from_each_other():
    """The context is the probabilities times the values; the probabilities are the softmax of the scores."""
    batch = inputs(lengths=(12, 12, 12))
    found = encode(BERT, parameters(BERT), batch, activations=tuple(SITES)).activations
    query, key, value = (found[f"attention.{name}"] for name in ("query", "key", "value"))
    scores = np.einsum("lbsnd,lbtnd->lbnst", query, key) / np.sqrt(8)
    np.testing.assert_allclose(found["attention.scores"], scores, rtol=1e-4, atol=1e-5)
    probabilities = jax.nn.softmax(scores)
    np.testing.assert_allclose(found["attention.probabilities"], probabilities, rtol=1e-4, atol=1e-6)
    context = np.einsum("lbnst,lbtnd->lbsnd", probabilities, value)
    np.testing.assert_allclose(found["attention.context"], context, rtol=1e-4, atol=1e-5)


def test_a_patch_of_a_whole_layer_gives_the_other_inputs_output():
    """Where a layer's activation decides all that follows; elsewhere the output lies between."""
    params, clean, other = parameters(BERT), inputs(), inputs(seed=1)
    recorded = encode(BERT, params, other, activations=tuple(SITES)).activations
    same = {site: Edit(jnp.ones((3, *(1,) * (x.ndim - 1))), jnp.zeros_like(x)) for site, x in recorded.items()}
    plain, target = (encode(BERT, params, batch).hidden for batch in (clean, other))
    assert np.abs(plain - target).max() > 0.1
    np.testing.assert_allclose(encode(BERT, params, clean, edits=same).hidden, plain, rtol=1e-5, atol=1e-6)
    for site, (ones, zeros) in same.items():
        patch = Edit(ones.at[1].set(0.0), zeros.at[1].set(recorded[site][1]))
        patched = encode(BERT, params, clean, edits=same | {site: patch}).hidden
        assert np.abs(patched - plain).max() > 1e-3, site
        if site == "hidden":
            np.testing.assert_allclose(patched, target, rtol=1e-5, atol=1e-5)


def test_gradients_by_offsets_are_finite_differences():
    batch, params = inputs(lengths=(12, 12, 12)), parameters(BERT)
    zeros = jax.tree.map(jnp.zeros_like, encode(BERT, params, batch, activations=tuple(SITES)).activations)

    @jax.jit
    def shifted(offsets):
        return loss(BERT, params, batch, edits={site: Edit(offset=x) for site, x in offsets.items()})

    gradients = jax.jit(jax.grad(shifted))(zeros)
    for site, x in zeros.items():
        direction = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
        step = 1e-2 / np.sqrt(direction.size)
        ends = [shifted(zeros | {site: sign * step * direction}) for sign in (1, -1)]
        difference = (ends[0] - ends[1]) / (2 * step)
        assert abs(difference) > 1e-2, site
        np.testing.assert_allclose((gradients[site] * direction).sum(), difference, rtol=0.05, err_msg=site)


def test_an_edit_of_the_last_layer_reaches_selected_positions():
    """The split last layer of `positions` applies the last row of the edits."""
    batch, params = inputs(), parameters(BERT)
    edits = {"attention.context": Edit(jnp.array([1.0, 1.0, 0.0]).reshape(3, 1, 1, 1, 1))}
    few = jnp.array([[0, 3], [2, 1], [5, 4]])
    whole = encode(BERT, params, batch, edits=edits).hidden
    expected = jnp.take_along_axis(whole, few[:, :, None], axis=1)
    found = encode(BERT, params, batch, edits=edits, positions=few).hidden
    assert np.abs(found - encode(BERT, params, batch, positions=few).hidden).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_scores_need_the_reference_attention():
    config = dataclasses.replace(BERT, attention="xla")
    for site in REFERENCE_SITES:
        for options in ({"edits": {site: Edit(jnp.ones((3, 1, 1, 1, 1)))}}, {"activations": (site,)}):
            with pytest.raises(UserError, match=r"'xla' has no attention probabilities: set model\.attention ref"):
                encode(config, parameters(BERT), inputs(), **options)
