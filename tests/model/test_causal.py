"""Attention masks, and a causal encoder against a bidirectional one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention import make_attention_mask
from bert_jax.model.flops import pretraining_flops
from tests.model.toy import BERT, attentions, encode, inputs, parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

CAUSAL = dataclasses.replace(BERT, direction="causal")
LOCAL = dataclasses.replace(CAUSAL, num_layers=2, attention_window=2, global_every=2)
SEGMENTS = [[1, 1, 1, 1, 2, 2, 2, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [0] * 10]


@pytest.mark.parametrize(("before", "after"), [(None, None), (2, 2), (None, 0), (2, 0), (0, 0)])
def test_attention_mask_by_its_definition(before, after):
    mask = np.asarray(make_attention_mask(jnp.asarray(SEGMENTS), before, after))[:, 0]
    for row, segments in enumerate(SEGMENTS):
        for i, query in enumerate(segments):
            for j, key in enumerate(segments):
                near = (before is None or i - j <= before) and (after is None or j - i <= after)
                expected = key > 0 if query == 0 else (key == query and near)
                assert mask[row, i, j] == expected, (row, i, j)
    assert mask[:2].any(-1).all(), "a query without a key"


def test_a_causal_encoder_reads_left_to_right():
    """Other tokens from position 7 on change no hidden state before it, and all after it."""
    batch, params = inputs(), parameters(CAUSAL)
    other = batch._replace(input_ids=batch.input_ids.at[0, 7:].set(65 - batch.input_ids[0, 7:]))
    for config in (CAUSAL, dataclasses.replace(CAUSAL, attention="xla")):
        one, two = (np.asarray(encode(config, params, b).hidden[0]) for b in (batch, other))
        np.testing.assert_allclose(one[:7], two[:7], rtol=1e-5, atol=1e-6)
        assert (np.abs(one[7:] - two[7:]).max(-1) > 1e-3).all()
    one, two = (np.asarray(encode(BERT, params, b).hidden[0]) for b in (batch, other))
    assert (np.abs(one[:7] - two[:7]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_local_windows(direction):
    config = dataclasses.replace(LOCAL, direction=direction)
    probabilities = attentions(config, parameters(config), inputs())
    back = np.arange(12)[:, None] - np.arange(12)[None]
    allowed = back >= 0 if direction == "causal" else np.full_like(back, True, bool)
    global_layer, local_layer = probabilities[:, 0]
    for head in range(BERT.num_heads):
        np.testing.assert_array_equal(global_layer[head] > 0, allowed)
        np.testing.assert_array_equal(local_layer[head] > 0, allowed & (np.abs(back) <= 2))


def test_flops_of_a_causal_window():
    """Global layers count all keys; with 128 tokens and a window of 10, a local layer counts 11 keys instead of 21."""
    wide = dataclasses.replace(BERT, attention_window=10, global_every=3, num_layers=3)
    narrow = dataclasses.replace(wide, direction="causal")
    assert pretraining_flops(CAUSAL, 2, 128, 127) == pretraining_flops(BERT, 2, 128, 127)
    saved = pretraining_flops(wide, 1, 128, 0) - pretraining_flops(narrow, 1, 128, 0)
    assert saved == 3 * 128 * 2 * 4 * 24 * (21 - 11)
