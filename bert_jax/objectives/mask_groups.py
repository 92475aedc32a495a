"""Words and groups of words: what masking chooses together.

A word starts at a token that does not continue one, at the first token after a special token, and at an example's
start; special tokens belong to no word. A run is a stretch of words that no special token interrupts.

Shapes: B rows, S positions, L longest group in words.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ObjectiveConfig
from bert_jax.shapes import Array, Bool, Float, Int, UInt32


class Words(NamedTuple):
    """The words of a row, each known by the position of its first token."""

    begins: Bool[Array, "B S"]
    """A word's first token is here."""
    opens_run: Bool[Array, "B S"]
    """So is the first token of the first word of a run."""
    first: Int[Array, "B S"]
    """Of an ordinary token: where its word begins. Of other tokens: of no meaning."""
    size: Int[Array, "B S"]
    """Tokens of the word that begins here, else 0."""


def find_words(segment_ids: Int[Array, "B S"], ordinary: Bool[Array, "B S"], continues: Bool[Array, "B S"]) -> Words:
    """Cut rows into words.

    Args:
      segment_ids: example of the row that a token belongs to, 0 for padding.
      ordinary: the token belongs to an example and is not special.
      continues: by its id, the token continues the word before it.
    """
    no = jnp.zeros_like(ordinary[:, :1])
    neighbours = (segment_ids[:, 1:] == segment_ids[:, :-1]) & ordinary[:, :-1]
    follows = jnp.concatenate([no, neighbours], axis=1)
    begins = ordinary & ~(follows & continues)
    here = _positions(begins)
    seq_len = begins.shape[1]
    ends = jnp.where(begins | ~ordinary, here, seq_len)
    ends_later = jnp.concatenate([ends[:, 1:], jnp.full_like(ends[:, :1], seq_len)], axis=1)
    return Words(
        begins=begins,
        opens_run=ordinary & ~follows,
        first=_latest(begins, here),
        size=jnp.where(begins, jax.lax.cummin(ends_later, axis=1, reverse=True) - here, 0),
    )


def group_lengths(objective: ObjectiveConfig) -> Float[np.ndarray, " L"]:
    """Probability of a group of 1, 2, ... L words, before the end of a run cuts it.

    n-grams: in proportion to 1/n (Lan et al. 2020, section 4.1). Spans: p (1 - p)^(n - 1), scaled to sum to 1 over
    the allowed lengths, as SpanBERT's code has it (Joshi et al. 2020, section 3.1; the mass of longer spans is shared
    out, not put on the longest).
    """
    if objective.mask_unit == "ngram":
        weights = 1.0 / np.arange(1, objective.max_ngram + 1)
    elif objective.mask_unit == "span":
        weights = objective.span_rate * (1.0 - objective.span_rate) ** np.arange(objective.max_span)
    else:
        weights = np.ones(1)
    return weights / weights.sum()


def find_groups(words: Words, dice: UInt32[Array, "B S"], lengths: Float[np.ndarray, " L"]) -> Int[Array, "B S"]:
    """Cut each run of words, from its first word on, into consecutive groups of independently drawn lengths.

    Args:
      words: of the rows.
      dice: 32 random bits per position; those at a group's first token decide its length.
      lengths: probability of 1, 2, ... words; a group also ends with its run.

    Returns:
      of an ordinary token: the position of the first token of its group. Of other tokens: of no meaning.
    """
    if len(lengths) == 1:
        return words.first
    here = _positions(words.begins)
    row = jnp.arange(here.shape[0])[:, None]
    # Each word rolls as if a group began at it. Which words really begin one is then a walk from the first word of
    # the run, and doubling the stride makes log2(S) rounds of it: round k carries the mark 2^k groups onwards.
    onward = _next_group(words, _draw(dice, lengths))
    reached = words.opens_run
    for _ in range((here.shape[1] - 1).bit_length()):
        reached = reached.at[row, onward].max(reached)
        onward = jnp.take_along_axis(onward, onward, axis=1)
    return _latest(reached, here)


def _draw(dice: UInt32[Array, "B S"], lengths: Float[np.ndarray, " L"]) -> Int[Array, "B S"]:
    """A length for each position."""
    # One less than the bound, and compared strictly: a bound of 2^32 would not fit in 32 bits.
    bounds = np.round(np.cumsum(lengths)[:-1] * 2**32).astype(np.int64) - 1
    return 1 + (dice[:, :, None] > jnp.asarray(bounds.astype(np.uint32))[None, None, :]).sum(-1, dtype=jnp.int32)


def _next_group(words: Words, length: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Of a word's first token: where the word `length` further on begins, itself if that is not in its run."""
    here = _positions(words.begins)
    seq_len = here.shape[1]
    number = jnp.cumsum(words.begins, axis=1, dtype=jnp.int32) - 1
    row = jnp.arange(here.shape[0])[:, None]
    begin_of = jnp.zeros_like(here).at[row, jnp.where(words.begins, number, seq_len)].set(here, mode="drop")
    target = jnp.take_along_axis(begin_of, number + length, axis=1, mode="fill", fill_value=0)
    run = jnp.cumsum(words.opens_run, axis=1, dtype=jnp.int32)
    # A word number that does not exist leads to 0, which is never ahead.
    inside = words.begins & (target > here) & (jnp.take_along_axis(run, target, axis=1) == run)
    return jnp.where(inside, target, here)


def _positions(like: Array) -> Int[Array, "B S"]:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, 1)


def _latest(marks: Bool[Array, "B S"], here: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The last marked position up to each one; 0 before the first."""
    return jax.lax.cummax(jnp.where(marks, here, 0), axis=1)
