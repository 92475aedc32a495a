"""Small functions against numpy and scipy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special, stats

from bert_jax.config import ModelConfig
from bert_jax.model.embeddings import rows_of_few
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.heads import MlmHead, decode, decode_label_scores, label_log_likelihoods
from bert_jax.model.layers import ACTIVATIONS, Dense, gather_positions, normal_cdf, truncated_normal
from bert_jax.model.norms import LayerNorm
from tests.jaxprs import primitives

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = np.concatenate([np.linspace(-9, 9, 1801), [0.0, -0.0, 1e-30, 30.0, -30.0]])


def test_gelu_and_its_derivatives():
    """The derivative is written out by hand: value, gradient, forward derivative and second derivative."""
    gelu, x = ACTIVATIONS["gelu"], jnp.asarray(X, jnp.float32)
    density = stats.norm.pdf(X)
    first = special.ndtr(X) + X * density
    second = density * (2 - X**2)
    np.testing.assert_allclose(gelu(x), X * special.ndtr(X), rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(gelu))(x), first, rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(jax.jvp(gelu, (x,), (2 * jnp.ones_like(x),))[1], 2 * first, rtol=1e-5, atol=6e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(gelu)))(x), second, rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_keep_their_type(name):
    function = ACTIVATIONS[name]
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.linspace(-3, 3, 50, dtype=dtype)
        y, gradient = jax.vmap(jax.value_and_grad(function))(x)
        assert y.dtype == gradient.dtype == dtype
        expected = {"relu": np.maximum(x, 0)}.get(name, np.float64(x) * special.ndtr(np.float64(x)))
        np.testing.assert_allclose(np.float64(y), expected, atol=0.02)


def test_gradients_of_biases_are_summed_in_float32():
    """Over 32,768 rows in bfloat16; a sum in bfloat16 is wrong by more than the kernel's gradient is."""
    dense, rows = Dense((8,), (3, 4), truncated_normal(0.02), jax.random.key(0)), (256, 128)
    graph, params = nnx.split(dense)
    x, weights = (jax.random.normal(jax.random.key(i), (*rows, *size)) for i, size in ((1, (8,)), (2, (3, 4))))

    def loss(params, x, weights):
        return (nnx.merge(graph, params)(x) * weights.astype(x.dtype)).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss))
    exact, low = (nnx.to_pure_dict(gradient(params, x.astype(kind), weights)) for kind in ("float32", "bfloat16"))
    error = {name: np.linalg.norm(low[name] - exact[name]) / np.linalg.norm(exact[name]) for name in exact}
    assert 1e-5 < error["bias"] <= error["kernel"] < 0.004


def test_gelu_of_gpus_is_gelu():
    """Values and derivatives of the form with one exponential, which GPUs have, beside float64."""
    x = jnp.asarray(X, jnp.float32)
    np.testing.assert_allclose(x * normal_cdf(x), X * special.ndtr(X), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(normal_cdf))(x), stats.norm.pdf(X), rtol=1e-5, atol=1e-6)
    platforms = {
        name: jax.jit(ACTIVATIONS["gelu"]).trace(x).lower(lowering_platforms=(name,)) for name in ("cpu", "cuda")
    }
    assert {name: "chlo.erf" in lowered.as_text() for name, lowered in platforms.items()} == {
        "cpu": True,
        "cuda": False,
    }


def test_derivative_of_gelu_tanh():
    """Written out, beside the formula in float64 and jax's own derivative."""
    x, factor = jnp.asarray(X, jnp.float32), np.sqrt(2 / np.pi)
    tanh = np.tanh(factor * (X + 0.044715 * X**3))
    exact = 0.5 * (1 + tanh) + 0.5 * X * (1 - tanh) * (1 + tanh) * factor * (1 + 3 * 0.044715 * X**2)
    plain = jax.vmap(jax.grad(lambda x: jax.nn.gelu(x, approximate=True)))
    written_out = jax.vmap(jax.grad(ACTIVATIONS["gelu_tanh"]))
    assert [primitives(f, x)["optimization_barrier"] for f in (plain, written_out)] == [0, 1]
    for derivative in (plain, written_out):
        np.testing.assert_allclose(derivative(x), exact, rtol=1e-5, atol=1e-5)  # of tanh near -1, in float32


