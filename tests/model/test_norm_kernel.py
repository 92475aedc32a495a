"""The Pallas kernels of dropout, residual sum and LayerNorm, interpreted, beside the functions that they replace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.config.sections import GPU_NORM_WIDTHS
from bert_jax.model import bert, gpu_attention, gpu_norm, kernel_rules
from bert_jax.model.dropout import DropoutKey, dropout
from bert_jax.model.embeddings import EncoderInputs
from bert_jax.model.gpu_norm import dropout_add_norm
from bert_jax.model.heads import Heads
from bert_jax.model.layers import add_bias
from bert_jax.model.norms import LayerNorm
from tests.model.toy import assert_trees_close, encode, parameters, probe

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS, LENGTH = 2, 16
EPSILON = 1e-3


@pytest.fixture(autouse=True, scope="module")
def several_tiles():
    """Programs of the backward kernel, two for each row, have several tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_norm, "PROGRAMS", 4)
        yield


def arrays(width: int, biases: bool, dtype: str = "float32") -> dict[str, jax.Array | None]:
    """The arguments by name, with indices of rows for the dropout key, and a gradient of the result."""
    rng = np.random.default_rng(width)
    whole, of_column = (ROWS, LENGTH, width), (width,)
    shapes = {"x": whole, "x_bias": of_column, "residual": whole, "scale": of_column, "bias": of_column}
    found = {name: jnp.asarray(1 + rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    found |= {} if biases else {"x_bias": None, "bias": None}
    found["rows"] = jnp.array([5, 9])
    found["gradient"] = jnp.asarray(rng.normal(size=whole), jnp.float32)
    return found | {name: found[name].astype(dtype) for name in ("x", "residual", "gradient")}


def reference(x, x_bias, residual, scale, bias, rate, dropout_key):
    """The functions of a layer, one after the other."""
    norm = LayerNorm(len(scale), EPSILON, "none" if bias is None else "all")
    norm.scale[...] = scale
    if bias is not None:
        norm.bias[...] = bias
    return norm(residual + dropout(x if x_bias is None else add_bias(x, x_bias), rate, dropout_key))


def kernels(x, x_bias, residual, scale, bias, rate, dropout_key):
    """The kernels, interpreted."""
    settings = {"epsilon": EPSILON, "dropout_rate": rate, "dropout_key": dropout_key, "interpret": True}
    return dropout_add_norm(x, x_bias, residual, scale, bias, **settings)


@functools.partial(jax.jit, static_argnums=(0, 2))
def value_and_gradients(function, inputs, rate):
    """The normalised vectors and the gradient of each argument, by name, in float32."""
    given = {name: x for name, x in inputs.items() if name not in ("gradient", "rows")}
    key = DropoutKey(jnp.uint32(123), inputs["rows"]).fold_in(3, 1)
    result, backward = jax.vjp(lambda given: function(**given, rate=rate, dropout_key=key), given)
    found = {"result": result, **backward(inputs["gradient"])[0]}
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)


def assert_equal(found, wanted):
    """Up to rounding in float32."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for name, x in wanted.items():
        if x is not None:
            limit = 1e-6 * np.abs(x).max()
            np.testing.assert_allclose(found[name], x, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    ("width", "rate", "biases"), [(256, 0.1, True), (512, 0.0, True), (768, 0.1, False), (1024, 0.3, True)]
)
def test_equals_the_plain_functions(width, rate, biases):
    """Values and all gradients, with the same dropout."""
    assert width in GPU_NORM_WIDTHS
    inputs = arrays(width, biases)
    wanted = value_and_gradients(reference, inputs, rate)
    assert_equal(value_and_gradients(kernels, inputs, rate), wanted)
    if rate > 0:
        different = value_and_gradients(reference, inputs | {"rows": jnp.array([5, 8])}, rate)
        depends = [name for name, x in wanted.items() if x is not None and name != "bias"]
        assert all(np.abs(wanted[name] - different[name]).max() > 0.01 for name in depends)


BREAKS = {
    "_columns": lambda part, shape: jax.lax.broadcasted_iota(jnp.int32, shape, 1),  # those of the first tile of a row
    "first_words": lambda place, key: kernel_rules.first_words(place + 1, key),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_is_noticed(monkeypatch, name):
    """With another function inside, the results differ."""
    inputs = arrays(512, True)
    wanted = value_and_gradients(reference, inputs, 0.1)
    monkeypatch.setattr(gpu_norm, name, BREAKS[name])
    jax.clear_caches()
    broken = value_and_gradients(kernels, inputs, 0.1)
    jax.clear_caches()
    with pytest.raises(AssertionError):
        assert_equal(broken, wanted)


def test_bfloat16_is_as_near_as_the_plain_functions():
    """Both round; the kernels have at most 1.5 times the error."""
    exact = value_and_gradients(reference, arrays(256, True), 0.1)
    rounded = arrays(256, True, "bfloat16")
    theirs, ours = (value_and_gradients(function, rounded, 0.1) for function in (reference, kernels))
    for name, x in exact.items():
        errors = [float(np.abs(one[name] - x).mean()) for one in (theirs, ours)]
        assert 0 < errors[1] < 1.5 * errors[0], (name, errors)


@pytest.mark.slow
def test_layers_call_the_kernels(monkeypatch):
    """An encoder with kernels beside one without: all positions, and the last layer at some; not where a tap reads."""
    config = ModelConfig(
        vocab_size=16,
        hidden_size=256,
        num_layers=2,
        num_heads=1,
        head_size=16,
        intermediate_size=32,
        max_positions=64,
        scan_unroll=2,
    )
    kernel_config = dataclasses.replace(config, attention="pallas_gpu")
    calls = []

    def count(*arguments, **settings):
        calls.append(settings["dropout_rate"])
        return dropout_add_norm(*arguments, **settings, interpret=True)

    interpreted = functools.partial(gpu_attention.kernel_attention, interpret=True)
    monkeypatch.setattr(gpu_attention, "kernel_attention", interpreted)
    monkeypatch.setattr(gpu_norm, "dropout_add_norm", count)
    ids = jnp.arange(64)[None] % 16
    batch = EncoderInputs(ids, jnp.zeros_like(ids), jnp.ones_like(ids), ids, jnp.zeros((1, 1), jnp.int32))
    params = parameters(config)
    key = DropoutKey(jnp.uint32(3), jnp.array([7]))

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.value_and_grad, argnums=1)
    def gradients(config, params):
        hidden = encode(config, params, batch, dropout_key=key, positions=jnp.array([[3, 9]])).hidden
        return (hidden * probe(hidden.shape)).sum()

    assert_trees_close(gradients(kernel_config, params), gradients(config, params), rtol=0, atol=1e-3)
    assert calls == [0.1] * 2  # not in the last layer, which has few positions
    traced = functools.partial(jax.eval_shape, functools.partial(encode, kernel_config))
    traced(params, batch, dropout_key=key)
    assert calls == [0.1] * 6
    jax.eval_shape(lambda: encode(kernel_config, params, batch, dropout_key=key, activations=("attention.output",)))
    assert calls == [0.1] * 8
    traced(params, batch, dropout_key=None)
    with_adapters = dataclasses.replace(kernel_config, adapter_size=4)
    shapes = jax.eval_shape(lambda: bert.init(with_adapters, jax.random.key(0), Heads(pair=True)))
    jax.eval_shape(functools.partial(encode, with_adapters), shapes, batch, dropout_key=key)
    assert calls == [0.1] * 8
