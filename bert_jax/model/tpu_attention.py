"""Attention as Pallas kernels for TPUs: scores and dropout masks exist only for a block of queries, in vector memory.

A block of queries meets all keys that it can attend to at once, because the keys and values of a row of at most 1,024
tokens fit into vector memory. So the backward pass needs no statistics of the forward pass: it computes the softmax
again. Packed examples, local windows and dropout as in `gpu_attention`: the same bits as those of the `reference`
attention, mixed again in the backward pass. With a local window, the cost is linear in the row length. Queries, keys
and values are read where their projection wrote them.

Shapes in names: B rows, S positions, N heads of size D; q: queries of a block; k: the keys that they can attend to.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.array_types import Array, Bool, Float, Int
from bert_jax.config.sections import TPU_ATTENTION_BLOCK as LANES
from bert_jax.model.dropout import DropoutKey, dropout_bits, dropout_threshold
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
from bert_jax.model.layers import SAVED, add_bias

MAX_SCORES = 2**17
"""Scores of a step of the grid, of all its heads: 512 KiB in float32, of which a step holds several."""
MAX_ROW = 2**17
"""Elements of a row's keys, of all heads of a step of the grid, which holds several such arrays."""


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
    """Context vectors; those of padding are 0. Arguments as of `gpu_attention.kernel_attention`, but for the shapes.

    Args:
      projected: S is a multiple of `TPU_ATTENTION_BLOCK` and at most `TPU_ATTENTION_MAX_LENGTH`; D is one of
        `KERNEL_HEAD_SIZES`, and N x D a multiple of 128. All heads are side by side: an array whose last axis is a head
        of 64 would take twice its size in memory.
      segment_ids, num_heads, before, after, dropout_rate, dropout_key, bias, interpret: as there.
    """
    rate = 0.0 if dropout_key is None else dropout_rate
    settings = KernelSettings(num_heads, before, after, rate, interpret)
    rows, length = segment_ids.shape
    context = _attention(settings, projected, bias, (segment_ids, *dropout_operands(dropout_key, rows, length)))
    return context.reshape(rows, length, num_heads, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: KernelSettings, projected: Float[Array, "B S W"], bias: Float[Array, " W"] | None, of_rows: OfRows
) -> Float[Array, "B S ND"]:
    return _forward(settings, projected, bias, of_rows)[0]


def _forward(settings, projected, bias, of_rows):
    projected = add_bias(projected, bias)
    inputs = (projected, "b", 0), (projected, "r", 1), (projected, "r", 2)
    # The backward pass needs the context for the gradient of the product after it; its own kernel does not.
    (context,) = _call(_forward_kernel, settings, of_rows, inputs, 1)
    return checkpoint_name(context, SAVED), (projected, bias, of_rows)


def _backward(settings, residuals, gradient):
    projected, bias, of_rows = residuals
    inputs = (projected, "b", 0), (projected, "r", 1), (projected, "r", 2), (gradient, "b", 0)
    total, sums = _call(_backward_kernel, settings, of_rows, inputs, 3)
    return total, None if bias is None else sums.sum(0).reshape(-1), None


_attention.defvjp(_forward, _backward)


