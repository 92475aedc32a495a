"""What the attention kernels for GPUs and TPUs have in common: settings, masks, words of dropout and products.

Shapes in names: q and k: queries and keys of a block.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float, Int, UInt32
from bert_jax.model.dropout import DropoutKey, dropout_row_keys, place_word

FLOOR = float(jnp.finfo(jnp.float32).min) / 2
"""Score of a masked pair. Finite, so that the difference of two of them is not NaN."""
SMALLEST = -1e30
"""The lowest largest score of a query. It is far above FLOOR, so that the weight of a masked pair is 0."""
OfRows = tuple[Int[Array, "B S"], UInt32[Array, " B"], UInt32[Array, "B S"]]
"""Segment ids, and `dropout_operands`."""


@dataclass(frozen=True)
class KernelSettings:
    """What a kernel is compiled for."""

    num_heads: int
    before: int | None
    after: int | None
    dropout_rate: float
    interpret: bool


def dropout_operands(
    dropout_key: DropoutKey | None, rows: int, length: int
) -> tuple[UInt32[Array, " B"], UInt32[Array, "B S"]]:
    """The key of every row's first words, and its second words; zeros, which are not used, without dropout."""
    if dropout_key is None:
        return jnp.zeros((rows,), jnp.uint32), jnp.zeros((rows, length), jnp.uint32)
    first_keys, second_keys = dropout_row_keys(dropout_key)
    return first_keys, place_word(jnp.arange(length, dtype=jnp.uint32)[None], second_keys[:, None])


def allowed_pairs(
    settings: KernelSettings,
    query_segments: Int[Array, "q 1"],
    key_segments: Int[Array, "1 k"],
    query_positions: Int[Array, "q 1"],
    key_positions: Int[Array, "1 k"],
) -> Bool[Array, "q k"]:
    """Where a query may attend to a key: `make_attention_mask`, but for the queries of padding, which have no keys.

    The segments of keys of padding are -1 and those of such queries 0, so that they differ.
    """
    allowed_qk = query_segments == key_segments
    if settings.before is not None:
        allowed_qk &= key_positions - query_positions >= -settings.before
    if settings.after is not None:
        allowed_qk &= key_positions - query_positions <= settings.after
    return allowed_qk


def first_words(place: Int[Array, "q 1"], row_key: UInt32[Array, ""]) -> UInt32[Array, "q 1"]:
    """The first words of dropout of an array [B, N, S, S]; place: head times S plus position, of queries."""
    return place_word(place.astype(jnp.uint32), row_key)


def product(first: Array, second: Array, axes: tuple[int, int] = (1, 0)) -> Float[Array, "m n"]:
    """The sum over an axis of each of two matrices, in float32, whose factors compilers of kernels would round."""
    exact = jax.lax.Precision.HIGHEST if first.dtype == jnp.float32 else None
    contracted = tuple((axis,) for axis in axes)
    return jax.lax.dot_general(first, second, (contracted, ((), ())), exact, jnp.float32)
