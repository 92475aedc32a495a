"""Products of 8-bit floats beside the same products of the rounded operands in float64."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.float8 import BACKWARD, FORWARD, float8_product, quantise
from tests.model import toy

pytestmark = pytest.mark.usefixtures("quick_compilation")


def rounded(x, dtype):
    values, scale = quantise(x, dtype)
    assert np.log2(float(scale)) % 1 == 0
    return np.float64(values.astype(jnp.float32)) * float(scale)


def error(given, expected):
    return np.linalg.norm(np.float64(given) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contracted", [1, 2])
def test_products(dtype, contracted):
    """Forward and backward, over one axis and over two, with gradients too small for 8 bits without a scale."""
    inputs, outputs = ((16,), (3, 8)) if contracted == 1 else ((2, 8), (24,))
    draw = np.random.default_rng(0)
    x, gradient = (jnp.asarray(draw.normal(size=(2, 5, *size)), dtype) for size in (inputs, outputs))
    kernel, gradient = jnp.asarray(draw.normal(0, 1e-3, (*inputs, *outputs)), jnp.float32), gradient * 1e-7

    @jax.jit
    def compute(x, kernel, gradient):
        product, transpose = jax.vjp(lambda x, kernel: float8_product(x, kernel, contracted), x, kernel)
        return product, *transpose(gradient)

    products = [line for line in compute.lower(x, kernel, gradient).as_text().splitlines() if "dot_general" in line]
    operands = [re.findall(r"xf8(E\w+)>", line) for line in products]
    assert sorted(map(sorted, operands)) == [["E4M3FN", "E4M3FN"], ["E4M3FN", "E5M2"], ["E4M3FN", "E5M2"]]
    product, x_gradient, kernel_gradient = compute(x, kernel, gradient)

    def expected(x, kernel, gradient):
        x, kernel, gradient = x.reshape(10, 16), kernel.reshape(16, 24), gradient.reshape(10, 24)
        return [(x @ kernel), gradient @ kernel.T, x.T @ gradient]

    exact = expected(*(np.float64(one) for one in (x, kernel, gradient)))
    close = expected(rounded(x, FORWARD), rounded(kernel, FORWARD), rounded(gradient, BACKWARD))
    tolerance = 1e-6 if dtype == "float32" else 0.003
    for given, like, is_close_to, differs_from in zip(
        (product, x_gradient, kernel_gradient), (product, x, kernel), close, exact, strict=True
    ):
        assert given.dtype == like.dtype and given.shape == like.shape
        assert error(given.reshape(is_close_to.shape), is_close_to) < tolerance
        assert 0.01 < error(given.reshape(differs_from.shape), differs_from) < 0.15


@pytest.mark.parametrize(
    ("values", "expected", "scale"),
    [
        ([0.0, -0.0], [0, 0], 1),
        ([448.0, -17.0], [448, -16], 1),  # 16 and 18 are neighbours
        ([448.5, 1.0], [224, 0.5], 2),
        ([-224.0, 1.0], [-448, 2], 0.5),
        ([3e38, 1e37], [224, 7.5], 2.0**120),
        ([np.inf, 1.0], [np.nan, 0], np.inf),
        ([np.nan, 1.0], [np.nan, np.nan], np.nan),
    ],
)
def test_scales(values, expected, scale):
    given, given_scale = quantise(jnp.asarray(values, jnp.float32), FORWARD)
    np.testing.assert_equal(float(given_scale), scale)
    np.testing.assert_allclose(np.float64(given.astype(jnp.float32)), expected, rtol=0.07)


def test_only_the_layers_dense_products_change():
    """The encoder differs by the rounding of its layers; embeddings, pooler and heads are as without the setting."""
    config = dataclasses.replace(toy.BERT, dense_dtype="float8")
    params, inputs = toy.parameters(toy.BERT), toy.inputs()
    exact, given = (toy.encode(one, params, inputs, hidden_states=True) for one in (toy.BERT, config))
    np.testing.assert_array_equal(given.hidden_states[0], exact.hidden_states[0])
    for layer in range(1, 4):
        assert 0.002 < error(given.hidden_states[layer], np.float64(exact.hidden_states[layer])) < 0.15
