"""MobileBERT's parts against loops and hand counts (tests/live and tests/golden: against transformers)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.convert.translate import NativeModel, to_huggingface
from bert_jax.errors import UserError
from bert_jax.model import bert, families
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.embeddings import with_neighbours
from bert_jax.model.flops import layer_weights, pretraining_flops, projection_weights
from bert_jax.model.heads import Heads
from bert_jax.training.optimizers.param_rules import ParamRule, param_rules
from bert_jax.training.param_paths import name_leaves
from tests.model.toy import BERT, assert_trees_close, encode, inputs, loss, parameters, real

pytestmark = pytest.mark.usefixtures("quick_compilation")

MOBILE = dataclasses.replace(
    BERT,
    embedding_size=8,
    embeddings="trigrams",
    bottleneck_size=12,
    feed_forward_networks=3,
    norm="none",
    activation="relu",
)
KINDS = ("shared", "bottleneck", "input")


def count(shapes) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def test_sizes_of_the_published_models():
    """Those of transformers' MobileBertModel without and with pooler; of IB-BERT by hand."""
    encoder = bert.shapes(families.mobilebert(), Heads(mlm=False))
    assert count(encoder) == 24_581_888
    assert count(bert.shapes(families.mobilebert(), Heads(mlm=False, pooler=True))) == 24_844_544
    embeddings = 30522 * 128 + (512 + 2) * 512 + (3 * 128 + 1) * 512 + 2 * 512
    bottleneck = (512 + 1 + 2) * 1024 + (1024 + 1 + 2) * 512
    attention = 3 * (512 + 1) * 1024 + (1024 + 1 + 2) * 1024
    feed_forward = (1024 + 1) * 4096 + (4096 + 1 + 2) * 1024
    expected = embeddings + 24 * (bottleneck + attention + feed_forward)
    assert count(bert.shapes(families.ib_bert(), Heads(mlm=False))) == expected == 294_205_184


def test_neighbours_are_those_of_the_same_example():
    segments = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]])
    words = np.random.default_rng(0).normal(size=(2, 7, 3)).astype(np.float32)
    expected = np.zeros((2, 7, 3, 3), np.float32)
    for row in range(2):
        for place in range(7):
            for part, step in enumerate((1, 0, -1)):
                other = place + step
                if 0 <= other < 7 and segments[row, other] == segments[row, place]:
                    expected[row, place, part] = words[row, other]
    found = with_neighbours(jnp.asarray(words), jnp.asarray(segments))
    np.testing.assert_array_equal(found, expected.reshape(2, 7, 9))
    crossed = with_neighbours(jnp.asarray(words), jnp.ones((2, 7), int))
    assert (np.asarray(crossed) != expected.reshape(2, 7, 9)).any()


def test_packed_examples_are_independent():
    """Hidden states of an example are the same alone and beside another one; a changed neighbour changes nothing."""
    params, packed = parameters(MOBILE), inputs(packed=True)
    whole = np.asarray(encode(MOBILE, params, packed).hidden)
    first = np.asarray(packed.segment_ids) == 1
    other = packed._replace(
        input_ids=jnp.where(first, packed.input_ids, 5), segment_ids=jnp.where(first, packed.segment_ids, 0)
    )
    alone = np.asarray(encode(MOBILE, params, other).hidden)
    assert (np.asarray(packed.input_ids) != np.asarray(other.input_ids)).any()
    np.testing.assert_allclose(alone[first], whole[first], rtol=0, atol=1e-5)
    one = packed._replace(input_ids=packed.input_ids.at[:, 2].add(1))
    assert np.abs(np.asarray(encode(MOBILE, params, one).hidden)[first] - whole[first]).max() > 1e-2


