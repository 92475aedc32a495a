"""Building blocks of every layer: activations, dense layers, adapters."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.array_types import Array, Float, Int
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


SAVED = "saved"
"""Name of what `model.remat dots` does not compute again: outputs of dense layers, statistics of norms, and what a
kernel of attention names so."""
Biases = Literal["all", "none"]
"""The values of `ModelConfig.biases`."""
DenseType = Literal["compute", "float8", "int8"]
"""The values of `ModelConfig.dense_dtype`."""


def outer_dense_dtype(dtype: DenseType) -> DenseType:
    """The type of the hidden dense layers outside the blocks, and of adapters: 8-bit floats are for the blocks only."""
    return "int8" if dtype == "int8" else "compute"


def make_bias(shape: tuple[int, ...], biases: Biases) -> nnx.Param | None:
    """The bias of a layer, 0 at first; None without biases."""
    return nnx.Param(jnp.zeros(shape, jnp.float32)) if biases == "all" else None


def add_bias(y: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """Broadcast before the cast, so that the backward pass sums the gradient over the rows in float32. None: y."""
    return checkpoint_name(y if bias is None else y + jnp.broadcast_to(bias, y.shape).astype(y.dtype), SAVED)


class Dense(nnx.Module):
    """x @ kernel + bias over the last axes of x, as many as `inputs` has, in the type of x; no bias with "none".

    With the types "float8" and "int8", the product has operands of 8 bits; with "compute", of the type of x. The latter
    can be a product of matrices (`merges_axes`): XLA for CPUs transposes operands that have more axes than those, in
    the backward pass too (docs/log/model.md, 2026-11-27).
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        init: Callable[..., Array],
        key: Array,
        biases: Biases = "all",
        dtype: DenseType = "compute",
        merges_axes: bool = False,
    ):
        self.kernel = nnx.Param(init(key, inputs + outputs))
        self.bias = make_bias(outputs, biases)
        self.num_inputs = len(inputs)
        self.dtype, self.merges_axes = dtype, merges_axes

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Project. Products accumulate in the type that the backend chooses: float32 on CPUs, GPUs and TPUs."""
        return self._with_bias(self.without_bias(x), None if self.bias is None else self.bias[...])

    def without_bias(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """x @ kernel."""
        return self._product(x, self.kernel[...])

    def separate_products(self, inputs: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
        """As `__call__`, with one product for each index of the first output axis, each of its own input.

        On a CPU this is cheaper than copying query, key and value out of one product
        (docs/log/conversion.md, 2026-11-22).
        """
        kernel = jnp.moveaxis(self.kernel[...], self.num_inputs, 0)
        products = [self._product(x, part) for x, part in zip(inputs, kernel, strict=True)]
        biases = [None] * len(products) if self.bias is None else self.bias[...]
        return [self._with_bias(y, bias) for y, bias in zip(products, biases, strict=True)]

    def side_by_side(self, x: Float[Array, "..."]) -> tuple[Float[Array, "*rows W"], Float[Array, " W"] | None]:
        """x @ kernel and the bias, with the output axes merged. GPU products add a bias only if it has one axis."""
        kernel = self.kernel[...]
        product = self._product(x, kernel.reshape(*kernel.shape[: self.num_inputs], -1))
        return product, None if self.bias is None else self.bias[...].reshape(-1)

    def _with_bias(self, y: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
        if bias is None or not self.merges_axes:
            return add_bias(y, bias)
        return add_bias(y.reshape(-1, bias.size), bias.reshape(-1)).reshape(y.shape)

    def _product(self, x: Float[Array, "..."], kernel: Float[Array, "..."]) -> Float[Array, "..."]:
        if self.dtype == "float8":
            return float8_product(x, kernel, self.num_inputs)
        if self.dtype == "int8":
            return int8_product(x, kernel, self.num_inputs)
        rows, outputs = x.shape[: x.ndim - self.num_inputs], kernel.shape[self.num_inputs :]
        inputs = math.prod(kernel.shape[: self.num_inputs])
        kernel = kernel.astype(x.dtype)
        if not self.merges_axes:  # but those that are contracted: a TPU would copy x into the tiles of several
            return jnp.tensordot(x.reshape(*rows, inputs), kernel.reshape(inputs, *outputs), axes=1)
        return (x.reshape(-1, inputs) @ kernel.reshape(inputs, -1)).reshape(*rows, *outputs)


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
