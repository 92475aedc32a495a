"""What the attention kernels for GPUs and TPUs have in common: settings, masks, dropout and products of their blocks.

Shapes in names: q and k: queries and keys of a block.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float, Int, UInt32
from bert_jax.model.layers import DropoutKey, dropout_bits, dropout_row_keys, dropout_threshold, place_word

FLOOR = float(jnp.finfo(jnp.float32).min) / 2
"""Score of a masked pair. Finite, so that the difference of two of them is not NaN."""


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
    query_positions: Int[Array, "q k"],
    key_positions: Int[Array, "q k"],
) -> Bool[Array, "q k"]:
    """Where a query may attend to a key: `make_attention_mask`, but for the queries of padding, which have no keys."""
    allowed_qk = (query_segments == key_segments) & (key_segments > 0)
    distance_qk = key_positions - query_positions
    if settings.before is not None:
        allowed_qk &= distance_qk >= -settings.before
    if settings.after is not None:
        allowed_qk &= distance_qk <= settings.after
    return allowed_qk


def kept_pairs(
    rate: float,
    place: Int[Array, "q 1"],
    first_key: UInt32[Array, ""],
    second_words: UInt32[Array, "1 k"],
) -> Bool[Array, "q k"]:
    """Which elements `layers.dropout` keeps of a block of an array [B, N, S, S].

    Args:
      rate: share of zeros.
      place: head times S plus position, of the queries.
      first_key, second_words: `dropout_operands` of the row, and of the keys.
    """
    return dropout_bits(place_word(place.astype(jnp.uint32), first_key), second_words) >= dropout_threshold(rate)


def drop(x: Float[Array, "q k"], kept: Bool[Array, "q k"], rate: float) -> Float[Array, "q k"]:
    """`layers.dropout` of a block, float32."""
    return jnp.where(kept, x * (1.0 / (1.0 - rate)), 0.0)


def product(first: Array, second: Array, axes: tuple[int, int] = (1, 0)) -> Float[Array, "m n"]:
    """The sum over an axis of each of two matrices, in float32, whose factors compilers of kernels would round."""
    exact = jax.lax.Precision.HIGHEST if first.dtype == jnp.float32 else None
    contracted = tuple((axis,) for axis in axes)
    return jax.lax.dot_general(first, second, (contracted, ((), ())), exact, jnp.float32)
