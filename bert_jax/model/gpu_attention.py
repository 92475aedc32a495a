"""Attention as Pallas kernels for GPUs: scores and dropout masks exist only in blocks, in registers.

Dao 2023 (FlashAttention-2, algorithms 1 and 2), with packed examples, local windows and the dropout of
`dropout`: its bits are mixed again in the backward pass, and are those of the `reference` attention. Blocks of
scores in which no query may attend to a key are skipped, so the cost of a local window is linear in the row length.

Instructions that are not products bound the loops. So exponentials have base 2, with the factor of the scores in the
same multiply-add as the subtraction; constants multiply results instead of scores; and what depends on a query or a key
alone is computed once per block. Queries, keys and values are read where their projection wrote them, and their
gradients are written into one array.

Shapes in names: B rows, N heads, S positions, D head size; q and k: queries and keys of a block.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bert_jax.array_types import Array, Bool, Float, Int, UInt32
from bert_jax.config.sections import GPU_ATTENTION_BLOCK as BLOCK
from bert_jax.model.dropout import DropoutKey, dropout_bits
from bert_jax.model.gpu_elementwise import power_of_two, zero_dropped
from bert_jax.model.kernel_rules import (
    FLOOR,
    SMALLEST,
    KernelSettings,
    OfRows,
    allowed_pairs,
    dropout_operands,
    first_words,
    product,
)
from bert_jax.model.layers import add_bias

QUERY, KEY, VALUE = range(3)


def kernel_attention(
    projected: Float[Array, "B S W"],
    segment_ids: Int[Array, "B S"],
    *,
    num_heads: int,
    before: int | None,
    after: int | None,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    bias: Float[Array, " W"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B S N D"]:
    """Context vectors; those of padding are 0.

    Args:
      projected: queries of all heads, keys of all heads, values of all heads, W = 3 N D; S is a multiple of
        `GPU_ATTENTION_BLOCK`, D one of `KERNEL_HEAD_SIZES`.
      bias: added to `projected`. The kernels add up its gradient.
      segment_ids, before, after: as in `make_attention_mask`.
      num_heads: N.
      dropout_rate, dropout_key: of the probabilities; None as the key disables dropout.
      interpret: run the kernels in JAX on any platform, for tests.
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    settings = KernelSettings(num_heads, before, after, rate, interpret)
    rows, length = segment_ids.shape
    of_rows = segment_ids, *dropout_operands(dropout_key, rows, length)
    return _attention(settings, projected, bias, of_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: KernelSettings, projected: Float[Array, "B S W"], bias: Float[Array, " W"] | None, of_rows: OfRows
) -> Float[Array, "B S N D"]:
    return _forward(settings, projected, bias, of_rows)[0]


def _forward(settings, projected, bias, of_rows):
    (rows, length, width), heads = projected.shape, settings.num_heads
    size = width // (3 * heads)
    biased = add_bias(projected, bias)  # XLA adds it in the product
    projected = biased.reshape(rows, length, 3, heads, size)
    ranges, _ = _block_ranges(of_rows[0], settings.before, settings.after)
    inputs = _Operand(projected, QUERY), _Operand(projected, KEY, True), _Operand(projected, VALUE, True)
    context = jax.ShapeDtypeStruct((rows, length, heads, size), projected.dtype)
    log_sums = jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)
    context, log_sums = _call(_forward_kernel, settings, of_rows, ranges, inputs, (context, log_sums))
    return context, (projected, bias, of_rows, context, log_sums)


