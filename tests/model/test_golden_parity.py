"""Numbers that transformers' BertForPreTraining gave once (tests/golden/make_parity.py), met in float32."""

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
    model = bert.bind(CONFIG, HEADS, params)
    output = model.encoder(inputs, hidden_states=True)
    return {
        "hidden_states": output.hidden_states,
        "mlm_logits": model.mlm(output.hidden, model.encoder.embeddings.attend),
        "pair_logits": model.pair(output.pooled)[:, 0],
    }


def our_inputs(theirs):
    place = np.broadcast_to(np.arange(theirs["input_ids"].shape[1], dtype=np.int32), theirs["input_ids"].shape)
    cls = np.zeros((len(place), 1), np.int32)
    return EncoderInputs(theirs["input_ids"], theirs["token_type_ids"], theirs["attention_mask"], place, cls)


def test_hidden_states_and_logits(golden):
    weights = recipe.make_weights(recipe.SETTINGS, int(golden["seed"]))
    theirs = recipe.make_inputs(recipe.SETTINGS, tuple(golden["lengths"].tolist()), int(golden["seed"]))
    assert (theirs["attention_mask"] == 0).any() and theirs["token_type_ids"].any()
    ours = forward(from_recipe(weights).params, our_inputs(theirs))
    assert golden["hidden_states"].shape == (4, 3, 18, 64)
    for name, values in ours.items():
        assert np.std(golden[name]) > 0.3  # or the tolerance would mean nothing
        np.testing.assert_allclose(values, golden[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", sorted(recipe.tensor_shapes(recipe.SETTINGS)))
def test_every_tensor_counts(golden, name):
    """A changed tensor misses the goldens: no tensor is read from the wrong place or left at its start value."""
    weights = recipe.make_weights(recipe.SETTINGS, int(golden["seed"]))
    theirs = recipe.make_inputs(recipe.SETTINGS, tuple(golden["lengths"].tolist()), int(golden["seed"]))
    weights[name] = weights[name] + np.random.default_rng(0).normal(0, 0.1, weights[name].shape).astype(np.float32)
    ours = forward(from_recipe(weights).params, our_inputs(theirs))
    difference = max(np.abs(values - golden[which]).max() for which, values in ours.items())
    # A key's bias adds the same to every score of a query, and softmax does not see it.
    assert difference < 1e-4 if name.endswith("self.key.bias") else difference > 1e-3


def test_table_of_names_is_complete():
    """to_huggingface gives every tensor of the reference in its shape; from_huggingface restores it bit for bit."""
    weights = recipe.make_weights(recipe.SETTINGS, 3)
    model = from_recipe(weights)
    assert (model.family, model.config, model.heads) == ("bert", CONFIG, HEADS)
    back = to_huggingface(model, "recipe").tensors
    assert back.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
