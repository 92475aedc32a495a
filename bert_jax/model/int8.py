"""Matrix products and tables of 8-bit integers: symmetric linear quantisation (Zafrir et al. 2019, Q8BERT, section 3).

A vector x is stored as integers q from -127 to 127 and one scale s, so that x is about q s: s = max|x| / 127 and
q = round(x / s), half to even. A kernel has a scale per output channel, a table one per row, and an input of a dense
layer one per token. Every scale is current: it comes from the vector itself. Q8BERT has one scale per kernel, and for
inputs one that comes from a moving average of the largest values of earlier batches. With current scales the train
state has no history, and the result for a text depends neither on earlier batches nor on the texts beside it.

A scale is rounded to 17 binary digits. Then q s has at most 24, so float32 represents it exactly, and quantising it
again gives the same q and s, bit for bit.

Gradients are straight-through: those of the product of the rounded operands, as if rounding were the identity.
"""

import functools

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Float, Int8

LARGEST = 127
SCALE_MANTISSA_BITS = 16
"""Stored bits of the mantissa of a scale; with the leading one 17, and an integer up to 127 has 7."""


def quantise(x: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """(integers, scales in float32, with size 1 along the axes): one scale for the elements along the axes.

    Zeros have the scale 1, as have elements below 1e-36. A NaN or an infinity makes the scale NaN or infinite, and the
    product of integers and scale NaN.
    """
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(axes, keepdims=True, initial=0) * (1 / LARGEST)
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=SCALE_MANTISSA_BITS)
    scale = jnp.where(scale == 0, 1.0, scale)
    # Not a division, which compilers replace by this, depending on the program.
    return jnp.round(x * (1 / scale)).astype(jnp.int8), scale


def dequantise(integers: Int8[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """integers x scale in float32, exact."""
    return integers.astype(jnp.float32) * scale


@jax.custom_vjp
def round_rows(table: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
    """Every row as int8 represents it, in its type; the gradient is that of the identity."""
    return dequantise(*quantise(table, (-1,))).astype(table.dtype)


round_rows.defvjp(lambda table: (round_rows(table), None), lambda _, gradient: (gradient,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def int8_product(x: Float[Array, "..."], kernel: Float[Array, "..."], contracted: int) -> Float[Array, "..."]:
    """The product over the last `contracted` axes of x and the first ones of the kernel, in the type of x.

    The integers are multiplied as such and added in int32. The backward pass has the rounded operands in the type of x;
    the forward pass stores them, one byte per element.

    Args:
      x: inputs; one scale for every index of their other axes.
      kernel: best in float32, so that it is rounded once; one scale for every index of its other axes.
      contracted: number of axes.
    """
    return _forward(x, kernel, contracted)[0]


def _forward(x, kernel, contracted):
    rows, inputs = tuple(range(x.ndim - contracted)), tuple(range(x.ndim - contracted, x.ndim))
    quantised_x, quantised_kernel = quantise(x, inputs), quantise(kernel, tuple(range(contracted)))
    axes = inputs, tuple(range(contracted))
    sums = jax.lax.dot_general(
        quantised_x[0], quantised_kernel[0], (axes, ((), ())), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    outputs = sums.ndim - len(rows)
    row_scale = quantised_x[1].reshape(*x.shape[: len(rows)], *(1,) * outputs)
    channel_scale = quantised_kernel[1].reshape(*(1,) * len(rows), *kernel.shape[contracted:])
    types = jnp.zeros((), x.dtype), jnp.zeros((), kernel.dtype)
    return (sums * row_scale * channel_scale).astype(x.dtype), (quantised_x, quantised_kernel, types)


def _backward(contracted, residuals, gradient):
    x, kernel, (x_type, kernel_type) = residuals
    rows, outputs = x[0].ndim - contracted, kernel[0].ndim - contracted
    over_outputs = tuple(range(rows, rows + outputs)), tuple(range(contracted, contracted + outputs))
    over_rows = (tuple(range(rows)),) * 2
    rounded_x, rounded_kernel = (dequantise(*one).astype(x_type.dtype) for one in (x, kernel))
    products = (gradient, rounded_kernel), (rounded_x, gradient)
    return tuple(
        jax.lax.dot_general(*operands, (axes, ((), ())), preferred_element_type=like.dtype)
        for operands, axes, like in zip(products, (over_outputs, over_rows), (x_type, kernel_type), strict=True)
    )


int8_product.defvjp(_forward, _backward)
