"""Attention as Pallas kernels for GPUs: scores and dropout masks exist only in blocks, in registers.

Dao 2023 (FlashAttention-2, algorithms 1 and 2), with packed examples, local windows and the dropout of
`layers.dropout`: its bits are hashed again in the backward pass, and are those of the `reference` attention. Blocks of
scores in which no query may attend to a key are skipped, so the cost of a local window is linear in the row length.

Shapes in names: B rows, N heads, S positions, D head size; q and k: queries and keys of a block.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bert_jax.array_types import Array, Float, Int, UInt32
from bert_jax.config.sections import GPU_ATTENTION_BLOCK as BLOCK
from bert_jax.model.kernel_rules import (
    FLOOR,
    KernelSettings,
    allowed_pairs,
    drop,
    dropout_operands,
    kept_pairs,
    product,
)
from bert_jax.model.layers import DropoutKey


def kernel_attention(
    query: Float[Array, "B S N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    segment_ids: Int[Array, "B S"],
    *,
    before: int | None,
    after: int | None,
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    interpret: bool = False,
) -> Float[Array, "B S N D"]:
    """Context vectors; those of padding are 0.

    Args:
      query, key, value: S is a multiple of `GPU_ATTENTION_BLOCK`, D one of `KERNEL_HEAD_SIZES`.
      segment_ids, before, after: as in `make_attention_mask`.
      dropout_rate, dropout_key: of the probabilities; None as the key disables dropout.
      interpret: run the kernels in JAX on any platform, for tests.
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    settings = KernelSettings(query.shape[2], before, after, rate, interpret)
    heads_first = [jnp.moveaxis(x, 2, 1) for x in (query, key, value)]
    dropout = dropout_operands(dropout_key, *query.shape[:2])
    context_BNSD = _attention(settings, *heads_first, segment_ids, dropout)
    return jnp.moveaxis(context_BNSD, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: KernelSettings,
    query: Float[Array, "B N S D"],
    key: Float[Array, "B N S D"],
    value: Float[Array, "B N S D"],
    segment_ids: Int[Array, "B S"],
    dropout: tuple[UInt32[Array, " B"], UInt32[Array, "B S"]],
) -> Float[Array, "B N S D"]:
    return _forward(settings, query, key, value, segment_ids, dropout)[0]


def _forward(settings, query, key, value, segment_ids, dropout):
    ranges, _ = _block_ranges(segment_ids, settings.before, settings.after)
    outputs = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32),
    )
    blocks, whole = (query,), (key, value)
    context, log_sums = _call(
        _forward_kernel, settings, (segment_ids, *dropout, ranges), blocks + whole, "brr", outputs
    )
    return context, (query, key, value, segment_ids, dropout, context, log_sums)


def _backward(settings, residuals, gradient):
    query, key, value, segment_ids, dropout, context, log_sums = residuals
    key_ranges, query_ranges = _block_ranges(segment_ids, settings.before, settings.after)
    products = (gradient.astype(jnp.float32) * context.astype(jnp.float32)).sum(-1, keepdims=True)
    inputs = query, key, value, gradient, log_sums, products
    of_rows = segment_ids, *dropout
    shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    query_gradient = _call(_query_gradient_kernel, settings, (*of_rows, key_ranges), inputs, "brrbbb", shape)
    key_gradients = _call(_key_gradient_kernel, settings, (*of_rows, query_ranges), inputs, "rbbrrr", (shape, shape))
    return query_gradient, *key_gradients, None, None


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


