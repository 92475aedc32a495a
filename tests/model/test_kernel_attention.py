"""The Pallas kernels of attention, interpreted, beside the reference attention; and lowered for GPUs and TPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import MeshConfig, presets
from bert_jax.config import replace as replace_config
from bert_jax.model import attention, encoder, gpu_attention, tpu_attention
from bert_jax.model.attention import attend
from bert_jax.model.dropout import DropoutKey
from bert_jax.planning import aot_compile
from bert_jax.training.sharding import abstract_mesh
from tests.jaxprs import primitives

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS, LENGTH, HEADS, SIZE = 2, 384, 2, 16
KEY = DropoutKey(jnp.uint32(123), jnp.array([5, 9]))
# Packed examples that end within blocks and at their edges, a block of padding alone, and ids that are not in order.
SEGMENTS = np.zeros((ROWS, LENGTH), np.int32)
SEGMENTS[0, :70], SEGMENTS[0, 70:192], SEGMENTS[0, 192:350] = 3, 1, 2
SEGMENTS[1, :100] = 1
KERNELS = {"pallas_gpu": gpu_attention.kernel_attention, "pallas_tpu": tpu_attention.kernel_attention}
of_both = pytest.mark.parametrize("name", KERNELS)
REAL = jnp.asarray(SEGMENTS > 0)[:, :, None, None]


@functools.cache
def arrays(dtype: str) -> list[jax.Array]:
    """Query, key, value and a gradient of the context."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(ROWS, LENGTH, HEADS, SIZE)), dtype) for _ in range(4)]


def reference(query, key, value, **options):
    """The reference attention, with contexts of 0 for padding."""
    return jnp.where(REAL, attend("reference", query, key, value, jnp.asarray(SEGMENTS), **options), 0)


def kernels(name, query, key, value, **options):
    """The kernels of an implementation, interpreted."""
    projected = jnp.stack((query, key, value), axis=2).reshape(ROWS, LENGTH, -1)
    return KERNELS[name](projected, jnp.asarray(SEGMENTS), num_heads=HEADS, interpret=True, **options)


INTERPRETED = {name: functools.partial(kernels, name) for name in KERNELS}


@functools.partial(jax.jit, static_argnums=0, static_argnames=("before", "after", "dropout_rate", "dtype"))
def value_and_gradients(function, inputs, *, dtype, **options):
    """The context vectors and the gradients of query, key and value, in float32."""
    *inputs, gradient = (x.astype(dtype) for x in inputs)
    context, backward = jax.vjp(lambda *x: function(*x, dropout_key=KEY, **options), *inputs)
    return [x.astype(jnp.float32) for x in (context, *backward(gradient))]