def test_gelu_tanh_is_not_gelu():
    difference = np.abs(ACTIVATIONS["gelu"](jnp.asarray(X)) - ACTIVATIONS["gelu_tanh"](jnp.asarray(X))).max()
    assert 1e-4 < difference < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm(dtype):
    norm = LayerNorm(64, 1e-12)
    rng = np.random.default_rng(0)
    norm.scale[...], norm.bias[...] = (jnp.asarray(rng.normal(size=64), jnp.float32) for _ in range(2))
    x = jnp.asarray(50 + rng.normal(size=(2, 3, 64)), dtype)
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    exact = exact * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])
    y = norm(x)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(np.float64(y), exact, atol=1e-4 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_of_layer_norm(has_bias):
    """Beside those that jax derives from the plain formula; only those written out have a barrier, for GPUs."""
    rng = np.random.default_rng(2)
    x, weights = (jnp.asarray(rng.normal(size=(3, 5, 64)), jnp.float32) for _ in range(2))
    norm = LayerNorm(64, 1e-12, "all" if has_bias else "none")
    graph, params = nnx.split(norm)
    params = jax.tree.map(lambda y: y + jnp.asarray(rng.normal(size=y.shape), jnp.float32), params)

    def plain(params, x):
        centred = x - x.mean(-1, keepdims=True)
        y = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True)) * params["scale"][...][None, None]
        return ((y + (params["bias"][...][None, None] if has_bias else 0.0)) * weights).sum()

    def written_out(params, x):
        return (nnx.merge(graph, params)(x) * weights).sum()

    one, two = (jax.value_and_grad(function, (0, 1)) for function in (plain, written_out))
    barriers = [primitives(function, params, x)["optimization_barrier"] for function in (one, two)]
    assert barriers == [0, 1]
    for expected, found in zip(*(jax.tree.leaves(jax.jit(f)(params, x)) for f in (one, two)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * float(np.abs(expected).max()))


@pytest.mark.parametrize("merges_axes", [False, True])
def test_dense_takes_several_axes_in_and_out(merges_axes):
    dense = Dense((3, 4), (2, 5), truncated_normal(0.02), jax.random.key(0), merges_axes=merges_axes)
    dense.bias[...] = jnp.arange(10.0).reshape(2, 5)
    x = np.random.default_rng(0).normal(size=(6, 7, 3, 4)).astype(np.float32)
    expected = np.einsum("abij,ijkl->abkl", x, dense.kernel[...]) + np.arange(10.0).reshape(2, 5)
    np.testing.assert_allclose(dense(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)
    assert dense(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_initial_weights_are_truncated_at_two_deviations():
    """Kolmogorov-Smirnov at alpha 1e-4 against the truncated normal distribution."""
    drawn = np.asarray(truncated_normal(0.02)(jax.random.key(0), (100, 100))).ravel()
    assert np.abs(drawn).max() <= 0.04
    assert stats.kstest(drawn / 0.02, stats.truncnorm(-2, 2).cdf).pvalue > 1e-4
    assert stats.kstest(drawn / 0.02, stats.norm.cdf).pvalue < 1e-4


def test_scores_of_labels_and_gathering():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 30, (2, 3, 11)), rng.integers(0, 11, (2, 3))
    expected = np.take_along_axis(logits - special.logsumexp(logits, -1, keepdims=True), labels[..., None], -1)[..., 0]
    labels[0] = logits[0].argmax(-1)
    expected[0] = logits[0].max(-1) - special.logsumexp(logits[0], -1)
    likelihood, correct = label_log_likelihoods(jnp.asarray(logits, jnp.float32), jnp.asarray(labels))
    np.testing.assert_allclose(likelihood, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(correct, logits.argmax(-1) == labels)
    assert correct[0].all() and not correct[1].all()
    hidden, positions = rng.normal(size=(2, 5, 4)).astype(np.float32), np.array([[4, 0, 0], [1, 3, 2]])
    gathered = gather_positions(jnp.asarray(hidden), jnp.asarray(positions))
    np.testing.assert_array_equal(gathered, hidden[np.arange(2)[:, None], positions])


@pytest.mark.parametrize(("kind", "num_classes"), [("float32", 11), ("float32", 16), ("bfloat16", 16)])
def test_scores_of_labels_without_the_gradient_of_logits(kind, num_classes):
    """`decode_label_scores` beside `decode` and `label_log_likelihoods`, whose backward pass scatters; added classes
    change nothing."""
    rng = np.random.default_rng(1)
    hidden, table, bias, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 8), (11, 8), (11,), (2, 3))
    )
    labels = jnp.asarray(rng.integers(0, 11, (2, 3)))

    def plain(hidden, table, bias):
        logits = decode(hidden, table, bias)
        likelihood, correct = label_log_likelihoods(logits, labels)
        return ((likelihood + 0.1 * jax.nn.logsumexp(logits, -1) ** 2) * weights).sum(), correct

    def fused(hidden, table, bias):
        likelihood, correct, log_partition = decode_label_scores(hidden, table, bias, labels, num_classes)
        return ((likelihood + 0.1 * log_partition**2) * weights).sum(), correct

    one, two = (jax.value_and_grad(function, (0, 1, 2), has_aux=True) for function in (plain, fused))
    arguments = hidden.astype(kind), table, bias
    assert primitives(one, *arguments)["scatter-add"] == 1 and primitives(two, *arguments)["scatter-add"] == 0
    for expected, found in zip(*(jax.tree.leaves(jax.jit(one_)(*arguments)) for one_ in (one, two)), strict=True):
        assert expected.dtype == found.dtype
        expected, found = (np.asarray(x, np.float32) for x in (expected, found))
        tolerance = 1e-6 if found.dtype == kind else 2**-7
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_rows_of_a_table_with_few():
    """Values and gradients of a product with one-hot rows, without a scatter."""
    rng = np.random.default_rng(2)
    ids, table = jnp.asarray(rng.integers(0, 3, (2, 7))), jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(2, 7, 8)), jnp.float32)
    one, two = (
        jax.value_and_grad(lambda table, function=function: (function(table) * weights).sum())
        for function in (lambda table: jax.nn.one_hot(ids, 3) @ table, lambda table: rows_of_few(table, ids))
    )
    np.testing.assert_array_equal(rows_of_few(table, ids), np.asarray(table)[np.asarray(ids)])
    assert "scatter-add" not in primitives(two, table)
    for expected, found in zip(one(table), two(table), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_classes_are_added_for_kernels_of_gpus():
    """Up to a multiple of 128; elsewhere the table would be copied for nothing."""
    config = ModelConfig(vocab_size=130, hidden_size=16, num_heads=1, intermediate_size=16, num_layers=1)
    for attention, expected in (("pallas_gpu", 256), ("reference", 130), ("pallas_tpu", 130)):
        one = dataclasses.replace(config, attention=attention, num_heads=8, head_size=16)
        head = MlmHead(one, jax.random.key(0))
        hidden, labels = jnp.ones((1, 2, 16)), jnp.ones((1, 2), jnp.int32)
        program = str(jax.make_jaxpr(head.label_scores)(hidden, jnp.ones((130, 16)), labels))
        assert f"f32[1,2,{expected}]" in program


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_decoder_has_the_gradients_of_its_formula(kind):
    """Written out in float32, from factors in the compute type: the rounding of bfloat16 is 2 ** -8."""
    rng = np.random.default_rng(0)
    hidden, table, bias, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 8), (11, 8), (11,), (2, 3, 11))
    )

    def plain(hidden, table, bias):
        table = table.astype(hidden.dtype).astype(jnp.float32)
        logits = jnp.matmul(hidden.astype(jnp.float32), table.T, precision="highest") + bias[None, None]
        return (jnp.sin(logits) * weights).sum()

    def sums(hidden, table, bias):
        logits = decode(hidden, table, bias)
        assert logits.dtype == jnp.float32
        return (jnp.sin(logits) * weights).sum()

    arguments = hidden.astype(kind), table, bias
    expected, found = (jax.value_and_grad(function, (0, 1, 2))(*arguments) for function in (plain, sums))
    tolerance = {"float32": 1e-5, "bfloat16": 2**-6}[kind]
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert one.dtype == other.dtype
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(one).max())


