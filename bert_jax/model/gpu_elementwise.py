"""Elementwise operations of kernels for GPUs, in assembly.

The compiler of kernels neither merges a multiplication with an addition nor leaves a selection in front of a rounding
to 16 bits, where it takes half of the instructions.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu

from bert_jax.array_types import Array, Float, UInt32
from bert_jax.model.dropout import dropout_threshold


def multiply_add(x: Array, factor: Array | float, addend: Array, interpret: bool) -> Float[Array, "..."]:
    """x * factor + addend, rounded once; in JAX if interpreted. The arguments broadcast."""
    if interpret:
        return x * factor + addend
    return _assembly("fma.rn.f32 $0, $1, $2, $3;", *jnp.broadcast_arrays(x, jnp.float32(factor), addend))


def power_of_two(x: Array, factor: float, offset: Array, interpret: bool) -> Float[Array, "..."]:
    """2 to the power of x * factor - offset, subnormal results as 0; in JAX if interpreted."""
    if interpret:
        return jnp.exp2(x * factor - offset)
    text = f"fma.rn.f32 x, $1, 0f{_hex(factor)}, $2; ex2.approx.ftz.f32 $0, x;"
    return _assembly(text, x, jnp.broadcast_to(-offset, x.shape))


def zero_dropped(x: Array, bits: UInt32[Array, "..."], rate: float, interpret: bool) -> Float[Array, "..."]:
    """x, or 0 where `dropout` of this rate drops an element with these bits; in JAX if interpreted."""
    threshold = dropout_threshold(rate)
    if interpret:
        return jnp.where(bits >= threshold, x, 0.0)
    return _assembly(f"setp.hs.u32 p, $2, {threshold}; selp.f32 $0, $1, 0f00000000, p;", x, bits)


def _assembly(text: str, *operands: Array) -> Array:
    """One float32 for each element of the operands; the text may use a register x and a predicate p."""
    (result,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 x; .reg .pred p; {text} }}",
        args=operands,
        constraints="=r" + ",r" * len(operands),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)],
    )
    return result


def _hex(number: float) -> str:
    """The bits of a float32."""
    return np.float32(number).tobytes()[::-1].hex()
