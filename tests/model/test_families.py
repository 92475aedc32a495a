"""Model families: published sizes, and family-specific parts against numpy (tests/live: against transformers)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from bert_jax.config import ModelConfig
from bert_jax.convert.translate import NativeModel, to_huggingface
from bert_jax.errors import UserError
from bert_jax.model import bert, families
from bert_jax.model.heads import Heads
from bert_jax.model.layers import DropoutKey, hash_combine
from bert_jax.training.param_paths import name_leaves
from tests.model.toy import BERT, encode, inputs, parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

UNUSED_NORM = 768
# (model, whether there is a pair head, parameters of the encoder with its pooler)
SIZES = {
    "ALBERT-base": (families.albert(12, 768, 12), True, 11_683_584),
    "ALBERT-large": (families.albert(24, 1024, 16), True, 17_683_968),
    "ALBERT-xlarge": (families.albert(24, 2048, 16), True, 58_724_864),
    "ALBERT-xxlarge": (families.albert(12, 4096, 64), True, 222_595_584),
    "RoBERTa-base": (families.roberta(12, 768), False, 124_055_040),
    "DistilBERT-base": (families.distilbert(6, 768), False, 66_362_880),
    "ModernBERT-base": (families.modern(22, 768, 1152, max_positions=1024), False, 149_014_272 + UNUSED_NORM),
}


def shapes(config: ModelConfig, pair: bool):
    return bert.shapes(config, Heads(pair=pair))


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name):
    config, pair, count = SIZES[name]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes(config, pair)["encoder"])) == count


def numpy_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + BERT.norm_epsilon) * scale


@pytest.mark.parametrize("biases", ["all", "none"])
def test_gated_feed_forward(biases):
    """gelu(x G) * (x W), then V: a whole block without attention, which a head mask of zeros removes."""
    config = dataclasses.replace(BERT, feed_forward="gated", biases=biases, norm_placement="pre", num_layers=1)
    params = parameters(config)
    layer = jax.tree.map(lambda x: np.asarray(x[0], np.float64), params["encoder"]["layers"])
    output = encode(config, params, inputs(), head_mask=jnp.zeros((1, config.num_heads)), hidden_states=True)
    before, after = (np.asarray(x, np.float64) for x in output.hidden_states)

    def dense(name, x):
        return x @ layer[name]["kernel"] + layer[name].get("bias", 0.0)

    x = before + layer["attention_out"].get("bias", 0.0)
    normal = numpy_norm(x, layer["feed_forward_norm"]["scale"]) + layer["feed_forward_norm"].get("bias", 0.0)
    gate = dense("gate", normal)
    x = x + dense("down", gate * special.ndtr(gate) * dense("up", normal))
    final = jax.tree.map(np.asarray, params["encoder"]["final_norm"])
    np.testing.assert_allclose(after, numpy_norm(x, final["scale"]) + final.get("bias", 0.0), rtol=0, atol=1e-5)


def test_without_biases_only_output_layers_have_one():
    names = name_leaves(shapes(dataclasses.replace(BERT, biases="none", embedding_size=16), pair=True))
    assert {name for name in names if name.endswith("bias")} == {"mlm/bias", "pair/dense/bias"}


def test_a_model_without_token_types():
    config = dataclasses.replace(BERT, type_vocab_size=0)
    batch, params = inputs(), parameters(config)
    assert "token_type" not in params["encoder"]["embeddings"]
    other = batch._replace(token_type_ids=1 - batch.token_type_ids)
    np.testing.assert_array_equal(encode(config, params, batch).hidden, encode(config, params, other).hidden)
    one, two = (encode(BERT, parameters(BERT), rows).hidden for rows in (batch, other))
    assert np.abs(one - two).max() > 0.1


def test_narrow_embeddings_are_dropped_before_they_are_projected():
    config = dataclasses.replace(BERT, embedding_size=16, hidden_dropout=0.5)
    params, dropout_key = parameters(config), DropoutKey(hash_combine(jnp.uint32(1)), jnp.arange(3))
    embeddings = bert.merge_params(config, Heads(pair="pair" in params), params).encoder.embeddings
    projection, embeddings.projection = embeddings.projection, None
    narrow = embeddings(inputs(), None, dropout_key)
    assert narrow.shape[-1] == 16 and 0.4 < float((narrow == 0).mean()) < 0.6
    embeddings.projection = projection
    dense = params["encoder"]["embeddings"]["projection"]
    expected = np.asarray(narrow) @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    np.testing.assert_allclose(embeddings(inputs(), None, dropout_key), expected, rtol=0, atol=1e-5)


def test_mlm_head_of_narrow_tables():
    """Logits by numpy: H -> E, gelu, LayerNorm, the table transposed."""
    config = dataclasses.replace(BERT, embedding_size=16)
    params = parameters(config)
    model = bert.merge_params(config, Heads(pair="pair" in params), params)
    hidden = np.random.default_rng(0).normal(size=(2, 3, 24)).astype(np.float32)
    head = jax.tree.map(lambda x: np.asarray(x, np.float64), params["mlm"])
    x = hidden @ head["transform"]["kernel"] + head["transform"]["bias"]
    normal = numpy_norm(x * special.ndtr(x), head["norm"]["scale"]) + head["norm"]["bias"]
    expected = normal @ np.asarray(params["encoder"]["embeddings"]["word"], np.float64).T + head["bias"]
    np.testing.assert_allclose(model.mlm(jnp.asarray(hidden), model.encoder.embeddings.attend), expected, atol=1e-4)


def test_a_gate_does_not_change_the_other_initial_weights():
    """Each layer is initialised from its own key."""
    plain, gated = (
        bert.init(config, jax.random.key(3), Heads(pair=False))
        for config in (BERT, dataclasses.replace(BERT, feed_forward="gated"))
    )
    del gated["encoder"]["layers"]["gate"]
    jax.tree.map(np.testing.assert_array_equal, plain, gated)


@pytest.mark.parametrize(
    "change",
    [{"embedding_size": 16}, {"feed_forward": "gated"}, {"biases": "none"}, {"head_size": 16}, {"positions": "rotary"}],
    ids=lambda change: next(iter(change)),
)
def test_configs_that_cannot_be_a_hugging_face_bert(change):
    ((name, value),) = change.items()
    config, heads = dataclasses.replace(BERT, **change), Heads()
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), bert.shapes(config, heads))
    with pytest.raises(UserError, match=rf"model\.{name} {value} cannot be written as bert"):
        to_huggingface(NativeModel("bert", config, heads, params), "here")


@pytest.mark.parametrize(
    ("family", "heads", "message"),
    [
        ("roberta", Heads(pair=True), "pair/dense/bias cannot be written as roberta"),
        ("distilbert", Heads(pooler=True), "encoder/pooler/bias cannot be written as distilbert"),
    ],
)
def test_heads_that_a_family_does_not_have(family, heads, message):
    config = {
        "roberta": families.roberta(1, 64, vocab_size=50),
        "distilbert": families.distilbert(1, 64, vocab_size=50),
    }
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), bert.shapes(config[family], heads))
    with pytest.raises(UserError, match=message):
        to_huggingface(NativeModel(family, config[family], heads, params), "here")
