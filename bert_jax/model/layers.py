"""Building blocks of every layer: activations, dropout, dense layers, LayerNorm."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.array_types import Array, Float, Int, UInt32
from bert_jax.config import ModelConfig
from bert_jax.model.float8 import float8_product
from bert_jax.model.int8 import int8_product


def barrier_on_gpus(tree: Any) -> Any:
    """`tree`, which XLA for GPUs does not fuse with what it is computed from. Other platforms would only lose by it."""
    return jax.lax.platform_dependent(tree, cuda=jax.lax.optimization_barrier, default=lambda tree: tree)


@jax.custom_jvp
def gelu(x: Array) -> Array:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016); on GPUs with an error of 1e-6.

    Its derivative is written out, so the backward pass stores one array of the feed-forward width instead of four.
    On GPUs erf takes most of its time; on CPUs an exponential would take more than erf (docs/log/model.md, 2026-11-26).
    """

    def short(x: Array) -> Array:
        return (x.astype(jnp.float32) * normal_cdf(x.astype(jnp.float32))).astype(x.dtype)

    return jax.lax.platform_dependent(x, cuda=short, default=lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5)))


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    y = barrier_on_gpus(x).astype(jnp.float32)  # without the barrier, the exponential would be stored
    slope = normal_cdf(y) + y * _normal_density(y)
    return gelu(x), slope.astype(x.dtype) * tangent