def _call(
    kernel: Any,
    settings: KernelSettings,
    of_rows: OfRows,
    inputs: tuple[tuple[Array, str, int], ...],
    parts: int,
) -> Sequence[Array]:
    """Run a kernel on every block of queries of every row, for several heads at a time.

    Args:
      kernel: takes what its heads share, references to inputs [q or S, heads x D], outputs, and scratch memory.
      settings: of the kernel.
      of_rows: segment ids, and `dropout_operands`.
      inputs: arrays [B, S, parts x N x D]; a letter: "b", the kernel reads its block of queries, or "r", the whole row;
        and the part that it reads.
      parts: of the output [B, S, parts x N x D]. Of one, the kernel writes its block of queries. It copies several to
        memory itself, because one array cannot have blocks in several places; and its second output are their sums over
        S, [B, parts, N x D], float32.
    """
    array = inputs[0][0]
    batch, length, all_heads = array.shape[0], array.shape[1], array.shape[2] // 3
    size = all_heads // settings.num_heads
    queries, width = _block_sizes(length, settings.before, settings.after)
    heads = _heads_of_a_step(settings.num_heads, size, queries * width, length)

    def spec(kind: str, part: int = 0) -> pl.BlockSpec:
        first = part * settings.num_heads // heads
        if kind == "b":
            return pl.BlockSpec((None, queries, heads * size), lambda b, n, i: (b, i, first + n))
        return pl.BlockSpec((None, length, heads * size), lambda b, n, i: (b, 0, first + n))

    def body(*refs):
        kernel(_Block(settings, length, queries, width, heads, size, *refs[:3]), *refs[3:])

    places, scratch = [spec("b")], []
    outputs = [jax.ShapeDtypeStruct((batch, length, parts * all_heads), array.dtype)]
    if parts > 1:
        of_row = length, heads * size
        sums = pl.BlockSpec((None, parts, heads * size), lambda b, n, i: (b, 0, n))
        places = [pl.BlockSpec(memory_space=pl.ANY), sums]
        outputs.append(jax.ShapeDtypeStruct((batch, parts, all_heads), jnp.float32))
        scratch = [pltpu.VMEM((2, *of_row), jnp.float32), pltpu.VMEM((2, parts, *of_row), array.dtype)]
        scratch.append(pltpu.SemaphoreType.DMA((2, parts)))
    segment_ids, first_keys, second_words = of_rows
    segment_ids = jnp.where(segment_ids > 0, segment_ids, -1)
    return pl.pallas_call(
        body,
        grid=(batch, settings.num_heads // heads, length // queries),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *[pl.BlockSpec((None, 1, length), lambda b, n, i: (b, 0, 0))] * 2,
            *(spec(kind, part) for _, kind, part in inputs),
        ],
        out_specs=places,
        out_shape=outputs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=settings.interpret,
        name=kernel.__name__.strip("_"),
    )(first_keys, second_words[:, None, :], segment_ids[:, None, :], *(x for x, _, _ in inputs))


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
    """int32 [1, S]; -1 is padding."""

    def first_key(self) -> Array | int:
        """Position of the first of the keys: a multiple of the lanes."""
        if self.width == self.length:
            return 0
        reach = -(-(self.settings.before or 0) // LANES) * LANES
        first = pl.program_id(2) * self.queries - reach
        return pl.multiple_of(jnp.clip(first, 0, self.length - self.width), LANES)

    def query_positions(self) -> Int[Array, "q 1"]:
        """Of the queries."""
        return pl.program_id(2) * self.queries + jax.lax.broadcasted_iota(jnp.int32, (self.queries, 1), 0)

    def key_positions(self) -> Int[Array, "1 k"]:
        """Of the keys."""
        return self.first_key() + jax.lax.broadcasted_iota(jnp.int32, (1, self.width), 1)

    @property
    def kept_share(self) -> float:
        """Of the probabilities; the kernels divide by it at the end."""
        return 1.0 - self.settings.dropout_rate

    def lanes(self, head: int) -> slice:
        """Where the values of a head are."""
        return slice(head * self.size, (head + 1) * self.size)

    def keys(self) -> Any:
        """Where the keys are in a row."""
        return pl.ds(self.first_key(), self.width)

    def allowed(self) -> Bool[Array, "q k"]:
        """`allowed_pairs` of the block."""
        first_query = pl.multiple_of(pl.program_id(2) * self.queries, LANES)
        query_segments_q1 = jnp.maximum(self.segments_ref[:, pl.ds(first_query, self.queries)].T, 0)
        key_segments_1k = self.segments_ref[:, self.keys()]
        positions = self.query_positions(), self.key_positions()
        return allowed_pairs(self.settings, query_segments_q1, key_segments_1k, *positions)

    def kept(self, head: int) -> Bool[Array, "q k"] | bool:
        """What `dropout` keeps of the block of an array [B, N, S, S] that belongs to a head."""
        rate = self.settings.dropout_rate
        if rate == 0.0:
            return True
        head_of_all = pl.program_id(1) * self.heads + head
        first_key = self.first_keys_ref[pl.program_id(0)]
        words_q1 = first_words(head_of_all * self.length + self.query_positions(), first_key)
        return dropout_bits(words_q1, self.second_words_ref[:, self.keys()]) >= dropout_threshold(rate)

    def weights(self, query_qD: Array, key_kD: Array, allowed_qk: Array) -> tuple[Float[Array, "q k"], Array]:
        """Weights and their sums [q, 1], float32; their quotients are the softmax, 0 for queries of padding."""
        scores_qk = jnp.where(allowed_qk, product(query_qD, key_kD, (1, 1)) * self.size**-0.5, FLOOR)
        weights_qk = jnp.exp(scores_qk - jnp.maximum(scores_qk.max(1, keepdims=True), SMALLEST))
        sums_q1 = weights_qk.sum(1, keepdims=True)
        return weights_qk, jnp.where(sums_q1 > 0, sums_q1, 1.0)


def _forward_kernel(block, query_ref, key_ref, value_ref, context_ref):
    """The context vectors of a block of queries."""
    allowed_qk = block.allowed()
    for head in range(block.heads):
        lanes = block.lanes(head)
        weights_qk, sums_q1 = block.weights(query_ref[:, lanes], key_ref[block.keys(), lanes], allowed_qk)
        dropped_qk = jnp.where(block.kept(head), weights_qk, 0.0).astype(value_ref.dtype)
        context_qD = product(dropped_qk, value_ref[block.keys(), lanes]) / (sums_q1 * block.kept_share)
        context_ref[:, lanes] = context_qD.astype(context_ref.dtype)


def _add_block(block, refs, query_gradient_ref, sums_ref, totals_ref):
    """Write the gradient of a block of queries, and add to the sums of keys and values; see `_backward_kernel`."""
    query_ref, key_ref, value_ref, gradient_ref = refs
    allowed_qk, keys = block.allowed(), block.keys()
    queries = pl.ds(pl.multiple_of(pl.program_id(2) * block.queries, LANES), block.queries)
    for head in range(block.heads):
        lanes, kept_qk = block.lanes(head), block.kept(head)
        query_qD, gradient_qD = query_ref[:, lanes], gradient_ref[:, lanes]
        key_kD, value_kD = key_ref[keys, lanes], value_ref[keys, lanes]
        weights_qk, sums_q1 = block.weights(query_qD, key_kD, allowed_qk)
        probabilities_qk = weights_qk * (1.0 / (sums_q1 * block.kept_share))
        # The gradient of the probabilities, times `kept_share`.
        gradient_qk = jnp.where(kept_qk, product(gradient_qD, value_kD, (1, 1)), 0.0)
        mean_q1 = (probabilities_qk * gradient_qk).sum(1, keepdims=True) * block.kept_share
        scores_gradient_qk = (probabilities_qk * (gradient_qk - mean_q1)).astype(query_qD.dtype)
        query_gradient_qD = product(scores_gradient_qk, key_kD) * block.size**-0.5
        query_gradient_ref[queries, lanes] = query_gradient_qD.astype(query_gradient_ref.dtype)
        sums_ref[0:1, lanes] += query_gradient_qD.sum(0, keepdims=True)
        totals_ref[0, keys, lanes] += product(scores_gradient_qk, query_qD, (0, 0))
        dropped_qk = jnp.where(kept_qk, probabilities_qk, 0.0).astype(gradient_qD.dtype)
        totals_ref[1, keys, lanes] += product(dropped_qk, gradient_qD, (0, 0))


def _backward_kernel(
    block,
    query_ref,
    key_ref,
    value_ref,
    gradient_ref,
    projected_gradient_ref,
    sums_ref,
    totals_ref,
    written_ref,
    semaphores,
):
    """The gradient of a block of queries, and what the block adds to those of the row's keys and values.

    Those of some heads of a row, complete after its last block, are copied to memory while the next heads are computed.

    Args:
      block, query_ref, key_ref, value_ref, gradient_ref: of the step.
      projected_gradient_ref: [B, S, 3 x N x D], in the memory of the device.
      sums_ref: of the gradients of the row's queries, keys and values, over its positions.
      totals_ref: gradients of the row's keys and values.
      written_ref: two places for gradients of queries, keys and values: those of other heads may not be copied yet.
      semaphores: of the copies, by place and part.
    """
    first, last = pl.program_id(2) == 0, pl.program_id(2) == pl.num_programs(2) - 1
    row, step, steps = pl.program_id(0), pl.program_id(1), block.settings.num_heads // block.heads
    width, place = block.heads * block.size, step % 2

    def copies(step):
        for part in range(3):
            columns = pl.ds(pl.multiple_of((part * steps + step) * width, LANES), width)
            to = projected_gradient_ref.at[row, :, columns]
            yield pltpu.make_async_copy(written_ref.at[step % 2, part], to, semaphores.at[step % 2, part])

    def wait_for(step):
        for copy in copies(step):
            copy.wait()

    @pl.when(first)
    def _():
        totals_ref[...] = jnp.zeros(totals_ref.shape, totals_ref.dtype)
        sums_ref[...] = jnp.zeros(sums_ref.shape, sums_ref.dtype)
        pl.when(step >= 2)(lambda: wait_for(step - 2))

    refs = query_ref, key_ref, value_ref, gradient_ref
    _add_block(block, refs, written_ref.at[place, 0], sums_ref, totals_ref)

    @pl.when(last)
    def _():
        for part, gradient in (1, totals_ref[0] * block.size**-0.5), (2, totals_ref[1]):
            written_ref[place, part] = gradient.astype(written_ref.dtype)
            sums_ref[part : part + 1, :] = gradient.sum(0, keepdims=True)
        for copy in copies(step):
            copy.start()
        if steps > 1:
            pl.when(step == steps - 1)(lambda: wait_for(step - 1))
        pl.when(step == steps - 1)(lambda: wait_for(step))
