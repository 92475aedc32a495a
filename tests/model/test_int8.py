"""Products of 8-bit integers and rounded tables beside fake quantisation in NumPy (values) and torch (gradients)."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import TaskHead
from bert_jax.model import bert, families
from bert_jax.model.heads import Heads
from bert_jax.model.int8 import dequantise, int8_product, quantise, round_rows
from tests.model import toy

pytestmark = pytest.mark.usefixtures("quick_compilation")
INT8 = dataclasses.replace(toy.BERT, dense_dtype="int8")
REPLACED = TaskHead(kind="replaced", labels=("replaced",), reads="tokens", activation="gelu")


def fake_quantise(x, axes):
    """Rounded values and scale, in float32 with the scale's 17 binary digits."""
    x = np.asarray(x, np.float32)
    # numpy 2 keeps float32 in products with Python numbers.
    mantissa, exponent = np.frexp(np.abs(x).max(axes, keepdims=True) * (1 / 127))
    scale = np.ldexp(np.round(np.float64(mantissa) * 2**17) / 2**17, exponent).astype(np.float32)
    return np.round(x * (1 / scale)) * scale, scale


def error(given, expected):
    return np.linalg.norm(np.float64(given) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contracted", [1, 2])
def test_products(dtype, contracted):
    """One product of integers forward, float products of the rounded operands backward; over one axis and over two."""
    inputs, outputs = ((16,), (3, 8)) if contracted == 1 else ((2, 8), (24,))
    draw = np.random.default_rng(0)
    x, gradient = (jnp.asarray(draw.normal(size=(2, 5, *size)), dtype) for size in (inputs, outputs))
    kernel = jnp.asarray(draw.normal(0, 1e-3, (*inputs, *outputs)), jnp.float32)

    @jax.jit
    def compute(x, kernel, gradient):
        product, transpose = jax.vjp(lambda x, kernel: int8_product(x, kernel, contracted), x, kernel)
        return product, *transpose(gradient)

    program = compute.lower(x, kernel, gradient).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    # Forward, then two backward ones in the type of the gradient.
    assert sum(bool(re.search(r"xi8>, tensor<\S+xi8>\) -> tensor<\S+xi32>", line)) for line in products) == 1
    assert sum("xi8" not in line for line in products) == 2 and len(products) == 3

    def expected(x, kernel, gradient):
        x, kernel, gradient = (np.float64(one) for one in (x, kernel, gradient))
        x, kernel, gradient = x.reshape(10, 16), kernel.reshape(16, 24), gradient.reshape(10, 24)
        return [x @ kernel, gradient @ kernel.T, x.T @ gradient]

    exact = expected(x, kernel, gradient)
    rounded = fake_quantise(x, tuple(range(2, 2 + contracted)))[0], fake_quantise(kernel, tuple(range(contracted)))[0]
    close = expected(*rounded, gradient)
    tolerance = 1e-6 if dtype == "float32" else 0.005
    for given, like, is_close_to, differs_from in zip(
        compute(x, kernel, gradient), (gradient, x, kernel), close, exact, strict=True
    ):
        assert given.dtype == like.dtype and given.shape == like.shape
        assert error(given.reshape(is_close_to.shape), is_close_to) < tolerance
        assert 0.001 < error(given.reshape(differs_from.shape), differs_from) < 0.02


def test_sums_of_many_large_products():
    """The integers add up in int32: the sum, 49,532,000, would wrap around in fewer bits."""
    ones = jnp.ones((1, 3072), jnp.float32)
    np.testing.assert_allclose(int8_product(ones, ones.T, 1), 3072, rtol=1e-4)


@pytest.mark.parametrize(
    ("values", "integers", "scale"),
    [
        ([0.0, -0.0], [0, 0], 1),
        ([127.0, -126.5, -0.5, 1.5], [127, -126, 0, 2], 1),  # half to even
        ([-254.0, 1.0, 3.0], [-127, 0, 2], 2),
        ([1e-37, 0.0], [0, 0], 1),
        ([np.inf, 1.0], None, np.inf),
        ([np.nan, 1.0], None, np.nan),
    ],
)
def test_scales(values, integers, scale):
    given, given_scale = quantise(jnp.asarray(values, jnp.float32), (0,))
    np.testing.assert_equal(float(given_scale[0]), scale)
    if integers is None:
        assert np.isnan(dequantise(given, given_scale)).any()
    else:
        np.testing.assert_array_equal(given, integers)


def test_rounding_again_changes_no_bit():
    """Of 20,000 vectors with scales of all magnitudes; the largest element always is 127 or -127."""
    draw = np.random.default_rng(0)
    x = np.float32(draw.normal(size=(20_000, 9)) * 10.0 ** draw.uniform(-30, 30, (20_000, 1)))
    integers, scale = quantise(jnp.asarray(x), (1,))
    rounded = dequantise(integers, scale)
    again, again_scale = quantise(rounded, (1,))
    np.testing.assert_array_equal(again, integers)
    np.testing.assert_array_equal(again_scale, scale)
    np.testing.assert_array_equal(np.float64(rounded), np.float64(integers) * np.float64(scale))
    assert (np.abs(integers).max(1) == 127).all() and np.abs(rounded - x).max(1)[3] > 0
    expected, expected_scale = fake_quantise(x, (1,))
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(rounded, expected)


def test_gradients_of_two_layers_beside_torch():
    """x -> gelu(x U) D of a rounded table's rows, with a rounding whose gradient autograd passes on."""
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(0)
    table, up, down = (np.float32(draw.normal(size=shape)) for shape in ((7, 16), (16, 40), (40, 16)))
    ids, weights = np.array([[1, 3, 3], [6, 0, 2]]), np.float32(draw.normal(size=(2, 3, 16)))

    def loss(table, up, down):
        hidden = jax.nn.gelu(int8_product(round_rows(table[ids]), up, 1), approximate=False)
        return (int8_product(hidden, down, 1) * weights).sum()

    def straight_through(x, axis):
        return x + (torch.tensor(fake_quantise(x.detach().numpy(), (axis,))[0]) - x).detach()

    tensors = [torch.tensor(one, requires_grad=True) for one in (table, up, down)]
    hidden = straight_through(straight_through(tensors[0][ids], -1), -1) @ straight_through(tensors[1], 0)
    output = straight_through(torch.nn.functional.gelu(hidden), -1) @ straight_through(tensors[2], 0)
    total = (output * torch.tensor(weights)).sum()
    total.backward()
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(*map(jnp.asarray, (table, up, down)))
    np.testing.assert_allclose(value, total.item(), rtol=1e-5)
    for given, tensor in zip(gradients, tensors, strict=True):
        assert error(given, tensor.grad.double().numpy()) < 1e-5


@pytest.mark.slow
def test_products_beside_qwix(monkeypatch):
    """Its products have the same integers; its scales map the largest element to 127.5, so ours are given to it."""
    pytest.importorskip("qwix")
    from qwix._src.core import dot_general_qt, numerics

    draw = np.random.default_rng(0)
    x, gradient = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((10, 4, 8), (10, 24)))
    kernel = jnp.asarray(draw.normal(0, 0.02, (4, 8, 24)), jnp.float32)
    config = dot_general_qt.DotGeneralQtConfig(lhs_qtype=jnp.int8, rhs_qtype=jnp.int8)

    def other(x, kernel):
        return dot_general_qt.dot_general_qt(x, kernel, (((1, 2), (0, 1)), ((), ())), config)

    def compute(product):
        value, transpose = jax.vjp(product, x, kernel)
        return [value, *transpose(gradient)]

    ours, with_its_scales = compute(lambda x, kernel: int8_product(x, kernel, 2)), compute(other)
    monkeypatch.setattr(numerics, "get_symmetric_bound", lambda qtype: 127.0)
    for given, different, expected in zip(ours, with_its_scales, compute(other), strict=True):
        assert error(given, np.float64(expected)) < 1e-5 < 1e-3 < error(different, np.float64(expected))


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        (toy.BERT, {"qkv": (1,), "attention_out": (1, 2), "up": (1,), "down": (1,)}),
        (families.modern(2, 64, 96, max_positions=32, vocab_size=61), {"gate": (1,), "up": (1,)}),
        (
            dataclasses.replace(toy.BERT, adapter_size=4),
            {"attention_adapter/down": (1,), "feed_forward_adapter/up": (1,)},
        ),
    ],
    ids=["bert", "modern", "adapters"],
)
def test_what_is_rounded(config, kernels):
    """Every hidden dense layer and every table; not the output layers of heads, biases and norms."""
    axes = bert.int8_axes(config, Heads(pair=True, task=REPLACED))
    shapes = {path: leaf.ndim for path, leaf in _named(bert.shapes(config, Heads(pair=True, task=REPLACED))).items()}
    matrices = {path for path, ndim in shapes.items() if ndim > 1 and not path.endswith(("/bias", "/scale"))}
    assert set(axes) == matrices - {"pair/dense/kernel", "task/output/kernel"}
    assert all(axes[f"encoder/layers/{name}/kernel"] == along for name, along in kernels.items())
    assert axes["encoder/embeddings/word"] == (1,) and axes["encoder/pooler/kernel"] == (0,)
    factorised = bert.int8_axes(dataclasses.replace(toy.BERT, embedding_size=8), Heads())
    assert factorised["encoder/embeddings/projection/kernel"] == (0,)