def _backward(settings, residuals, gradient):
    projected, bias, of_rows, context, log_sums = residuals
    rows, length, _, heads, size = projected.shape
    key_ranges, query_ranges = _block_ranges(of_rows[0], settings.before, settings.after)
    inputs = _Operand(projected, QUERY), _Operand(projected, KEY, True), _Operand(projected, VALUE, True)
    inputs += _Operand(gradient), _Operand(context), _Operand(log_sums)
    like_projected = jax.ShapeDtypeStruct(projected.shape, projected.dtype)
    outputs = like_projected, jax.ShapeDtypeStruct(log_sums.shape, jnp.float32)

    def of_blocks(parts: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The part of each block in the gradient of the bias."""
        shape = rows, length // BLOCK, parts, heads, size
        return () if bias is None else (jax.ShapeDtypeStruct(shape, jnp.float32),)

    partial, means, *query_sums = _call(
        _query_gradient_kernel, settings, of_rows, key_ranges, inputs, outputs + of_blocks(1)
    )
    inputs = _Operand(projected, QUERY, True), _Operand(projected, KEY), _Operand(projected, VALUE)
    inputs += _Operand(gradient, None, True), _Operand(log_sums, None, True), _Operand(means, None, True)
    inputs += (_Operand(partial),)
    outputs = like_projected, *of_blocks(2)
    total, *key_sums = _call(_key_gradient_kernel, settings, of_rows, query_ranges, inputs, outputs, reuses_last=True)
    sums = [x.sum((0, 1)) for x in query_sums + key_sums]
    return total.reshape(rows, length, -1), jnp.concatenate(sums).reshape(-1) if sums else None, None


_attention.defvjp(_forward, _backward)


def _block_ranges(
    segment_ids: Int[Array, "B S"], before: int | None, after: int | None
) -> tuple[Int[Array, "B blocks 2"], Int[Array, "B blocks 2"]]:
    """First block, and the block after the last one, of the keys that a block of queries attends to; and of the queries
    that attend to a block of keys."""
    length = segment_ids.shape[1]
    position = jnp.arange(length)

    def of_row(segments: Int[Array, " S"]) -> tuple[Array, Array]:
        first = jax.ops.segment_min(position, segments, num_segments=length + 1)[segments]
        last = jax.ops.segment_max(position, segments, num_segments=length + 1)[segments]

        def ranges(below: int | None, above: int | None) -> Array:
            low = first if below is None else jnp.maximum(first, position - below)
            high = last if above is None else jnp.minimum(last, position + above)
            low, high = jnp.where(segments > 0, low, length), jnp.where(segments > 0, high, -1)
            blocks = low.reshape(-1, BLOCK).min(1) // BLOCK, high.reshape(-1, BLOCK).max(1) // BLOCK + 1
            return jnp.stack(blocks, axis=1).astype(jnp.int32)

        return ranges(before, after), ranges(after, before)

    return jax.vmap(of_row)(segment_ids)


class _Operand(NamedTuple):
    """An array, and what a kernel sees of it, of its row and head."""

    array: Array | jax.ShapeDtypeStruct
    """[B, S, 3, N, D], [B, S, N, D], [B, N, S], or [B, blocks, parts, N, D]."""
    part: int | None = None
    """Of queries, keys and values; None: all that there are."""
    has_row: bool = False
    """The whole row instead of the part of the kernel's block of positions."""

    def spec(self, blocks: int) -> pl.BlockSpec:
        """How the kernel reads or writes it; blocks: of a row."""
        shape, part, has_row = self.array.shape, self.part, self.has_row
        length = shape[2] if len(shape) == 3 else shape[1]
        positions = length if has_row else length // blocks

        def place(i: Array) -> Array | int:
            return 0 if has_row else i

        if len(shape) == 3:
            return pl.BlockSpec((None, None, positions), lambda b, n, i: (b, n, place(i)))
        if len(shape) == 4:
            return pl.BlockSpec((None, positions, None, shape[-1]), lambda b, n, i: (b, place(i), n, 0))
        parts, first = (shape[2], 0) if part is None else (None, part)
        return pl.BlockSpec((None, positions, parts, None, shape[-1]), lambda b, n, i: (b, place(i), first, n, 0))


def _call(
    kernel: Any,
    settings: KernelSettings,
    of_rows: OfRows,
    ranges: Int[Array, "B blocks 2"],
    inputs: tuple[_Operand, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    reuses_last: bool = False,
) -> tuple[Array, ...]:
    """Run a kernel on every block of every row and head.

    Args:
      kernel: takes a function that makes what its blocks share, then references.
      settings: of the kernel.
      of_rows: segment ids, and `dropout_operands`.
      ranges: of the blocks that each block meets.
      inputs: what the kernel reads.
      outputs: shapes and types of the outputs, of which the kernel writes its block.
      reuses_last: the last input becomes the first output, of which the kernel writes only some parts.
    """
    rows, length, _, heads, size = inputs[0].array.shape
    segment_ids, *dropout = of_rows
    of_rows = jnp.where(segment_ids > 0, segment_ids, -1), *dropout, ranges

    def body(segments_ref, first_key_ref, second_words_ref, range_ref, *refs):
        row = settings, length, size**-0.5, segments_ref, first_key_ref, second_words_ref
        kernel(lambda: _RowAndHead(*row, pl.program_id(1)), range_ref, *refs)

    of_row_specs = [
        pl.BlockSpec((None, length), lambda b, n, i: (b, 0)),
        pl.BlockSpec((1,), lambda b, n, i: (b,)),
        pl.BlockSpec((None, length), lambda b, n, i: (b, 0)),
        pl.BlockSpec((None, None, 2), lambda b, n, i: (b, i, 0)),
    ]
    blocks = length // BLOCK
    return pl.pallas_call(
        body,
        grid=(rows, heads, blocks),
        in_specs=of_row_specs + [x.spec(blocks) for x in inputs],
        out_specs=tuple(_Operand(x).spec(blocks) for x in outputs),
        out_shape=outputs,
        input_output_aliases={len(of_rows) + len(inputs) - 1: 0} if reuses_last else {},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=settings.interpret,
        name=kernel.__name__.strip("_"),
    )(*of_rows, *(x.array for x in inputs))


class _Side(NamedTuple):
    """The queries [q, 1] or keys [1, k] of a block."""

    positions: Int[Array, "q k"]
    segments: Int[Array, "q k"]
    words: UInt32[Array, "q k"]
    """Of dropout."""


@dataclass(frozen=True)
class _RowAndHead:
    """What all blocks of scores of a row and head share."""

    settings: KernelSettings
    length: int
    """S."""
    scale: float
    segments_ref: Any
    """int32 [S]; -1 is padding."""
    first_key_ref: Any
    """uint32 [1]: the row's key of the first words of dropout."""
    second_words_ref: Any
    """uint32 [S]: of dropout."""
    head: Array

    @property
    def log2_scale(self) -> float:
        """Makes exponents of base 2 from products of queries and keys."""
        return self.scale * math.log2(math.e)

    @property
    def kept_share(self) -> float:
        """Of the probabilities; the kernels divide by it at the end."""
        return 1.0 - self.settings.dropout_rate

    def power(self, products_qk: Array, offset_q1: Array) -> Array:
        """2 to the power of `products_qk * log2_scale - offset_q1`, subnormal results as 0."""
        return power_of_two(products_qk, self.log2_scale, offset_q1, self.settings.interpret)

    def queries(self, block: Array) -> _Side:
        """A block of queries."""
        positions_q1 = block * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
        words_q1 = first_words(self.head * self.length + positions_q1, self.first_key_ref[0])
        segments_q1 = jnp.maximum(self.segments_ref[_at(block)], 0)[:, None]
        return _Side(positions_q1, segments_q1, words_q1)

    def keys(self, block: Array) -> _Side:
        """A block of keys."""
        positions_1k = block * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)
        return _Side(positions_1k, self.segments_ref[_at(block)][None, :], self.second_words_ref[_at(block)][None, :])

    def bits(self, queries: _Side, keys: _Side) -> UInt32[Array, "q k"] | None:
        """Of dropout; None without."""
        return None if self.settings.dropout_rate == 0.0 else dropout_bits(queries.words, keys.words)

    def allowed(self, queries: _Side, keys: _Side) -> Bool[Array, "q k"]:
        """`allowed_pairs` of two blocks."""
        return allowed_pairs(self.settings, queries.segments, keys.segments, queries.positions, keys.positions)

    def dropped(self, x_qk: Array, bits_qk: Array | None) -> Array:
        """`dropout` of a block of an array [B, N, S, S], times `kept_share`."""
        if bits_qk is None:
            return x_qk
        return zero_dropped(x_qk, bits_qk, self.settings.dropout_rate, self.settings.interpret)

    def backward(
        self,
        sides: tuple[_Side, _Side],
        query_qD: Array,
        gradient_qD: Array,
        log_sums_q: Array,
        means_q: Array,
        key_kD: Array,
        value_kD: Array,
    ) -> tuple[Array, Array]:
        """Probabilities after dropout, and the gradient of the scores, [q, k], both times `kept_share`."""
        probabilities_qk = self.power(product(query_qD, key_kD.T), log_sums_q[:, None])
        probabilities_qk, bits_qk = jnp.where(self.allowed(*sides), probabilities_qk, 0.0), self.bits(*sides)
        gradient_qk = self.dropped(product(gradient_qD, value_kD.T), bits_qk)
        return self.dropped(probabilities_qk, bits_qk), probabilities_qk * (gradient_qk - means_q[:, None])


def _at(block: Array) -> Any:
    return pl.ds(block * BLOCK, BLOCK)


def _forward_kernel(make_shared, range_ref, query_ref, key_ref, value_ref, context_ref, log_sums_ref):
    """A block of queries against all its blocks of keys, with the sums of the softmax so far."""
    shared, query_qD = make_shared(), query_ref[...]
    queries, factor = shared.queries(pl.program_id(2)), shared.log2_scale

    def add_block(key_block, carry):
        context_qD, largest_q1, sums_q1 = carry
        keys = shared.keys(key_block)
        products_qk = product(query_qD, key_ref[_at(key_block), :].T)
        products_qk = jnp.where(shared.allowed(queries, keys), products_qk, FLOOR)
        new_largest_q1 = jnp.maximum(largest_q1, products_qk.max(1, keepdims=True))
        correction_q1 = shared.power(largest_q1 - new_largest_q1, zeros_q1)
        weights_qk = shared.power(products_qk, new_largest_q1 * factor)
        dropped_qk = shared.dropped(weights_qk, shared.bits(queries, keys)).astype(query_qD.dtype)
        context_qD = context_qD * correction_q1 + product(dropped_qk, value_ref[_at(key_block), :])
        return context_qD, new_largest_q1, sums_q1 * correction_q1 + weights_qk.sum(1, keepdims=True)

    zeros_q1 = jnp.zeros((BLOCK, 1), jnp.float32)
    start = jnp.zeros(query_qD.shape, jnp.float32), zeros_q1 + SMALLEST, zeros_q1
    context_qD, largest_q1, sums_q1 = jax.lax.fori_loop(range_ref[0], range_ref[1], add_block, start)
    sums_q1 = jnp.where(sums_q1 > 0, sums_q1, 1.0)  # padding has no keys
    context_ref[...] = (context_qD / (sums_q1 * shared.kept_share)).astype(context_ref.dtype)
    log_sums_ref[...] = (largest_q1 * factor + jnp.log2(sums_q1)).reshape(BLOCK)


def _query_gradient_kernel(
    make_shared, range_ref, query_ref, key_ref, value_ref, gradient_ref, context_ref, log_sums_ref, *outputs
):
    """The gradient of a block of queries, the mean gradients of their probabilities, times `kept_share`; and the sum of
    the gradient, if there is a bias."""
    total_ref, means_ref, *sums_ref = outputs
    shared, query_qD, gradient_qD = make_shared(), query_ref[...], gradient_ref[...]
    queries, log_sums_q = shared.queries(pl.program_id(2)), log_sums_ref[...]
    # The product of a context vector and its gradient is the mean that the softmax's gradient subtracts.
    means_q = (gradient_qD.astype(jnp.float32) * context_ref[...].astype(jnp.float32)).sum(1) * shared.kept_share
    means_ref[...] = means_q

    def add_block(key_block, sum_qD):
        key_kD, value_kD = key_ref[_at(key_block), :], value_ref[_at(key_block), :]
        sides = queries, shared.keys(key_block)
        _, gradient_qk = shared.backward(sides, query_qD, gradient_qD, log_sums_q, means_q, key_kD, value_kD)
        return sum_qD + product(gradient_qk.astype(key_kD.dtype), key_kD)

    zeros_qD = jnp.zeros(query_qD.shape, jnp.float32)
    sum_qD = jax.lax.fori_loop(range_ref[0], range_ref[1], add_block, zeros_qD)
    _write(total_ref, sums_ref, (QUERY,), (sum_qD * (shared.scale / shared.kept_share),))


def _key_gradient_kernel(
    make_shared,
    range_ref,
    query_ref,
    key_ref,
    value_ref,
    gradient_ref,
    log_sums_ref,
    means_ref,
    _,
    total_ref,
    *sums_ref,
):
    """The gradients of a block of keys and of its values; and their sums, if there is a bias."""
    shared, key_kD, value_kD = make_shared(), key_ref[...], value_ref[...]
    keys = shared.keys(pl.program_id(2))

    def add_block(query_block, sums):
        query_qD, gradient_qD = query_ref[_at(query_block), :], gradient_ref[_at(query_block), :]
        log_sums_q, means_q = log_sums_ref[_at(query_block)], means_ref[_at(query_block)]
        sides = shared.queries(query_block), keys
        dropped_qk, gradient_qk = shared.backward(sides, query_qD, gradient_qD, log_sums_q, means_q, key_kD, value_kD)
        return (
            sums[0] + product(gradient_qk.astype(query_qD.dtype).T, query_qD),
            sums[1] + product(dropped_qk.astype(query_qD.dtype).T, gradient_qD),
        )

    zeros_kD = jnp.zeros(key_kD.shape, jnp.float32)
    key_sum_kD, value_sum_kD = jax.lax.fori_loop(range_ref[0], range_ref[1], add_block, (zeros_kD, zeros_kD))
    gradients = key_sum_kD * (shared.scale / shared.kept_share), value_sum_kD * (1.0 / shared.kept_share)
    _write(total_ref, sums_ref, (KEY, VALUE), gradients)


def _write(total_ref, sums_ref, parts, gradients):
    """Write the gradients of a block and, if there is a bias, their sums over its positions."""
    for part, gradient in zip(parts, gradients, strict=True):
        total_ref[:, part, :] = gradient.astype(total_ref.dtype)
        for ref in sums_ref:
            ref[0, part - parts[0], :] = gradient.sum(0)