@pytest.mark.parametrize(("before", "after", "rate"), [(None, None, 0.0), (20, 3, 0.3), (None, 0, 0.1)])
@of_both
def test_equals_the_reference(name, before, after, rate):
    """Values and gradients, with packed examples, padding, windows and the same dropout."""
    options = {"before": before, "after": after, "dropout_rate": rate, "dtype": "float32"}
    expected = value_and_gradients(reference, arrays("float32"), **options)
    for actual, wanted in zip(
        value_and_gradients(INTERPRETED[name], arrays("float32"), **options), expected, strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    # The sides differ if an option does.
    for other in ({"dropout_rate": rate + 0.05}, {"before": 7}, {"after": 1}):
        different = value_and_gradients(reference, arrays("float32"), **options | other)
        assert all(np.abs(x - y).max() > 0.05 for x, y in zip(different, expected, strict=True))


def test_heads_of_a_tpu_in_several_steps():
    """32 heads of 16, of which a step of the grid reads 8 of each part of the projection."""
    assert tpu_attention._heads_of_a_step(32, 16, 128 * 128, 128) == 8
    rng, segment_ids = np.random.default_rng(1), jnp.asarray(SEGMENTS[:, :128])
    projected = jnp.asarray(rng.normal(size=(ROWS, 128, 3 * 32 * 16)), jnp.float32)

    def separate(projected, segment_ids, num_heads, **options):
        parts = jnp.moveaxis(projected.reshape(ROWS, 128, 3, num_heads, -1), 2, 0)
        return attend("reference", *parts, segment_ids, **options)

    @functools.partial(jax.jit, static_argnums=0)
    def results(function, projected):
        options = {"num_heads": 32, "before": None, "after": None, "dropout_rate": 0.1, "dropout_key": KEY}
        context, backward = jax.vjp(
            lambda x: jnp.where(REAL[:, :128], function(x, segment_ids, **options), 0), projected
        )
        return context, backward(jnp.cos(context))[0]

    in_place = functools.partial(tpu_attention.kernel_attention, interpret=True)
    for found, wanted in zip(results(in_place, projected), results(separate, projected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(("name", "rate"), [("pallas_gpu", 0.2), ("pallas_tpu", 0.0)])
def test_the_bias_of_the_projection_and_its_gradient(name, rate):
    """The kernels add up its gradient."""
    projected = jnp.stack(arrays("float32")[:3], axis=2).reshape(ROWS, LENGTH, -1)
    bias = jnp.sin(jnp.arange(projected.shape[-1], dtype=jnp.float32))
    options = {"num_heads": HEADS, "before": None, "after": None, "dropout_rate": rate, "dropout_key": KEY}
    kernel = functools.partial(KERNELS[name], interpret=True, **options)

    def plain(projected, bias):
        query, key, value = jnp.moveaxis((projected + bias[None, None]).reshape(ROWS, LENGTH, 3, HEADS, SIZE), 2, 0)
        return reference(query, key, value, **{name: x for name, x in options.items() if name != "num_heads"})

    def results(function):
        context, backward = jax.vjp(function, projected, bias)
        return [context, *backward(jnp.cos(context))]

    found = jax.jit(lambda: results(lambda x, y: kernel(x, jnp.asarray(SEGMENTS), bias=y)))()
    for actual, wanted in zip(found, jax.jit(lambda: results(plain))(), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def test_a_tpu_writes_gradients_of_query_key_and_value_in_place(capsys):
    """Nothing puts them together. `model.remat dots` saves the context, so that it is not computed again."""
    projected, weights = jnp.ones((ROWS, LENGTH, 3 * 8 * 16)), jnp.ones((8, 16, 4))
    settings = {"num_heads": 8, "before": None, "after": None, "dropout_rate": 0.1, "dropout_key": KEY}

    def loss(projected):
        context = tpu_attention.kernel_attention(projected, jnp.asarray(SEGMENTS), **settings)
        return jnp.sin(jnp.tensordot(context, weights, axes=2)).sum()

    names = primitives(jax.grad(loss), projected)
    assert names["concatenate"] == names["pad"] == 0 and names["dma_start"] == 3
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=encoder.REMAT_POLICIES["dots"]), projected)
    assert f"f32[{ROWS},{LENGTH},128] named 'saved'" in capsys.readouterr().out


@of_both
def test_bfloat16_is_as_near_as_the_reference(name):
    """Both round; the kernels to at most 1.5 times the error of the reference."""
    options = {"before": None, "after": None, "dropout_rate": 0.1}
    exact = value_and_gradients(reference, arrays("float32"), dtype="float32", **options)
    errors = []
    for function in (reference, INTERPRETED[name]):
        rounded = value_and_gradients(function, arrays("float32"), dtype="bfloat16", **options)
        errors.append([float(np.abs(x - y).mean()) for x, y in zip(rounded, exact, strict=True)])
    assert all(0 < ours < 1.5 * theirs for theirs, ours in zip(*errors, strict=True))


@of_both
def test_finite_differences_with_dropout(name):
    """In a random direction of all three inputs."""
    *inputs, gradient = arrays("float32")
    options = {"before": None, "after": None, "dropout_rate": 0.1, "dropout_key": KEY}
    loss = jax.jit(lambda *x: (kernels(name, *x, **options) * gradient).sum())
    directions = [jnp.asarray(np.random.default_rng(i).normal(size=x.shape), x.dtype) for i, x in enumerate(inputs)]
    slope = sum((d * g).sum() for d, g in zip(directions, jax.grad(loss, (0, 1, 2))(*inputs), strict=True))
    step = 1e-3
    ends = [float(loss(*(x + sign * step * d for x, d in zip(inputs, directions, strict=True)))) for sign in (1, -1)]
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-3) and abs(slope) > 10


def test_blocks_that_are_masked_are_skipped():
    """Ranges of key blocks are exact here; with a window, their number does not grow with the length."""
    keys, queries = gpu_attention._block_ranges(jnp.asarray(SEGMENTS), None, None)
    none = [6, 0]
    assert keys.tolist() == [[[0, 2], [0, 3], [1, 3], *[[3, 6]] * 3], [[0, 2], [0, 2], *[none] * 4]]
    assert queries.tolist() == keys.tolist()
    keys, queries = gpu_attention._block_ranges(jnp.asarray(SEGMENTS), None, 0)
    assert keys.tolist()[0] == [[0, 1], [0, 2], [1, 3], [3, 4], [3, 5], [3, 6]]
    assert queries.tolist()[0] == [[0, 2], [1, 3], [2, 3], [3, 6], [4, 6], [5, 6]]
    for length in (1024, 2048):
        first, end = np.asarray(gpu_attention._block_ranges(jnp.ones((1, length), jnp.int32), 64, 64)[0][0]).T
        assert (end - first).max() == 3
        assert tpu_attention._block_sizes(length, 64, 64) == (256, 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "platform", "call", "count"),
    [("pallas_gpu", "cuda", "@__gpu$xla.gpu.triton", 10), ("pallas_tpu", "tpu", "@tpu_custom_call", 4)],
)
def test_the_train_step_has_the_kernels(monkeypatch, name, platform, call, count):
    """Lowered: the kernels of two layer bodies, scanned and last; without attention dropout, too. Not in evaluation.

    On GPUs, the scanned body has two kernels of norms in each direction.
    """
    config = presets.load_config("bert_small")
    phase = dataclasses.replace(config.phases[0], seq_len=128, batch_size=8, start_batch_size=None, ramp_steps=0)
    for rate in (0.1, 0.0):
        one = replace_config(config, model={"attention": name, "attention_dropout": rate}, phases=(phase,))
        traced = aot_compile.trace_step(one, 0, abstract_mesh(MeshConfig(), 1), 1)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count(f"stablehlo.custom_call {call}") == count
    monkeypatch.setattr(attention, "_kernel_attention", None)
    *inputs, _ = arrays("float32")
    evaluated = attend(name, *inputs, jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(jnp.where(REAL, evaluated, 0), reference(*inputs), atol=5e-6)