@jax.custom_jvp
def normal_cdf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Distribution function of the normal distribution, with an absolute error of 1e-7 (float32).

    Abramowitz and Stegun 1964, 7.1.26: one exponential, which the density shares, and a polynomial of degree 5, where
    XLA's error function has two of degrees 6 and 4 (docs/log/model.md, 2026-11-26).
    """
    t = 1.0 / (1.0 + 0.3275911 * 0.5**0.5 * jnp.abs(x))
    polynomial = jnp.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + coefficient) * t
    tail = 0.5 * polynomial * jnp.exp(-0.5 * x * x)
    return jnp.where(x < 0, tail, 1.0 - tail)


normal_cdf.defjvp(lambda primals, tangents: (normal_cdf(*primals), _normal_density(*primals) * tangents[0]))


def _normal_density(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.exp(-0.5 * x * x) * (2.0 * jnp.pi) ** -0.5


@jax.custom_jvp
def gelu_tanh(x: Array) -> Array:
    """The approximation of `gelu` by tanh (Hendrycks and Gimpel 2016, section 2)."""
    return jax.nn.gelu(x, approximate=True)


@gelu_tanh.defjvp
def _gelu_tanh_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    # With the barrier, the activation is computed in the product that x comes from (cuBLAS: BIAS_GELU_AUX).
    y = barrier_on_gpus(x).astype(jnp.float32)
    factor = (2.0 / jnp.pi) ** 0.5
    tanh = jnp.tanh(factor * (y + 0.044715 * y * y * y))
    slope = 0.5 * (1.0 + tanh) + 0.5 * y * (1.0 - tanh) * (1.0 + tanh) * factor * (1.0 + 3 * 0.044715 * y * y)
    return gelu_tanh(x), slope.astype(x.dtype) * tangent


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
}


def _hash32(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijective hash of 32-bit words: the finaliser of MurmurHash3 (A. Appleby, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def hash_combine(key: UInt32[Array, "..."], *words: Array | int) -> UInt32[Array, "..."]:
    """A 32-bit key derived from a key and words, whose order matters."""
    for word in words:
        key *= jnp.uint32(0x9E3779B1)
        key = _hash32(key + _hash32(jnp.asarray(word).astype(jnp.uint32) + jnp.uint32(0x7F4A7C15)))
    return key


class DropoutKey(NamedTuple):
    """The source of dropout's random bits: a counter hash of (seed, step, layer, site, global row, position).

    The bits depend neither on the mesh nor on the split into micro-batches, and are never stored.
    """

    key: UInt32[Array, ""]
    """Hash of seed and step."""
    rows: Int[Array, " B"]
    """Index of each row within the global batch."""
    site: UInt32[Array, ""] | np.uint32 = np.uint32(0)
    """Hash of layer and site."""

    def fold_in(self, *words: Array | int) -> "DropoutKey":
        """The key of a layer or a site, as in ``dropout_key.fold_in(layer).fold_in(SITE)``."""
        return self._replace(site=hash_combine(jnp.uint32(self.site), *words))


class Selection(NamedTuple):
    """Which elements of an axis an array has, if it does not have all."""

    axis: int
    positions: Int[Array, "B M"]
    """In the whole array, for each row."""
    size: int
    """Of the axis in the whole array."""


def dropout(
    x: Float[Array, "B ..."], rate: float, dropout_key: DropoutKey | None, selection: Selection | None = None
) -> Float[Array, "B ..."]:
    """Set a share `rate` of x to zero and scale the rest by 1 / (1 - rate); with None as the key, return x.

    The 32 bits of an element mix two words (`dropout_words`). The rate is exact to 2e-10, because it is a threshold on
    32 bits.

    Args:
      x: an array, or the selected part of one; its elements get the bits that they have in the whole array.
      rate: share of zeros.
      dropout_key: source of the bits.
      selection: which part x is.
    """
    if dropout_key is None or rate == 0.0:
        return x
    keep = dropout_bits(*dropout_words(dropout_key, x.shape, selection)) >= dropout_threshold(rate)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def dropout_words(
    dropout_key: DropoutKey, shape: tuple[int, ...], selection: Selection | None = None
) -> tuple[UInt32[Array, "B ... 1"], UInt32[Array, "B ... W"]]:
    """The two words of every element of an array of this shape: of its place in all but the last axis, and in the last.

    They are a hash of the place and a key of the row; all sites of a step have the second words in common.
    """
    whole = list(shape)
    if selection is not None:
        whole[selection.axis] = selection.size
    place = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in range(1, len(shape) - 1):
        if selection is not None and axis == selection.axis:
            index = selection.positions.astype(jnp.uint32).reshape(shape[0], *_keep_axis(shape, axis)[1:])
        else:
            index = jax.lax.broadcasted_iota(jnp.uint32, _keep_axis(shape, axis), axis)
        place += index * jnp.uint32(math.prod(whole[axis + 1 : -1]))
    first_key, second_key = (key.reshape(-1, *(1,) * (len(shape) - 1)) for key in dropout_row_keys(dropout_key))
    last = len(shape) - 1
    last_place = jax.lax.broadcasted_iota(jnp.uint32, _keep_axis(shape, last), last)
    # The barrier keeps the hash of second words out of loops over all elements.
    return place_word(place, first_key), jax.lax.optimization_barrier(place_word(last_place, second_key))


def dropout_row_keys(dropout_key: DropoutKey) -> tuple[UInt32[Array, " B"], UInt32[Array, " B"]]:
    """The keys of every row, of first and of second words."""
    first = hash_combine(dropout_key.key, 1, dropout_key.site, dropout_key.rows)
    return first, hash_combine(dropout_key.key, 2, dropout_key.rows)


def place_word(place: UInt32[Array, "..."], row_key: Array) -> UInt32[Array, "..."]:
    """The word of a place in a row that has this key."""
    return _hash32(place + row_key)


def dropout_bits(first: UInt32[Array, "..."], second: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of elements with these words.

    One multiplication is not enough: four elements at the corners of a rectangle would depend on each other
    (tests/model/test_dropout_statistics.py).
    """
    mixed = (first ^ second) * jnp.uint32(0x9E3779B1)
    return (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)


def dropout_threshold(rate: float) -> np.uint32:
    """An element is kept if its bits are at least this."""
    return np.uint32(round(rate * 2**32))


def _keep_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape with all other axes of size 1."""
    return tuple(size if i == axis else 1 for i, size in enumerate(shape))


def truncated_normal(stddev: float) -> Callable[..., Array]:
    """Initializer: a normal distribution truncated at two standard deviations (google-research/bert modeling.py)."""

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)

    return init


def normal(stddev: float) -> Callable[..., Array]:
    """Initializer: a normal distribution; truncated at two standard deviations, it has 0.88 of this one's."""

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        return stddev * jax.random.normal(key, shape, jnp.float32)

    return init


def gather_positions(
    x: Float[Array, "B S ..."] | Int[Array, "B S ..."], positions: Int[Array, "B M"]
) -> Float[Array, "B M ..."] | Int[Array, "B M ..."]:
    """The elements of each row at some of its positions."""
    indices = positions.reshape(*positions.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, indices, axis=1, mode="clip")