def _call(
    kernel: Any,
    settings: KernelSettings,
    of_rows: tuple[Array, Array, Array, Array],
    inputs: tuple,
    kinds: str,
    outputs: Any,
) -> Any:
    """Run a kernel on every block of every row and head.

    Args:
      kernel: takes a function that makes what its blocks share, then references.
      settings: of the kernel.
      of_rows: segment ids [B, S], `dropout_operands`, and ranges of blocks [B, blocks, 2].
      inputs: arrays [B, N, S, x].
      kinds: a letter for each input: "b", the kernel reads its block, or "r", the whole row.
      outputs: shapes and types of the outputs, of which the kernel writes its block.
    """
    batch, heads, length, size = inputs[0].shape

    def block_spec(x: Any, kind: str = "b") -> pl.BlockSpec:
        if kind == "b":
            return pl.BlockSpec((None, None, BLOCK, x.shape[-1]), lambda b, n, i: (b, n, i, 0))
        return pl.BlockSpec((None, None, length, x.shape[-1]), lambda b, n, i: (b, n, 0, 0))

    def body(segments_ref, first_key_ref, second_words_ref, range_ref, *refs):
        dropout_refs = first_key_ref, second_words_ref
        make_shared = functools.partial(_RowAndHead, settings, length, size**-0.5, segments_ref, *dropout_refs)
        kernel(lambda: make_shared(pl.program_id(1)), range_ref, *refs)

    of_row_specs = [
        pl.BlockSpec((None, length), lambda b, n, i: (b, 0)),
        pl.BlockSpec((1,), lambda b, n, i: (b,)),
        pl.BlockSpec((None, length), lambda b, n, i: (b, 0)),
        pl.BlockSpec((None, None, 2), lambda b, n, i: (b, i, 0)),
    ]
    return pl.pallas_call(
        body,
        grid=(batch, heads, length // BLOCK),
        in_specs=of_row_specs + [block_spec(x, kind) for x, kind in zip(inputs, kinds, strict=True)],
        out_specs=jax.tree.map(block_spec, outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=settings.interpret,
        name=kernel.__name__.strip("_"),
    )(*of_rows, *inputs)


@dataclass(frozen=True)
class _RowAndHead:
    """What all blocks of scores of a row and head share."""

    settings: KernelSettings
    length: int
    """S."""
    scale: float
    segments_ref: Any
    """int32 [S]"""
    first_key_ref: Any
    """uint32 [1]: the row's key of the first words of dropout."""
    second_words_ref: Any
    """uint32 [S]: of dropout."""
    head: Array

    def scores(self, query_qD: Array, key_kD: Array) -> Array:
        """[q, k], float32; not masked."""
        return product(query_qD, key_kD.T) * self.scale

    def allowed(self, query_block: Array, key_block: Array) -> Array:
        """`allowed_pairs` of two blocks."""
        query_segments = self.segments_ref[pl.ds(query_block * BLOCK, BLOCK)][:, None]
        key_segments = self.segments_ref[pl.ds(key_block * BLOCK, BLOCK)][None, :]
        positions = _positions(query_block, 0), _positions(key_block, 1)
        return allowed_pairs(self.settings, query_segments, key_segments, *positions)

    def dropped(self, x_qk: Array, query_block: Array, key_block: Array) -> Array:
        """`layers.dropout` of a block of an array [B, N, S, S]."""
        rate = self.settings.dropout_rate
        if rate == 0.0:
            return x_qk
        position_q1 = query_block * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
        place_q1 = self.head * self.length + position_q1
        second_words_1k = self.second_words_ref[_at(key_block)][None]
        return drop(x_qk, kept_pairs(rate, place_q1, self.first_key_ref[0], second_words_1k), rate)

    def backward(
        self,
        blocks: tuple[Array, Array],
        query_qD: Array,
        gradient_qD: Array,
        log_sums_q1: Array,
        products_q1: Array,
        key_kD: Array,
        value_kD: Array,
    ) -> tuple[Array, Array]:
        """Probabilities after dropout, and the gradient of the scores, both [q, k]; blocks: of queries and keys."""
        scores_qk = self.scores(query_qD, key_kD)
        probabilities_qk = jnp.where(self.allowed(*blocks), jnp.exp(scores_qk - log_sums_q1), 0.0)
        gradient_qk = self.dropped(product(gradient_qD, value_kD.T), *blocks)
        # The product of a context vector and its gradient is the mean that the softmax's gradient subtracts.
        return self.dropped(probabilities_qk, *blocks), probabilities_qk * (gradient_qk - products_q1)


def _positions(block: Array, axis: int) -> Array:
    """Positions of a block of queries (axis 0) or keys (axis 1), int32 [q, k]."""
    return block * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis)


def _at(block: Array) -> Any:
    return pl.ds(block * BLOCK, BLOCK)


def _forward_kernel(make_shared, range_ref, query_ref, key_ref, value_ref, context_ref, log_sums_ref):
    """A block of queries against all its blocks of keys, with the sums of the softmax so far."""
    shared, query_block, query_qD = make_shared(), pl.program_id(2), query_ref[...]

    def add_block(key_block, carry):
        context_qD, largest_q1, sums_q1 = carry
        allowed_qk = shared.allowed(query_block, key_block)
        scores_qk = jnp.where(allowed_qk, shared.scores(query_qD, key_ref[_at(key_block), :]), FLOOR)
        new_largest_q1 = jnp.maximum(largest_q1, scores_qk.max(1, keepdims=True))
        correction_q1 = jnp.exp(largest_q1 - new_largest_q1)
        weights_qk = jnp.where(allowed_qk, jnp.exp(scores_qk - new_largest_q1), 0.0)
        dropped_qk = shared.dropped(weights_qk, query_block, key_block).astype(query_qD.dtype)
        context_qD = context_qD * correction_q1 + product(dropped_qk, value_ref[_at(key_block), :])
        return context_qD, new_largest_q1, sums_q1 * correction_q1 + weights_qk.sum(1, keepdims=True)

    zeros_q1 = jnp.zeros((BLOCK, 1), jnp.float32)
    start = jnp.zeros(query_qD.shape, jnp.float32), zeros_q1 + FLOOR, zeros_q1
    context_qD, largest_q1, sums_q1 = jax.lax.fori_loop(range_ref[0], range_ref[1], add_block, start)
    sums_q1 = jnp.where(sums_q1 > 0, sums_q1, 1.0)  # padding has no keys
    context_ref[...] = (context_qD / sums_q1).astype(context_ref.dtype)
    log_sums_ref[...] = largest_q1 + jnp.log(sums_q1)


def _query_gradient_kernel(
    make_shared,
    range_ref,
    query_ref,
    key_ref,
    value_ref,
    gradient_ref,
    log_sums_ref,
    products_ref,
    query_gradient_ref,
):
    """The gradient of a block of queries."""
    shared, query_block = make_shared(), pl.program_id(2)
    of_queries = query_ref[...], gradient_ref[...], log_sums_ref[...], products_ref[...]

    def add_block(key_block, total_qD):
        key_kD, value_kD = key_ref[_at(key_block), :], value_ref[_at(key_block), :]
        _, gradient_qk = shared.backward((query_block, key_block), *of_queries, key_kD, value_kD)
        return total_qD + product(gradient_qk.astype(key_kD.dtype), key_kD)

    zeros_qD = jnp.zeros(query_gradient_ref.shape, jnp.float32)
    total_qD = jax.lax.fori_loop(range_ref[0], range_ref[1], add_block, zeros_qD)
    query_gradient_ref[...] = (total_qD * shared.scale).astype(query_gradient_ref.dtype)


def _key_gradient_kernel(
    make_shared,
    range_ref,
    query_ref,
    key_ref,
    value_ref,
    gradient_ref,
    log_sums_ref,
    products_ref,
    key_gradient_ref,
    value_gradient_ref,
):
    """The gradients of a block of keys and of its values."""
    shared, key_block = make_shared(), pl.program_id(2)
    key_kD, value_kD = key_ref[...], value_ref[...]

    def add_block(query_block, totals):
        query_qD, gradient_qD, log_sums_q1, products_q1 = (
            ref[_at(query_block), :] for ref in (query_ref, gradient_ref, log_sums_ref, products_ref)
        )
        dropped_qk, gradient_qk = shared.backward(
            (query_block, key_block), query_qD, gradient_qD, log_sums_q1, products_q1, key_kD, value_kD
        )
        return (
            totals[0] + product(gradient_qk.astype(query_qD.dtype).T, query_qD),
            totals[1] + product(dropped_qk.astype(query_qD.dtype).T, gradient_qD),
        )

    zeros_kD = jnp.zeros(key_kD.shape, jnp.float32)
    total_kD, value_total_kD = jax.lax.fori_loop(range_ref[0], range_ref[1], add_block, (zeros_kD, zeros_kD))
    key_gradient_ref[...] = (total_kD * shared.scale).astype(key_gradient_ref.dtype)
    value_gradient_ref[...] = value_total_kD.astype(value_gradient_ref.dtype)