def test_flops_of_bert_base():
    """Counted by hand for 8 rows of 128 with 19 predictions: 2 per multiply-add, backward twice the forward."""
    per_token = 12 * (2 * (4 * 768 * 768 + 2 * 768 * 3072) + 4 * 128 * 768)
    head = 2 * (768 * 768 + 768 * 30522)
    assert pretraining_flops(ModelConfig(), 8, 128, 19) == 3 * 8 * (128 * per_token + 19 * head)
    local = ModelConfig(attention_window=10, global_every=3, num_layers=3)
    everywhere = ModelConfig(num_layers=3)
    saved = pretraining_flops(everywhere, 1, 128, 0) - pretraining_flops(local, 1, 128, 0)
    assert saved == 3 * 128 * 2 * 4 * 768 * (128 - 21)


def test_flops_of_gated_and_of_factorised_models():
    """A gate adds one product of hidden x intermediate; narrow tables add a projection and reduce the head."""
    gated = pretraining_flops(ModelConfig(feed_forward="gated"), 8, 128, 19)
    assert gated - pretraining_flops(ModelConfig(), 8, 128, 19) == 3 * 8 * 128 * 12 * 2 * 768 * 3072
    narrow = pretraining_flops(ModelConfig(embedding_size=128), 8, 128, 19)
    head = 2 * 128 * (768 + 30522) - 2 * 768 * (768 + 30522)
    assert narrow - pretraining_flops(ModelConfig(), 8, 128, 19) == 3 * 8 * (128 * 2 * 128 * 768 + 19 * head)