def test_a_model_computes_with_rounded_parameters():
    """Rounding them beforehand changes nothing, and each rounding alone changes the output."""
    params, batch = toy.parameters(toy.BERT), toy.inputs()
    axes = bert.int8_axes(toy.BERT, Heads(pair=True))

    def rounded(chosen):
        named = _named(params)
        new = {path: dequantise(*quantise(x, axes[path])) if path in chosen else x for path, x in named.items()}
        return jax.tree.unflatten(jax.tree.structure(params), new.values())

    outputs = [toy.encode(INT8, one, batch) for one in (params, rounded(axes))]
    np.testing.assert_array_equal(outputs[1].hidden, outputs[0].hidden)
    np.testing.assert_array_equal(outputs[1].pooled, outputs[0].pooled)
    exact = toy.encode(toy.BERT, params, batch)
    assert 0.001 < error(outputs[0].hidden, exact.hidden) < 0.1
    for path in axes:
        if not path.startswith("mlm"):
            assert error(toy.encode(toy.BERT, rounded([path]), batch).pooled, exact.pooled) > 1e-5, path
    model = bert.model_from_params(INT8, Heads(pair=True), params)
    np.testing.assert_array_equal(
        model.encoder.embeddings.decoder_table(), round_rows(params["encoder"]["embeddings"]["word"])
    )


def test_a_row_does_not_depend_on_the_others():
    """Scales of activations are those of a token: with one scale for the batch, its other rows would change a row."""
    params, batch = toy.parameters(INT8), toy.inputs()
    alone = toy.encode(INT8, params, jax.tree.map(lambda x: x[:1], batch)).hidden[0]
    np.testing.assert_allclose(toy.encode(INT8, params, batch).hidden[0], alone, rtol=0, atol=1e-5)


def _named(tree):
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
