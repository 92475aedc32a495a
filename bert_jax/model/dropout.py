"""Dropout whose random bits are a function of (seed, step, layer, site, row, position)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bert_jax.array_types import Array, Float, Int, UInt32


def hash32(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijective hash of 32-bit words: the finaliser of MurmurHash3 (A. Appleby, public domain)."""
    # Operations of lax are traced in 0.4 of the time of those of jax.numpy, and a step has hundreds.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = lax.mul(lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift))), np.uint32(factor))
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(16)))


def hash_combine(key: UInt32[Array, "..."], *words: Array | int) -> UInt32[Array, "..."]:
    """A 32-bit key derived from a key and words, whose order matters."""
    for word in words:
        key *= jnp.uint32(0x9E3779B1)
        key = hash32(key + hash32(jnp.asarray(word).astype(jnp.uint32) + jnp.uint32(0x7F4A7C15)))
    return key


class DropoutKey(NamedTuple):
    """The source of dropout's random bits: a counter hash of (seed, step, layer, site, global row, position).

    The bits depend neither on the mesh nor on the split into micro-batches, and are never stored.
    """

    key: UInt32[Array, ""]
    """Hash of seed and step."""
    rows: Int[Array, " B"]
    """Index of each row within the global batch."""
    site: UInt32[Array, ""] | np.uint32 = np.uint32(0)
    """Hash of layer and site."""

    def fold_in(self, *words: Array | int) -> "DropoutKey":
        """The key of a layer or a site, as in ``dropout_key.fold_in(layer).fold_in(SITE)``."""
        return self._replace(site=hash_combine(jnp.uint32(self.site), *words))


class Selection(NamedTuple):
    """Which elements of an axis an array has, if it does not have all."""

    axis: int
    positions: Int[Array, "B M"]
    """In the whole array, for each row."""
    size: int
    """Of the axis in the whole array."""


def dropout(
    x: Float[Array, "B ..."], rate: float, dropout_key: DropoutKey | None, selection: Selection | None = None
) -> Float[Array, "B ..."]:
    """Set a share `rate` of x to zero and scale the rest by 1 / (1 - rate); with None as the key, return x.

    The 32 bits of an element mix two words (`dropout_words`). The rate is exact to 2e-10, because it is a threshold on
    32 bits.

    Args:
      x: an array, or the selected part of one; its elements get the bits that they have in the whole array.
      rate: share of zeros.
      dropout_key: source of the bits.
      selection: which part x is.
    """
    if dropout_key is None or rate == 0.0:
        return x
    keep = dropout_bits(*dropout_words(dropout_key, x.shape, selection)) >= dropout_threshold(rate)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def dropout_words(
    dropout_key: DropoutKey, shape: tuple[int, ...], selection: Selection | None = None
) -> tuple[UInt32[Array, "B ... 1"], UInt32[Array, "B ... W"]]:
    """The two words of every element of an array of this shape: of its place in all but the last axis, and in the last.

    They are a hash of the place and a key of the row; all sites of a step have the second words in common.
    """
    whole = list(shape)
    if selection is not None:
        whole[selection.axis] = selection.size
    place = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in range(1, len(shape) - 1):
        if selection is not None and axis == selection.axis:
            index = selection.positions.astype(jnp.uint32).reshape(shape[0], *_keep_axis(shape, axis)[1:])
        else:
            index = jax.lax.broadcasted_iota(jnp.uint32, _keep_axis(shape, axis), axis)
        place += index * jnp.uint32(math.prod(whole[axis + 1 : -1]))
    first_key, second_key = (key.reshape(-1, *(1,) * (len(shape) - 1)) for key in dropout_row_keys(dropout_key))
    last = len(shape) - 1
    last_place = jax.lax.broadcasted_iota(jnp.uint32, _keep_axis(shape, last), last)
    # The barrier keeps the hash of second words out of loops over all elements.
    return place_word(place, first_key), jax.lax.optimization_barrier(place_word(last_place, second_key))


def dropout_row_keys(dropout_key: DropoutKey) -> tuple[UInt32[Array, " B"], UInt32[Array, " B"]]:
    """The keys of every row, of first and of second words."""
    first = hash_combine(dropout_key.key, 1, dropout_key.site, dropout_key.rows)
    return first, hash_combine(dropout_key.key, 2, dropout_key.rows)


def place_word(place: UInt32[Array, "..."], row_key: Array) -> UInt32[Array, "..."]:
    """The word of a place in a row that has this key."""
    return hash32(place + row_key)


def dropout_bits(first: UInt32[Array, "..."], second: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of elements with these words.

    One multiplication is not enough: four elements at the corners of a rectangle would depend on each other
    (tests/model/test_dropout_statistics.py).
    """
    mixed = (first ^ second) * jnp.uint32(0x9E3779B1)
    return (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)


def dropout_threshold(rate: float) -> np.uint32:
    """An element is kept if its bits are at least this."""
    return np.uint32(round(rate * 2**32))


def _keep_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape with all other axes of size 1."""
    return tuple(size if i == axis else 1 for i, size in enumerate(shape))
