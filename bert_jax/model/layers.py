"""Small pure functions that every layer is made of.

Shapes in names: B rows, S positions, H hidden, F feed-forward, N heads, D head, V vocabulary.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.shapes import Array, Float, Int, UInt32


@jax.custom_jvp
def gelu(x: Array) -> Array:
    """x times the normal distribution function of x, exact (Hendrycks and Gimpel 2016).

    With its derivative written out, the backward pass keeps one array of the feed-forward's width, not four.
    """
    return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    below = 0.5 * (1.0 + jax.lax.erf(x * 0.5**0.5))
    density = jnp.exp(-0.5 * x * x) * (2.0 * jnp.pi) ** -0.5
    return x * below, (below + x * density) * tangent


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Bijective scrambling of 32-bit words: the finaliser of MurmurHash3 (A. Appleby, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fold(key: UInt32[Array, "..."], *words: Array | int) -> UInt32[Array, "..."]:
    """A new 32-bit key for each combination of key and words; the order of the words matters."""
    for word in words:
        key = mix(key * jnp.uint32(0x9E3779B1) + mix(jnp.asarray(word).astype(jnp.uint32) + jnp.uint32(0x7F4A7C15)))
    return key


class Noise(NamedTuple):
    """Where dropout gets its bits: a counter hash of (seed, update, layer, site, global row, position).

    So the bits change neither with the mesh nor with the accumulation split, and nothing is stored for them.
    """

    key: UInt32[Array, ""]
    """Seed and update step, folded; `at` folds layer and site in."""
    rows: Int[Array, " B"]
    """Index of each row within the global batch."""

    def at(self, *words: Array | int) -> "Noise":
        """Noise for a sub-place, e.g. ``noise.at(layer).at(SITE)``."""
        return self._replace(key=fold(self.key, *words))


def dropout(x: Float[Array, "B ..."], rate: float, noise: Noise | None) -> Float[Array, "B ..."]:
    """Zero a share `rate` of x, scale the rest by 1 / (1 - rate). Without noise: x itself.

    Each element's 32 bits hash its flat position in the row with two keys of its row, so two rows
    share bits nowhere. Threshold on 32 bits: the rate is exact to 2e-10.
    """
    if noise is None or rate == 0.0:
        return x
    row_shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    shift = fold(noise.key, noise.rows, 1).reshape(row_shape)
    flip = fold(noise.key, noise.rows, 2).reshape(row_shape)
    place = jnp.zeros((1,) * x.ndim, jnp.uint32)
    for axis in range(1, x.ndim):
        stride = 1
        for size in x.shape[axis + 1 :]:
            stride *= size
        place += jax.lax.broadcasted_iota(jnp.uint32, _only(x.shape, axis), axis) * jnp.uint32(stride)
    bits = mix(mix(place + shift) ^ flip)
    keep = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def _only(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(size if i == axis else 1 for i, size in enumerate(shape))


def truncated_normal(deviation: float) -> Callable[..., Array]:
    """Initializer: normal with this deviation, cut off at two deviations (google-research/bert modeling.py)."""

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        return deviation * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)

    return init


Biases = Literal["all", "none"]
"""As `ModelConfig.biases`."""


def _bias(shape: tuple[int, ...], biases: Biases) -> nnx.Param | None:
    return nnx.Param(jnp.zeros(shape, jnp.float32)) if biases == "all" else None


def _add_bias(y: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Broadcast before the cast, so that the backward pass casts before it sums over the rows: in float32."""
    return y + jnp.broadcast_to(bias, y.shape).astype(y.dtype)


class Dense(nnx.Module):
    """x @ kernel + bias over the last `inputs` axes of x, in the type of x; without biases, x @ kernel."""

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        init: Callable[..., Array],
        key: Array,
        biases: Biases = "all",
    ):
        self.kernel = nnx.Param(init(key, inputs + outputs))
        self.bias = _bias(outputs, biases)
        self.num_inputs = len(inputs)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Project; accumulation is the backend's, float32 on every one that matters."""
        kernel = self.kernel[...].astype(x.dtype)
        y = jnp.tensordot(x, kernel, axes=self.num_inputs)
        return y if self.bias is None else _add_bias(y, self.bias[...])

    def parts(self, x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
        """As `__call__`, with a product for each index of the first output axis.

        On a CPU that is cheaper than to copy query, key and value out of one product (docs/LOG.md).
        """
        kernel = jnp.moveaxis(self.kernel[...].astype(x.dtype), self.num_inputs, 0)
        products = [jnp.tensordot(x, part, axes=self.num_inputs) for part in kernel]
        if self.bias is None:
            return products
        return [_add_bias(y, bias) for y, bias in zip(products, self.bias[...], strict=True)]


class LayerNorm(nnx.Module):
    """Normalise the last axis; statistics in float32 whatever the type of x (Ba et al. 2016)."""

    def __init__(self, size: int, epsilon: float, biases: Biases = "all"):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = _bias((size,), biases)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Normalise; the result has the type of x."""
        lifted = x.astype(jnp.float32)
        mean = lifted.mean(-1, keepdims=True)
        centred = lifted - mean
        variance = jnp.square(centred).mean(-1, keepdims=True)
        along = (*(1,) * (x.ndim - 1), -1)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon) * self.scale[...].reshape(along)
        if self.bias is not None:
            normal += self.bias[...].reshape(along)
        return normal.astype(x.dtype)
