"""Dropout, residual sum and LayerNorm as one Pallas kernel for GPUs, and their backward pass as another.

In each direction, two arrays of the size of the hidden states are read once, and two are written. Dropout has the bits
of `dropout`, which are mixed again in the backward pass. Gradients of scales and biases are sums over all positions:
each program of the backward kernel adds up its own positions, in registers.

The time of the kernels is that of their bytes only if they take few instructions. So a position belongs to one warp, or
to two in the backward kernel of wide positions, which would need too many registers; and all arrays of a tile, also
those that are equal for all positions, are read in one layout, without exchanges between threads.

Shapes in names: B rows, S positions, H width; p and c: positions and columns of a tile, 1: of an axis that broadcasts.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bert_jax.array_types import Array, Float, UInt32
from bert_jax.model.dropout import DropoutKey, dropout_bits
from bert_jax.model.gpu_elementwise import multiply_add, zero_dropped
from bert_jax.model.kernel_rules import dropout_operands, first_words
from bert_jax.model.layers import add_bias

TILE = 1024
"""Elements of a tile: eight, which are 16 bytes, for each thread of four warps."""
COLUMNS, POSITIONS = 256, 4
"""Of a tile. `GPU_NORM_WIDTHS` are multiples of the columns, row lengths of the positions."""
PROGRAMS = 512
"""Of the backward kernel, at least, if there are as many tiles: four for each multiprocessor of an H200."""
Words = tuple[UInt32[Array, " B"], UInt32[Array, "B H"]]
"""`dropout_operands`."""


@dataclass(frozen=True)
class _Settings:
    """What the kernels are compiled for."""

    epsilon: float
    dropout_rate: float
    interpret: bool

    @property
    def kept_share(self) -> float:
        return 1.0 - self.dropout_rate

    def dropped(self, x_pc: Array, first_p1: Array, second_pc: Array) -> Array:
        """`dropout` of a tile, times `kept_share`."""
        if self.dropout_rate == 0.0:
            return x_pc
        return zero_dropped(x_pc, dropout_bits(first_p1, second_pc), self.dropout_rate, self.interpret)


def dropout_add_norm(
    x: Float[Array, "B S H"],
    x_bias: Float[Array, " H"] | None,
    residual: Float[Array, "B S H"],
    scale: Float[Array, " H"],
    bias: Float[Array, " H"] | None,
    *,
    epsilon: float,
    dropout_rate: float,
    dropout_key: DropoutKey,
    interpret: bool = False,
) -> Float[Array, "B S H"]:
    """LayerNorm of residual + dropout(x + x_bias), in the type of x.

    Args:
      x: the product of a dense layer; S is a multiple of 4, H one of `GPU_NORM_WIDTHS`.
      x_bias: of the dense layer; None: it has none.
      residual: what the result of dropout is added to.
      scale, bias, epsilon: of the LayerNorm.
      dropout_rate, dropout_key: as of `dropout`.
      interpret: run the kernels in JAX on any platform, for tests.
    """
    rows, _, width = x.shape
    words = dropout_operands(dropout_key, rows, width)
    return _norm(_Settings(epsilon, dropout_rate, interpret), x, x_bias, residual, scale, bias, words)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(
    settings: _Settings,
    x: Float[Array, "B S H"],
    x_bias: Float[Array, " H"] | None,
    residual: Float[Array, "B S H"],
    scale: Float[Array, " H"],
    bias: Float[Array, " H"] | None,
    words: Words,
) -> Float[Array, "B S H"]:
    return _forward(settings, x, x_bias, residual, scale, bias, words)[0]


def _forward(settings, x, x_bias, residual, scale, bias, words):
    biased = add_bias(x, x_bias)  # XLA adds it in the product of x
    shift = jnp.zeros_like(scale) if bias is None else bias
    rows, length, _ = x.shape
    like_x, of_positions = _like(x), jax.ShapeDtypeStruct((rows, length), jnp.float32)
    normalised, total, mean, inverse_deviation = _call(
        functools.partial(_forward_kernel, settings),
        (biased, residual, scale, shift, *words),
        (like_x, like_x, of_positions, of_positions),
        POSITIONS,
        settings.interpret,
        "dropout_add_norm",
    )
    return normalised, (total, mean, inverse_deviation, x_bias, scale, bias, words)


def _backward(settings, residuals, gradient):
    total, mean, inverse_deviation, x_bias, scale, bias, words = residuals
    rows, length, width = gradient.shape
    positions = math.gcd(length, 1 << max(rows * length // PROGRAMS, POSITIONS).bit_length() - 1)
    like_x = _like(gradient)
    parts = jax.ShapeDtypeStruct((rows, length // positions, 3, width), jnp.float32)
    # Without dropout, the gradients of x and of the residual are equal.
    gradients = (like_x,) if settings.dropout_rate == 0.0 else (like_x, like_x)
    *gradients, parts = _call(
        functools.partial(_backward_kernel, settings),
        (gradient, total, mean, inverse_deviation, scale, *words),
        (*gradients, parts),
        positions,
        settings.interpret,
        "dropout_add_norm_backward",
    )
    scale_gradient, bias_gradient, x_bias_gradient = parts.sum((0, 1))
    return (
        gradients[-1],
        None if x_bias is None else x_bias_gradient,
        gradients[0],
        scale_gradient,
        None if bias is None else bias_gradient,
        None,
    )


_norm.defvjp(_forward, _backward)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(
    kernel: Callable[..., None],
    inputs: tuple[Array, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    positions: int,
    interpret: bool,
    name: str,
) -> tuple[Array, ...]:
    """Run a kernel on every `positions` positions of every row.

    Args:
      kernel: takes references.
      inputs: [B, S, H], [B, S], [H], or, the last two, `Words`.
      outputs: [B, S, H], [B, S], or [B, programs of a row, 3, H].
      positions: of a program.
      interpret: run the kernel in JAX.
      name: of the kernel.
    """
    rows, length, width = inputs[0].shape
    by_shape = {
        (rows, length, width): pl.BlockSpec((None, positions, width), lambda b, i: (b, i, 0)),
        (rows, length): pl.BlockSpec((None, positions), lambda b, i: (b, i)),
        (width,): pl.BlockSpec((width,), lambda b, i: (0,)),
        (rows, length // positions, 3, width): pl.BlockSpec((None, None, 3, width), lambda b, i: (b, i, 0, 0)),
    }
    of_words = [pl.BlockSpec((1,), lambda b, i: (b,)), pl.BlockSpec((None, width), lambda b, i: (b, 0))]
    return pl.pallas_call(
        kernel,
        grid=(rows, length // positions),
        in_specs=[by_shape[x.shape] for x in inputs[:-2]] + of_words,
        out_specs=tuple(by_shape[x.shape] for x in outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*inputs)


def _columns(part: int, shape: tuple[int, int]) -> Array:
    """Columns [p, c] of a tile; with these as the index, an array [H] is read in the layout of the tile."""
    return part * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _first_words(start: Array, positions: int, first_key_ref: Any) -> UInt32[Array, "p 1"]:
    """Of dropout, for the positions of a tile."""
    return first_words(start + jax.lax.broadcasted_iota(jnp.int32, (positions, 1), 0), first_key_ref[0])


def _forward_kernel(
    settings,
    x_ref,
    residual_ref,
    scale_ref,
    bias_ref,
    first_key_ref,
    second_ref,
    normalised_ref,
    total_ref,
    *of_position,
):
    """Four positions, whose sums stay in registers."""
    width, shape = x_ref.shape[1], (POSITIONS, COLUMNS)
    first_p1 = _first_words(pl.program_id(1) * POSITIONS, POSITIONS, first_key_ref)
    totals = []
    for part in range(width // shape[1]):
        columns = pl.ds(part * shape[1], shape[1])
        kept_pc = settings.dropped(x_ref[:, columns].astype(jnp.float32), first_p1, second_ref[_columns(part, shape)])
        residual_pc = residual_ref[:, columns].astype(jnp.float32)
        total_pc = multiply_add(kept_pc, 1.0 / settings.kept_share, residual_pc, settings.interpret)
        total_ref[:, columns] = total_pc.astype(total_ref.dtype)
        totals.append(total_pc.astype(total_ref.dtype).astype(jnp.float32))
    mean_p1 = sum(totals).sum(1, keepdims=True) * (1.0 / width)
    squares_pc = jnp.zeros(shape, jnp.float32)
    for total_pc in totals:
        squares_pc = multiply_add(total_pc - mean_p1, total_pc - mean_p1, squares_pc, settings.interpret)
    inverse_deviation_p1 = jax.lax.rsqrt(squares_pc.sum(1, keepdims=True) * (1.0 / width) + settings.epsilon)
    for part, total_pc in enumerate(totals):
        scale_pc, bias_pc = (ref[_columns(part, shape)] for ref in (scale_ref, bias_ref))
        normalised_pc = (total_pc - mean_p1) * inverse_deviation_p1
        normalised_pc = multiply_add(normalised_pc, scale_pc, bias_pc, settings.interpret)
        normalised_ref[:, pl.ds(part * shape[1], shape[1])] = normalised_pc.astype(normalised_ref.dtype)
    for ref, x_p1 in zip(of_position, (mean_p1, inverse_deviation_p1), strict=True):
        ref[...] = x_p1.reshape(POSITIONS)


def _backward_kernel(
    settings, gradient_ref, total_ref, mean_ref, inverse_ref, scale_ref, first_key_ref, second_ref, *outputs
):
    """The gradients of some positions, and their parts of those of the scale, the bias and the bias of x."""
    *gradient_refs, parts_ref = outputs
    (num_positions, width), multiply = gradient_ref.shape, functools.partial(multiply_add, interpret=settings.interpret)
    # With 1024 columns and a warp for each position, a thread would have 96 sums.
    columns = COLUMNS if width < TILE else 2 * COLUMNS
    shape = TILE // columns, columns
    parts, start = range(width // columns), pl.program_id(1) * num_positions

    def add_tile(tile, sums):
        positions = pl.ds(tile * shape[0], shape[0])
        mean_p1, inverse_p1 = mean_ref[positions][:, None], inverse_ref[positions][:, None]
        first_p1 = _first_words(start + tile * shape[0], shape[0], first_key_ref)
        scaled, normalised, new_sums = [], [], []
        scaled_sum_pc = projected_sum_pc = jnp.zeros(shape, jnp.float32)
        for part, (scale_sum_pc, bias_sum_pc, _) in zip(parts, sums, strict=True):
            at = positions, pl.ds(part * columns, columns)
            gradient_pc, total_pc = gradient_ref[at].astype(jnp.float32), total_ref[at].astype(jnp.float32)
            normalised.append((total_pc - mean_p1) * inverse_p1)
            scaled.append(gradient_pc * scale_ref[_columns(part, shape)])
            scaled_sum_pc += scaled[-1]
            projected_sum_pc = multiply(scaled[-1], normalised[-1], projected_sum_pc)
            new_sums.append((multiply(gradient_pc, normalised[-1], scale_sum_pc), bias_sum_pc + gradient_pc))
        scaled_mean_p1, projected_mean_p1 = (
            x_pc.sum(1, keepdims=True) * (inverse_p1 * (-1.0 / width)) for x_pc in (scaled_sum_pc, projected_sum_pc)
        )
        for part in parts:
            at = positions, pl.ds(part * columns, columns)
            total_gradient_pc = multiply(scaled[part], inverse_p1, scaled_mean_p1)
            total_gradient_pc = multiply(normalised[part], projected_mean_p1, total_gradient_pc)
            x_gradient_pc = settings.dropped(total_gradient_pc, first_p1, second_ref[_columns(part, shape)])
            x_gradient_pc *= 1.0 / settings.kept_share
            for ref, x_pc in zip(gradient_refs, (total_gradient_pc, x_gradient_pc), strict=False):
                ref[at] = x_pc.astype(ref.dtype)
            new_sums[part] += (sums[part][2] + x_gradient_pc,)
        return new_sums

    zeros_pc = jnp.zeros(shape, jnp.float32)
    sums = jax.lax.fori_loop(0, num_positions // shape[0], add_tile, [(zeros_pc,) * 3] * len(parts))
    for part, of_part in enumerate(sums):
        for i, sum_pc in enumerate(of_part):
            parts_ref[i, pl.ds(part * columns, columns)] = sum_pc.sum(0)
