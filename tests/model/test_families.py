"""Family-specific parts against numpy (tests/live: against transformers)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from bert_jax.config import TaskHead
from bert_jax.convert.translate import NativeModel, to_huggingface
from bert_jax.errors import UserError
from bert_jax.model import bert, families
from bert_jax.model.activations import Edit
from bert_jax.model.dropout import DropoutKey, hash_combine
from bert_jax.model.heads import Heads
from tests.model.toy import BERT, encode, inputs, parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROBERTA = families.roberta(1, 64, vocab_size=50)
DISTILBERT = families.bert(1, 64, vocab_size=50, type_vocab_size=0)
MIXED = TaskHead("classification", ("a", "b"), "pooled", mix=True)


def numpy_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + BERT.norm_epsilon) * scale


@pytest.mark.parametrize("biases", ["all", "none"])
def test_gated_feed_forward(biases):
    """gelu(x G) * (x W), then V: a whole block without attention, which a factor of 0 removes."""
    config = dataclasses.replace(BERT, feed_forward="gated", biases=biases, norm_placement="pre", num_layers=1)
    params = parameters(config)
    layer = jax.tree.map(lambda x: np.asarray(x[0], np.float64), params["encoder"]["layers"])
    no_heads = {"attention.context": Edit(jnp.zeros((1, 1, 1, 1, 1)))}
    output = encode(config, params, inputs(), edits=no_heads, hidden_states=True)
    before, after = (np.asarray(x, np.float64) for x in output.hidden_states)

    def dense(name, x):
        return x @ layer[name]["kernel"] + layer[name].get("bias", 0.0)

    x = before + layer["attention_out"].get("bias", 0.0)
    normal = numpy_norm(x, layer["feed_forward_norm"]["scale"]) + layer["feed_forward_norm"].get("bias", 0.0)
    gate = dense("gate", normal)
    x = x + dense("down", gate * special.ndtr(gate) * dense("up", normal))
    final = jax.tree.map(np.asarray, params["encoder"]["final_norm"])
    np.testing.assert_allclose(after, numpy_norm(x, final["scale"]) + final.get("bias", 0.0), rtol=0, atol=1e-5)


def test_narrow_embeddings_are_dropped_before_they_are_projected():
    config = dataclasses.replace(BERT, embedding_size=16, hidden_dropout=0.5)
    params, dropout_key = parameters(config), DropoutKey(hash_combine(jnp.uint32(1)), jnp.arange(3))
    embeddings = bert.model_from_params(config, Heads(pair="pair" in params), params).encoder.embeddings
    projection, embeddings.projection = embeddings.projection, None
    narrow = embeddings(inputs(), None, dropout_key)
    assert narrow.shape[-1] == 16 and 0.4 < float((narrow == 0).mean()) < 0.6
    embeddings.projection = projection
    dense = params["encoder"]["embeddings"]["projection"]
    expected = np.asarray(narrow) @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    np.testing.assert_allclose(embeddings(inputs(), None, dropout_key), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "config", "heads", "message"),
    [
        ("bert", dataclasses.replace(BERT, embedding_size=16), Heads(), "model.embedding_size 16 cannot be written"),
        (
            "bert",
            dataclasses.replace(BERT, feed_forward="gated"),
            Heads(),
            "model.feed_forward gated cannot be written",
        ),
        ("bert", dataclasses.replace(BERT, biases="none"), Heads(), "model.biases none cannot be written"),
        ("bert", dataclasses.replace(BERT, head_size=16), Heads(), "model.head_size 16 cannot be written"),
        ("bert", dataclasses.replace(BERT, positions="rotary"), Heads(), "model.positions rotary cannot be written"),
        ("bert", dataclasses.replace(BERT, adapter_size=8), Heads(), "model.adapter_size 8 cannot be written as bert"),
        ("bert", BERT, Heads(mlm=False, task=MIXED), "task/mix/scale cannot be written as bert"),
        ("roberta", ROBERTA, Heads(pair=True), "pair/dense/bias cannot be written as roberta"),
        ("distilbert", DISTILBERT, Heads(pooler=True), "encoder/pooler/bias cannot be written as distilbert"),
    ],
)
def test_what_a_family_cannot_hold_is_not_written(family, config, heads, message):
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), bert.shapes(config, heads))
    with pytest.raises(UserError, match=message):
        to_huggingface(NativeModel(family, config, heads, params), "here")