def numpy_layer(config, layer, hidden, kind: str, heads) -> np.ndarray:
    """One row through one layer, from the paper's figure 1; `heads` returns the contexts of attention."""
    dense = lambda name, x: x @ _flat(layer[name]["kernel"], x.shape[-1]) + layer[name]["bias"].reshape(-1)  # noqa: E731
    norm = lambda name, x: x * layer[name]["scale"] + layer[name]["bias"]  # noqa: E731
    bottleneck = layer["bottleneck"]
    inner = hidden @ bottleneck["input"]["kernel"] + bottleneck["input"]["bias"]
    inner = inner * bottleneck["input_norm"]["scale"] + bottleneck["input_norm"]["bias"]
    if kind == "shared":
        shared = hidden @ bottleneck["attention"]["kernel"] + bottleneck["attention"]["bias"]
        shared = shared * bottleneck["attention_norm"]["scale"] + bottleneck["attention_norm"]["bias"]
        query, key = np.split(dense("query_key", shared), 2, -1)
        value = dense("value", hidden)
    else:
        query, key, value = np.split(dense("qkv", inner if kind == "bottleneck" else hidden), 3, -1)
    inner = norm("attention_norm", dense("attention_out", heads(query, key, value)) + inner)
    networks = [layer["networks"][str(i)] for i in range(config.feed_forward_networks - 1)]
    for network in (*networks, {"up": layer["up"], "down": layer["down"], "norm": layer["feed_forward_norm"]}):
        up = np.maximum(inner @ network["up"]["kernel"] + network["up"]["bias"], 0)
        down = up @ network["down"]["kernel"] + network["down"]["bias"]
        inner = (down + inner) * network["norm"]["scale"] + network["norm"]["bias"]
    output = inner @ bottleneck["output"]["kernel"] + bottleneck["output"]["bias"] + hidden
    return output * bottleneck["output_norm"]["scale"] + bottleneck["output_norm"]["bias"]


def _flat(kernel: np.ndarray, width: int) -> np.ndarray:
    return kernel.reshape(width, -1) if kernel.shape[0] == width else kernel.reshape(-1, kernel.shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_by_hand(kind):
    config = dataclasses.replace(MOBILE, bottleneck_attention=kind, num_layers=1)
    params, batch = parameters(config), inputs((12,))
    states = np.asarray(encode(config, params, batch, hidden_states=True).hidden_states, np.float64)[:, 0]
    layer = jax.tree.map(lambda x: np.asarray(x[0], np.float64), params["encoder"]["layers"])

    def heads(query, key, value):
        contexts = []
        for q, k, v in zip(*(np.split(x, config.num_heads, -1) for x in (query, key, value)), strict=True):
            weights = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
            contexts.append(weights / weights.sum(-1, keepdims=True) @ v)
        return np.concatenate(contexts, -1)

    found = numpy_layer(config, layer, states[0], kind, heads)
    np.testing.assert_allclose(states[1], found, rtol=0, atol=1e-4 * np.abs(found).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "input"])
def test_last_layer_at_some_positions_and_other_implementations(kind):
    """Values and gradients of the fast paths."""
    config = dataclasses.replace(MOBILE, bottleneck_attention=kind)
    params, batch = parameters(config), inputs()
    whole = encode(config, params, batch).hidden
    positions = jnp.asarray([[0, 3, 5], [1, 2, 6], [4, 7, 8]])
    few = encode(config, params, batch, positions=positions).hidden
    np.testing.assert_allclose(few, jnp.take_along_axis(whole, positions[:, :, None], 1), rtol=0, atol=2e-5)
    gradients = jax.grad(lambda params, config: loss(config, params, batch), allow_int=True)
    plain = gradients(params, config)
    for changes in ({"attention": "deferred"}, {"remat": "full"}):
        other = dataclasses.replace(config, **changes)
        assert_trees_close(gradients(params, other), plain, rtol=1e-3, atol=1e-3)


def test_dropout_is_on_embeddings_and_the_projection_back():
    """With a rate of nearly 1, a layer returns the norm of its input; without dropout it does not."""
    config = dataclasses.replace(MOBILE, num_layers=1, hidden_dropout=0.999999)
    params, batch = parameters(config), inputs()
    key = DropoutKey(jnp.uint32(3), jnp.arange(3))
    dropped = encode(config, params, batch, hidden_states=True, dropout_key=key).hidden_states
    kept = encode(config, params, batch, hidden_states=True).hidden_states
    norm = jax.tree.map(lambda x: x[0][None, None], params["encoder"]["layers"]["bottleneck"]["output_norm"])
    expected, other = (states[0] * norm["scale"] + norm["bias"] for states in (dropped, kept))
    np.testing.assert_allclose(dropped[1] * real(batch), expected * real(batch), rtol=0, atol=1e-5)
    assert np.abs(np.asarray((kept[1] - other) * real(batch))).max() > 0.1


def test_no_dropout_inside_a_bottleneck():
    """Of embeddings that are 0, whatever dropout does, the layer computes the same up to its projection back."""
    config = dataclasses.replace(MOBILE, num_layers=1, hidden_dropout=0.5)
    params, batch, site = parameters(config), inputs(), "feed_forward.activations"
    zeros = jax.tree.map(jnp.zeros_like, params["encoder"]["embeddings"])
    params = params | {"encoder": params["encoder"] | {"embeddings": zeros}}
    key = DropoutKey(jnp.uint32(3), jnp.arange(3))
    dropped, kept = (encode(config, params, batch, dropout_key=k, activations=(site,)) for k in (key, None))
    np.testing.assert_array_equal(dropped.activations[site], kept.activations[site])
    assert np.abs(np.asarray(dropped.hidden - kept.hidden)).max() > 0.1 and np.any(kept.activations[site])


