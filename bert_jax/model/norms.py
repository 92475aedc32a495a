"""Normalisation of a layer's vectors: LayerNorm, and its scale and bias alone."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.array_types import Array, Float
from bert_jax.config import ModelConfig
from bert_jax.model.layers import SAVED, Biases, barrier_on_gpus, make_bias


class LayerNorm(nnx.Module):
    """Normalise the last axis; statistics are float32 for every type of x (Ba et al. 2016)."""

    def __init__(self, size: int, epsilon: float, biases: Biases = "all"):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = make_bias((size,), biases)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Normalise; the result has the type of x."""
        return _normalise(x, self.scale[...], None if self.bias is None else self.bias[...], self.epsilon)


class NoNorm(nnx.Module):
    """The scale and bias of a LayerNorm without statistics; float32 inside (Sun et al. 2020, section 3.4)."""

    def __init__(self, size: int, biases: Biases = "all"):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = make_bias((size,), biases)

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Scale and shift; the result has the type of x."""
        last_axis = (*(1,) * (x.ndim - 1), -1)
        scaled = x.astype(jnp.float32) * self.scale[...].reshape(last_axis)
        if self.bias is not None:
            scaled += self.bias[...].reshape(last_axis)
        return scaled.astype(x.dtype)


def make_norm(config: ModelConfig, size: int) -> LayerNorm | NoNorm:
    """The norm of embeddings and layers, of vectors of this size."""
    if config.norm == "none":
        return NoNorm(size, config.biases)
    return LayerNorm(size, config.norm_epsilon, config.biases)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalise(
    x: Float[Array, "*rows H"], scale: Float[Array, " H"], bias: Float[Array, " H"] | None, epsilon: float
) -> Float[Array, "*rows H"]:
    """LayerNorm. Its backward pass is written out, so that it stores x in its type and two numbers per row, instead of
    two arrays of the size of x in float32.
    """
    return _normalise_forward(x, scale, bias, epsilon)[0]


def _normalise_forward(x, scale, bias, epsilon):
    x_float32 = x.astype(jnp.float32)
    mean = checkpoint_name(x_float32.mean(-1, keepdims=True), SAVED)
    centred = x_float32 - mean
    variance = jnp.square(centred).mean(-1, keepdims=True)
    inverse_deviation = checkpoint_name(jax.lax.rsqrt(variance + epsilon), SAVED)
    last_axis = (*(1,) * (x.ndim - 1), -1)
    normalised = centred * inverse_deviation * scale.reshape(last_axis)
    if bias is not None:
        normalised += bias.reshape(last_axis)
    return normalised.astype(x.dtype), (x, scale, bias, mean, inverse_deviation)


def _normalise_backward(epsilon, residuals, gradient):
    x, scale, bias, mean, inverse_deviation = residuals

    def gradient_and_normalised(gradient, x, mean, inverse_deviation):
        return gradient.astype(jnp.float32), (x.astype(jnp.float32) - mean) * inverse_deviation

    inputs = gradient, x, mean, inverse_deviation
    gradient_float32, normalised = gradient_and_normalised(*inputs)
    scaled = gradient_float32 * scale.reshape((*(1,) * (x.ndim - 1), -1))
    projection = normalised * (scaled * normalised).mean(-1, keepdims=True)
    x_gradient = inverse_deviation * (scaled - scaled.mean(-1, keepdims=True) - projection)
    # On GPUs, the sums over rows compute these again. Without the barrier, the kernel that sums over the last axis
    # writes gradient * normalised in float32, and another reads it.
    gradient_float32, normalised = gradient_and_normalised(*barrier_on_gpus(inputs))
    rows = tuple(range(x.ndim - 1))
    bias_gradient = None if bias is None else gradient_float32.sum(rows)
    return x_gradient.astype(x.dtype), (gradient_float32 * normalised).sum(rows), bias_gradient


_normalise.defvjp(_normalise_forward, _normalise_backward)
