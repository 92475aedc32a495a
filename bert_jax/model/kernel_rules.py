"""What the attention kernels for GPUs and TPUs have in common: settings, masks, dropout and products of their blocks.

Shapes in names: q and k: queries and keys of a block.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float, Int, UInt32
from bert_jax.model.layers import DropoutKey, dropout_bits, dropout_row_keys, dropout_threshold

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


def row_keys(dropout_key: DropoutKey | None, rows: int) -> UInt32[Array, "B 2"]:
    """The two keys of dropout of every row; zeros, which are not used, without dropout."""
    if dropout_key is None:
        return jnp.zeros((rows, 2), jnp.uint32)
    return jnp.stack(dropout_row_keys(dropout_key), axis=1)


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
    length: int,
    head: Array,
    query_positions: Int[Array, "q k"],
    key_positions: Int[Array, "q k"],
    keys: tuple[Array, Array],
) -> Bool[Array, "q k"]:
    """Which elements `layers.dropout` keeps of a block of an array [B, N, S, S], whose rows have these keys."""
    flat_qk = (head * length + query_positions) * length + key_positions
    return dropout_bits(flat_qk.astype(jnp.uint32), *keys) >= dropout_threshold(rate)


def drop(x: Float[Array, "q k"], kept: Bool[Array, "q k"], rate: float) -> Float[Array, "q k"]:
    """`layers.dropout` of a block, float32."""
    return jnp.where(kept, x * (1.0 / (1.0 - rate)), 0.0)


def product(first: Array, second: Array, axes: tuple[int, int] = (1, 0)) -> Float[Array, "m n"]:
    """The sum over an axis of each of two matrices, in float32, whose factors compilers of kernels would round."""
    exact = jax.lax.Precision.HIGHEST if first.dtype == jnp.float32 else None
    contracted = tuple((axis,) for axis in axes)
    return jax.lax.dot_general(first, second, (contracted, ((), ())), exact, jnp.float32)