def test_several_networks_in_a_plain_layer():
    config = dataclasses.replace(BERT, feed_forward_networks=2, norm_placement="pre", feed_forward="gated")
    params, batch = parameters(config), inputs()
    changed = jax.tree.map(lambda x: x, params)
    changed["encoder"]["layers"]["networks"]["0"]["gate"]["bias"] += 1.0
    outputs = [np.asarray(encode(config, each, batch).hidden * real(batch)) for each in (params, changed)]
    assert np.isfinite(outputs[0]).all() and np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_tables_have_rules():
    shapes = bert.shapes(MOBILE, Heads(pair=True))
    rules = name_leaves(param_rules(shapes))
    assert rules["mlm/extra_columns"].decayed and rules["mlm/extra_columns"].tensor_axes == ()
    for path in ("query_key/kernel", "networks/1/up/kernel", "bottleneck/output/kernel", "value/kernel"):
        axes = (0, 2) if path.startswith("query_key") else (0,)
        assert rules[f"encoder/layers/{path}"] == ParamRule(decayed=True, tensor_axes=axes, input_axes=(1,))
    assert not rules["encoder/layers/bottleneck/input_norm/scale"].decayed


def test_int8_covers_every_table_and_dense_layer():
    """All kernels of the encoder and the MLM head, and the decoder's further columns with a scale per token."""
    axes = bert.int8_axes(MOBILE, Heads())
    leaves = name_leaves(bert.shapes(MOBILE, Heads()))
    kernels = {path for path in leaves if path.endswith("/kernel")}
    assert kernels < axes.keys() and axes["mlm/extra_columns"] == axes["encoder/embeddings/word"] == (1,)
    config = dataclasses.replace(MOBILE, dense_dtype="int8")
    params, batch = parameters(MOBILE), inputs()
    outputs = [np.asarray(encode(each, params, batch).hidden * real(batch)) for each in (MOBILE, config)]
    assert 0 < np.abs(outputs[0] - outputs[1]).max() < 0.3 * np.abs(outputs[0]).max()


@pytest.mark.parametrize("kind", KINDS)
def test_counted_weights_are_those_of_the_parameters(kind):
    config = dataclasses.replace(MOBILE, bottleneck_attention=kind)
    leaves = name_leaves(bert.shapes(config, Heads()))
    kernels = {path: math.prod(leaf.shape) for path, leaf in leaves.items() if path.endswith("/kernel")}
    layers = sum(size for path, size in kernels.items() if "/layers/" in path)
    assert sum(layer_weights(config)) * config.num_layers == layers
    assert projection_weights(config) == kernels["encoder/embeddings/projection/kernel"] == 3 * 8 * 24
    # Per token two FLOPs per weight and those of attention; per prediction the head with its whole decoder.
    per_token = 2 * (layers + 3 * 8 * 24) + config.num_layers * 4 * 12 * 12
    assert pretraining_flops(config, 5, 12, 2) == 3 * 5 * (12 * per_token + 2 * 2 * 24 * (24 + config.vocab_size))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_placement": "pre"}, "model.bottleneck_size needs model.norm_placement 'post'"),
        ({"embedding_size": 24}, "'trigrams' needs a model.embedding_size below model.hidden_size 24, not 24"),
        ({"direction": "causal"}, "'trigrams' show each token the next one, which a causal model predicts"),
        ({"bottleneck_size": 13}, "model.bottleneck_size 13 is not divisible by model.num_heads 3"),
        ({"feed_forward_networks": 9}, "model.feed_forward_networks"),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(MOBILE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bottleneck_attention": "input"}, None),
        ({"norm": "layer"}, "norm_epsilon 1e-12|normalization_type 'layer_norm'"),
        ({"norm": "layer", "norm_epsilon": 1e-5}, None),
        ({"head_size": 8}, "whose heads have bottleneck_size / num_heads = 4"),
        ({"embeddings": "tokens"}, "model.embeddings tokens cannot be written as mobilebert, which has trigrams"),
    ],
)
def test_what_can_be_written_for_transformers(changes, message):
    config = dataclasses.replace(MOBILE, **changes)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), bert.shapes(config, Heads()))
    model = NativeModel("mobilebert", config, Heads(), params)
    if message is None:
        to_huggingface(model, "here")
        return
    with pytest.raises(UserError, match=message):
        to_huggingface(model, "here")
