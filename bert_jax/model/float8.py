"""Matrix products of 8-bit floats, each array scaled by its own largest value (Micikevicius et al. 2022, section 3).

Inputs and kernels are e4m3, gradients of outputs e5m2, as in that paper. The scale is current: it comes from the array
itself and not from earlier steps, so the train state has no history of maxima, and a product depends on its operands
alone. It is a power of two, so scaling is exact.
"""

import functools

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Float

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def float8_product(x: Float[Array, "..."], kernel: Float[Array, "..."], contracted: int) -> Float[Array, "..."]:
    """The product over the last `contracted` axes of x and the first ones of the kernel, in the type of x.

    Both products of the backward pass have operands of 8-bit floats, too; the gradients have the types of x and kernel.
    The forward pass stores its operands, one byte per element.

    Args:
      x: inputs.
      kernel: best in float32, so that it is rounded once.
      contracted: number of axes.
    """
    return _forward(x, kernel, contracted)[0]


def quantise(x: Float[Array, "..."], dtype: jnp.dtype) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """(x / scale in an 8-bit type, scale): the smallest power of two for which the largest value is in range.

    The scale of zeros is 1, and so is that of values that differ from zero by less than 1e-38. A NaN or an infinity
    makes some values NaN.
    """
    largest = jnp.abs(x).max(initial=0).astype(jnp.float32) / jnp.finfo(dtype).max.astype(jnp.float32)
    mantissa, exponent = jnp.frexp(largest)  # largest = mantissa * 2^exponent, with mantissa in [0.5, 1)
    scale = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    scale = jnp.where(jnp.isfinite(largest) & (largest > 0), scale, jnp.where(largest == 0, 1.0, largest))
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _product(first, second, axes, dtype):
    """Of two arrays of `quantise`. It is rounded to the type before it is scaled, which changes nothing."""
    (first, first_scale), (second, second_scale) = first, second
    product = jax.lax.dot_general(first, second, (axes, ((), ())), preferred_element_type=dtype)
    return product * (first_scale * second_scale).astype(dtype)


def _forward(x, kernel, contracted):
    quantised_x, quantised_kernel = quantise(x, FORWARD), quantise(kernel, FORWARD)
    axes = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    types = jnp.zeros((), x.dtype), jnp.zeros((), kernel.dtype)
    return _product(quantised_x, quantised_kernel, axes, x.dtype), (quantised_x, quantised_kernel, types)


def _backward(contracted, residuals, gradient):
    x, kernel, (x_type, kernel_type) = residuals
    gradient = quantise(gradient, BACKWARD)
    rows, outputs = x[0].ndim - contracted, kernel[0].ndim - contracted
    over_outputs = tuple(range(rows, rows + outputs)), tuple(range(contracted, contracted + outputs))
    over_rows = (tuple(range(rows)),) * 2
    return (
        _product(gradient, kernel, over_outputs, x_type.dtype),
        _product(x, gradient, over_rows, kernel_type.dtype),
    )


float8_product.defvjp(_forward, _backward)
