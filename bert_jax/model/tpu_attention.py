"""Attention as Pallas kernels for TPUs: scores and dropout masks exist only for a block of queries, in vector memory.

A block of queries meets all keys that it can attend to at once, because the keys and values of a row of at most 1,024
tokens fit into vector memory. So the backward pass needs no statistics of the forward pass: it computes the softmax
again. Packed examples, local windows and dropout as in `gpu_attention`: the same bits as those of the `reference`
attention, hashed again in the backward pass. With a local window, the cost is linear in the row length.

Shapes in names: B rows, S positions, N heads of size D; q: queries of a block; k: the keys that they can attend to.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.array_types import Array, Bool, Float, Int, UInt32
from bert_jax.config.sections import TPU_ATTENTION_BLOCK as LANES
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

MAX_SCORES = 2**17
"""Scores of a step of the grid, of all its heads: 512 KiB in float32, of which a step holds several."""
MAX_ROW = 2**17
"""Elements of a row's keys, of all heads of a step of the grid, which holds several such arrays."""


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
    """Context vectors; those of padding are 0. Arguments as of `gpu_attention.kernel_attention`, but for the shapes.

    Args:
      query, key, value: S is a multiple of `TPU_ATTENTION_BLOCK` and at most `TPU_ATTENTION_MAX_LENGTH`; D is one of
        `KERNEL_HEAD_SIZES`, and N x D a multiple of 128 or less than it.
      segment_ids, before, after, dropout_rate, dropout_key, interpret: as there.
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    settings = KernelSettings(query.shape[2], before, after, rate, interpret)
    # All heads side by side: an array whose last axis is a head of 64 would take twice its size in memory.
    side_by_side = [x.reshape(*x.shape[:2], -1) for x in (query, key, value)]
    dropout = dropout_operands(dropout_key, *query.shape[:2])
    return _attention(settings, *side_by_side, segment_ids, dropout).reshape(query.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: KernelSettings,
    query: Float[Array, "B S ND"],
    key: Float[Array, "B S ND"],
    value: Float[Array, "B S ND"],
    segment_ids: Int[Array, "B S"],
    dropout: tuple[UInt32[Array, " B"], UInt32[Array, "B S"]],
) -> Float[Array, "B S ND"]:
    return _forward(settings, query, key, value, segment_ids, dropout)[0]


def _forward(settings, query, key, value, segment_ids, dropout):
    (context,) = _call(_forward_kernel, settings, segment_ids, dropout, (query, key, value), "brr", "b")
    return context, (query, key, value, segment_ids, dropout)


def _backward(settings, residuals, gradient):
    query, key, value, segment_ids, dropout = residuals
    inputs = query, key, value, gradient
    return (*_call(_backward_kernel, settings, segment_ids, dropout, inputs, "brrb", "brr"), None, None)


_attention.defvjp(_forward, _backward)


def _call(
    kernel: Any,
    settings: KernelSettings,
    segment_ids: Int[Array, "B S"],
    dropout: tuple[UInt32[Array, " B"], UInt32[Array, "B S"]],
    inputs: tuple[Array, ...],
    kinds: str,
    output_kinds: str,
) -> tuple[Array, ...]:
    """Run a kernel on every block of queries of every row, for several heads at a time.

    Args:
      kernel: takes what its heads share, references to inputs and outputs [q or S, heads x D], and scratch references.
      settings: of the kernel.
      segment_ids, dropout: of the rows; `dropout_operands`.
      inputs: arrays [B, S, N x D].
      kinds: a letter for each input: "b", the kernel reads its block of queries, or "r", the whole row.
      output_kinds: the same for the outputs, which have the shape of the inputs. Blocks of one row run in order.
    """
    batch, length, all_heads = inputs[0].shape
    size = all_heads // settings.num_heads
    queries, width = _block_sizes(length, settings.before, settings.after)
    heads = _heads_of_a_step(settings.num_heads, size, queries * width, length)
    specs = {
        "b": pl.BlockSpec((None, queries, heads * size), lambda b, n, i: (b, i, n)),
        "r": pl.BlockSpec((None, length, heads * size), lambda b, n, i: (b, 0, n)),
    }

    def body(*refs):
        kernel(_Block(settings, length, queries, width, heads, size, *refs[:3]), *refs[3:])

    return pl.pallas_call(
        body,
        grid=(batch, settings.num_heads // heads, length // queries),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *[pl.BlockSpec((None, 1, length), lambda b, n, i: (b, 0, 0))] * 2,
            *(specs[kind] for kind in kinds),
        ],
        out_specs=tuple(specs[kind] for kind in output_kinds),
        out_shape=tuple(jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype) for _ in output_kinds),
        scratch_shapes=[pltpu.VMEM((length, heads * size), jnp.float32) for kind in output_kinds if kind == "r"],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=settings.interpret,
        name=kernel.__name__.strip("_"),
    )(dropout[0], dropout[1][:, None, :], segment_ids[:, None, :], *inputs)


def _block_sizes(length: int, before: int | None, after: int | None) -> tuple[int, int]:
    """Queries of a block, and the number of keys that any of its queries can attend to."""
    reach = sum(length if tokens is None else -(-tokens // LANES) * LANES for tokens in (before, after))
    for queries in (2 * LANES, LANES):
        width = min(length, queries + reach)
        if length % queries == 0 and queries * width <= MAX_SCORES:
            break
    return queries, width


def _heads_of_a_step(num_heads: int, size: int, scores: int, length: int) -> int:
    """Heads of a step of the grid: as many as fit, and all or a multiple of the lanes side by side.

    Args:
      num_heads, size: of the model.
      scores: of a head in a step.
      length: S.
    """
    allowed = [n for n in range(1, num_heads) if num_heads % n == 0 and n * size % LANES == 0] + [num_heads]
    most = min(MAX_SCORES // scores, MAX_ROW // (length * size))
    return max((n for n in allowed if n <= most), default=allowed[0])


@dataclass(frozen=True)
class _Block:
    """What the heads of a block of queries share."""

    settings: KernelSettings
    length: int
    """S."""
    queries: int
    width: int
    """Number of keys."""
    heads: int
    """Number of heads."""
    size: int
    """D."""
    first_keys_ref: Any
    """uint32 [B]: of the first words of dropout."""
    second_words_ref: Any
    """uint32 [1, S]: of dropout."""
    segments_ref: Any
    """int32 [1, S]"""

    def first_key(self) -> Array | int:
        """Position of the first of the keys: a multiple of the lanes."""
        if self.width == self.length:
            return 0
        reach = -(-(self.settings.before or 0) // LANES) * LANES
        first = pl.program_id(2) * self.queries - reach
        return pl.multiple_of(jnp.clip(first, 0, self.length - self.width), LANES)

    def query_positions(self) -> Int[Array, "q k"]:
        """Of the queries, by row."""
        iota = jax.lax.broadcasted_iota(jnp.int32, (self.queries, self.width), 0)
        return pl.program_id(2) * self.queries + iota

    def key_positions(self) -> Int[Array, "q k"]:
        """Of the keys, by column."""
        return self.first_key() + jax.lax.broadcasted_iota(jnp.int32, (self.queries, self.width), 1)

    def lanes(self, head: int) -> slice:
        """Where the values of a head are."""
        return slice(head * self.size, (head + 1) * self.size)

    def keys(self) -> Any:
        """Where the keys are in a row."""
        return pl.ds(self.first_key(), self.width)

    def allowed(self) -> Bool[Array, "q k"]:
        """`allowed_pairs` of the block."""
        first_query = pl.multiple_of(pl.program_id(2) * self.queries, LANES)
        query_segments_q1 = self.segments_ref[:, pl.ds(first_query, self.queries)].T
        key_segments_1k = self.segments_ref[:, self.keys()]
        positions = self.query_positions(), self.key_positions()
        return allowed_pairs(self.settings, query_segments_q1, key_segments_1k, *positions)

    def dropout(self, head: int) -> Callable[[Array], Array]:
        """`layers.dropout` of the block of an array [B, N, S, S] that belongs to a head, as a function of the block."""
        rate = self.settings.dropout_rate
        if rate == 0.0:
            return lambda x_qk: x_qk
        head_of_all = pl.program_id(1) * self.heads + head
        place_q1 = head_of_all * self.length + self.query_positions()[:, :1]
        second_words_1k = self.second_words_ref[:, self.keys()]
        kept_qk = kept_pairs(rate, place_q1, self.first_keys_ref[pl.program_id(0)], second_words_1k)
        return lambda x_qk: drop(x_qk, kept_qk, rate)

    def probabilities(self, query_qD: Array, key_kD: Array, allowed_qk: Array) -> Float[Array, "q k"]:
        """The softmax, float32; 0 for queries of padding."""
        scores_qk = jnp.where(allowed_qk, product(query_qD, key_kD, (1, 1)) * self.size**-0.5, FLOOR)
        weights_qk = jnp.where(allowed_qk, jnp.exp(scores_qk - scores_qk.max(1, keepdims=True)), 0.0)
        sums_q1 = weights_qk.sum(1, keepdims=True)
        return weights_qk / jnp.where(sums_q1 > 0, sums_q1, 1.0)


def _forward_kernel(block, query_ref, key_ref, value_ref, context_ref):
    """The context vectors of a block of queries."""
    allowed_qk = block.allowed()
    for head in range(block.heads):
        lanes = block.lanes(head)
        probabilities_qk = block.probabilities(query_ref[:, lanes], key_ref[block.keys(), lanes], allowed_qk)
        dropped_qk = block.dropout(head)(probabilities_qk).astype(value_ref.dtype)
        context_ref[:, lanes] = product(dropped_qk, value_ref[block.keys(), lanes]).astype(context_ref.dtype)


def _backward_kernel(
    block,
    query_ref,
    key_ref,
    value_ref,
    gradient_ref,
    query_gradient_ref,
    key_gradient_ref,
    value_gradient_ref,
    key_total_ref,
    value_total_ref,
):
    """The gradient of a block of queries, and what the block adds to those of the row's keys and values."""
    first, last = pl.program_id(2) == 0, pl.program_id(2) == pl.num_programs(2) - 1
    totals = (key_total_ref, key_gradient_ref), (value_total_ref, value_gradient_ref)

    @pl.when(first)
    def _():
        for total_ref, _ in totals:
            total_ref[...] = jnp.zeros(total_ref.shape, total_ref.dtype)

    allowed_qk, keys = block.allowed(), block.keys()
    for head in range(block.heads):
        lanes, dropout = block.lanes(head), block.dropout(head)
        query_qD, gradient_qD = query_ref[:, lanes], gradient_ref[:, lanes]
        key_kD, value_kD = key_ref[keys, lanes], value_ref[keys, lanes]
        probabilities_qk = block.probabilities(query_qD, key_kD, allowed_qk)
        gradient_qk = dropout(product(gradient_qD, value_kD, (1, 1)))
        mean_q1 = (probabilities_qk * gradient_qk).sum(1, keepdims=True)
        scores_gradient_qk = (probabilities_qk * (gradient_qk - mean_q1) * block.size**-0.5).astype(query_qD.dtype)
        query_gradient_ref[:, lanes] = product(scores_gradient_qk, key_kD).astype(query_gradient_ref.dtype)
        key_total_ref[keys, lanes] += product(scores_gradient_qk, query_qD, (0, 0))
        dropped_qk = dropout(probabilities_qk).astype(gradient_qD.dtype)
        value_total_ref[keys, lanes] += product(dropped_qk, gradient_qD, (0, 0))

    @pl.when(last)
    def _():
        for total_ref, gradient_ref in totals:
            gradient_ref[...] = total_ref[...].astype(gradient_ref.dtype)
