"""Outputs equal stored outputs of transformers' BertForPreTraining (tests/golden/make_parity.py), in float32."""

import jax
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.translate import from_huggingface, to_huggingface
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
from tests.golden import recipe
from tests.golden.make_parity import PATH

CONFIG = ModelConfig(
    vocab_size=recipe.SETTINGS["vocab_size"],
    hidden_size=recipe.SETTINGS["hidden_size"],
    num_layers=recipe.SETTINGS["num_hidden_layers"],
    num_heads=recipe.SETTINGS["num_attention_heads"],
    intermediate_size=recipe.SETTINGS["intermediate_size"],
    max_positions=recipe.SETTINGS["max_position_embeddings"],
)

HEADS = Heads(pair=True, pooler=True)


@pytest.fixture(scope="module")
def golden():
    return np.load(PATH)


def from_recipe(weights):
    return from_huggingface(HuggingFaceModel(recipe.SETTINGS | {"model_type": "bert"}, weights, "recipe"))


@jax.jit
def forward(params, inputs):
    model = bert.model_from_params(CONFIG, HEADS, params)
    output = model.encoder(inputs, hidden_states=True)
    return {
        "hidden_states": output.hidden_states,
        "mlm_logits": model.mlm(output.hidden, model.encoder.embeddings.word[...]),
        "pair_logits": model.pair(output.pooled)[:, 0],
    }


def encoder_inputs(hf_inputs):
    shape = hf_inputs["input_ids"].shape
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    cls = np.zeros((len(positions), 1), np.int32)
    segments = hf_inputs["attention_mask"]
    return EncoderInputs(hf_inputs["input_ids"], hf_inputs["token_type_ids"], segments, positions, cls)


def test_hidden_states_and_logits(golden):
    weights = recipe.make_weights(recipe.SETTINGS, int(golden["seed"]))
    hf_inputs = recipe.make_inputs(recipe.SETTINGS, tuple(golden["lengths"].tolist()), int(golden["seed"]))
    assert (hf_inputs["attention_mask"] == 0).any() and hf_inputs["token_type_ids"].any()
    outputs = forward(from_recipe(weights).params, encoder_inputs(hf_inputs))
    assert golden["hidden_states"].shape == (4, 3, 18, 64)
    for name, values in outputs.items():
        assert np.std(golden[name]) > 0.3  # or the tolerance would mean nothing
        np.testing.assert_allclose(values, golden[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", sorted(recipe.tensor_shapes(recipe.SETTINGS)))
def test_every_tensor_counts(golden, name):
    """A changed tensor changes the outputs: no tensor is read from another path or left at its initial value."""
    weights = recipe.make_weights(recipe.SETTINGS, int(golden["seed"]))
    hf_inputs = recipe.make_inputs(recipe.SETTINGS, tuple(golden["lengths"].tolist()), int(golden["seed"]))
    weights[name] = weights[name] + np.random.default_rng(0).normal(0, 0.1, weights[name].shape).astype(np.float32)
    outputs = forward(from_recipe(weights).params, encoder_inputs(hf_inputs))
    difference = max(np.abs(values - golden[which]).max() for which, values in outputs.items())
    # A key's bias adds a constant to all scores of a query; softmax does not change.
    assert difference < 1e-4 if name.endswith("self.key.bias") else difference > 1e-3


def test_table_of_names_is_complete():
    """to_huggingface returns every tensor of the reference with its shape; from_huggingface restores it bit for bit."""
    weights = recipe.make_weights(recipe.SETTINGS, 3)
    model = from_recipe(weights)
    assert (model.family, model.config, model.heads) == ("bert", CONFIG, HEADS)
    back = to_huggingface(model, "recipe").tensors
    assert back.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