Biases = Literal["all", "none"]
"""The values of `ModelConfig.biases`."""
DenseType = Literal["compute", "float8", "int8"]
"""The values of `ModelConfig.dense_dtype`."""


def outer_dense_dtype(dtype: DenseType) -> DenseType:
    """The type of the hidden dense layers outside the blocks, and of adapters: 8-bit floats are for the blocks only."""
    return "int8" if dtype == "int8" else "compute"


def _bias(shape: tuple[int, ...], biases: Biases) -> nnx.Param | None:
    return nnx.Param(jnp.zeros(shape, jnp.float32)) if biases == "all" else None


def _add_bias(y: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Broadcast before the cast, so that the backward pass sums the gradient over the rows in float32."""
    return y + jnp.broadcast_to(bias, y.shape).astype(y.dtype)


class Dense(nnx.Module):
    """x @ kernel + bias over the last axes of x, as many as `inputs` has, in the type of x; no bias with "none".

    With the types "float8" and "int8", the product has operands of 8 bits; with "compute", of the type of x.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        init: Callable[..., Array],
        key: Array,
        biases: Biases = "all",
        dtype: DenseType = "compute",
    ):
        self.kernel = nnx.Param(init(key, inputs + outputs))
        self.bias = _bias(outputs, biases)
        self.num_inputs = len(inputs)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Project. Products accumulate in the type that the backend chooses: float32 on CPUs, GPUs and TPUs."""
        y = self._product(x, self.kernel[...])
        return y if self.bias is None else _add_bias(y, self.bias[...])

    def separate_products(self, inputs: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
        """As `__call__`, with one product for each index of the first output axis, each of its own input.

        On a CPU this is cheaper than copying query, key and value out of one product
        (docs/log/conversion.md, 2026-11-22).
        """
        kernel = jnp.moveaxis(self.kernel[...], self.num_inputs, 0)
        products = [self._product(x, part) for x, part in zip(inputs, kernel, strict=True)]
        if self.bias is None:
            return products
        return [_add_bias(y, bias) for y, bias in zip(products, self.bias[...], strict=True)]

    def side_by_side(self, x: Float[Array, "..."]) -> Float[Array, "*rows W"]:
        """As `__call__`, with the output axes merged. GPU products add a bias only if it has one axis."""
        kernel = self.kernel[...]
        y = self._product(x, kernel.reshape(*kernel.shape[: self.num_inputs], -1))
        return y if self.bias is None else _add_bias(y, self.bias[...].reshape(-1))

    def _product(self, x: Float[Array, "..."], kernel: Float[Array, "..."]) -> Float[Array, "..."]:
        if self.dtype == "float8":
            return float8_product(x, kernel, self.num_inputs)
        if self.dtype == "int8":
            return int8_product(x, kernel, self.num_inputs)
        return jnp.tensordot(x, kernel.astype(x.dtype), axes=self.num_inputs)


class Adapter(nnx.Module):
    """x + gelu(x D) U, with biases for every value of `ModelConfig.biases` (Houlsby et al. 2019, section 2.1).

    Nearly the identity at first: the weights have a standard deviation of 1e-3 (google-research/adapter-bert).
    """

    def __init__(self, width: int, size: int, key: Array, dtype: DenseType = "compute"):
        down, up = jax.random.split(key)
        self.down = Dense((width,), (size,), truncated_normal(1e-3), down, dtype=dtype)
        self.up = Dense((size,), (width,), truncated_normal(1e-3), up, dtype=dtype)

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Apply the bottleneck and its residual connection."""
        return x + self.up(gelu(self.down(x)))


class LayerNorm(nnx.Module):
    """Normalise the last axis; statistics are float32 for every type of x (Ba et al. 2016)."""

    def __init__(self, size: int, epsilon: float, biases: Biases = "all"):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = _bias((size,), biases)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Normalise; the result has the type of x."""
        return _normalise(x, self.scale[...], None if self.bias is None else self.bias[...], self.epsilon)


class NoNorm(nnx.Module):
    """The scale and bias of a LayerNorm without statistics; float32 inside (Sun et al. 2020, section 3.4)."""

    def __init__(self, size: int, biases: Biases = "all"):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = _bias((size,), biases)

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
    mean = x_float32.mean(-1, keepdims=True)
    centred = x_float32 - mean
    inverse_deviation = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
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
