"""Words and groups of words, which masking chooses as units.

A word starts at a token that does not continue one, at the first token after a special token, and at the start of an
example; special tokens belong to no word. A run is a maximal sequence of words without a special token between them.

Shapes: B rows, S positions, L maximum length of a group in words.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Bool, Float, Int, UInt32
from bert_jax.config import ObjectiveConfig


class Words(NamedTuple):
    """The words of each row. A word is identified by the position of its first token."""

    starts_word: Bool[Array, "B S"]
    """True at the first token of a word."""
    starts_run: Bool[Array, "B S"]
    """True at the first token of the first word of a run."""
    word_start: Int[Array, "B S"]
    """Position of the first token of an ordinary token's word; undefined for other tokens."""
    word_length: Int[Array, "B S"]
    """At the first token of a word: its number of tokens; else 0."""


def find_words(segment_ids: Int[Array, "B S"], ordinary: Bool[Array, "B S"], continues: Bool[Array, "B S"]) -> Words:
    """Split rows into words.

    Args:
      segment_ids: index of the packed example that a token belongs to, 0 for padding.
      ordinary: whether a token belongs to an example and is not special.
      continues: whether a token's id continues the preceding word.
    """
    false = jnp.zeros_like(ordinary[:, :1])
    neighbours = (segment_ids[:, 1:] == segment_ids[:, :-1]) & ordinary[:, :-1]
    follows = jnp.concatenate([false, neighbours], axis=1)
    starts_word = ordinary & ~(follows & continues)
    positions = _positions(starts_word)
    seq_len = starts_word.shape[1]
    boundaries = jnp.where(starts_word | ~ordinary, positions, seq_len)
    later_boundaries = jnp.concatenate([boundaries[:, 1:], jnp.full_like(boundaries[:, :1], seq_len)], axis=1)
    return Words(
        starts_word=starts_word,
        starts_run=ordinary & ~follows,
        word_start=_last_marked(starts_word, positions),
        word_length=jnp.where(starts_word, jax.lax.cummin(later_boundaries, axis=1, reverse=True) - positions, 0),
    )


def group_length_probabilities(objective: ObjectiveConfig) -> Float[np.ndarray, " L"]:
    """Probability of a group of 1, 2, ... L words, before truncation at the end of a run.

    n-grams: proportional to 1/n (Lan et al. 2020, section 4.1). Spans: p (1 - p)^(n - 1), scaled to sum to 1 over
    the allowed lengths, as in SpanBERT's code (Joshi et al. 2020, section 3.1; the mass of longer spans is distributed
    over all lengths, not added to the longest).
    """
    if objective.mask_unit == "ngram":
        weights = 1.0 / np.arange(1, objective.max_ngram + 1)
    elif objective.mask_unit == "span":
        weights = objective.span_rate * (1.0 - objective.span_rate) ** np.arange(objective.max_span)
    else:
        weights = np.ones(1)
    return weights / weights.sum()


def find_groups(
    words: Words, random_bits: UInt32[Array, "B S"], probabilities: Float[np.ndarray, " L"]
) -> Int[Array, "B S"]:
    """Split each run of words, from its first word on, into consecutive groups of independently drawn lengths.

    Args:
      words: words of the rows.
      random_bits: 32 random bits per position; those at a group's first token determine its length.
      probabilities: of 1, 2, ... words; a group also ends at the end of its run.

    Returns:
      position of the first token of an ordinary token's group; undefined for other tokens.
    """
    if len(probabilities) == 1:
        return words.word_start
    positions = _positions(words.starts_word)
    row = jnp.arange(positions.shape[0])[:, None]
    # Each word draws a length as if a group started there. The words that start a group are those on the path from the
    # first word of the run. Pointer doubling takes log2(S) rounds: round k propagates the mark by 2^k groups.
    next_start = _next_group(words, _draw_lengths(random_bits, probabilities))
    starts_group = words.starts_run
    for _ in range((positions.shape[1] - 1).bit_length()):
        starts_group = starts_group.at[row, next_start].max(starts_group)
        next_start = jnp.take_along_axis(next_start, next_start, axis=1)
    return _last_marked(starts_group, positions)


def _draw_lengths(random_bits: UInt32[Array, "B S"], probabilities: Float[np.ndarray, " L"]) -> Int[Array, "B S"]:
    """A length for each position."""
    # Each bound is one less, and the comparison strict, because a bound of 2^32 does not fit in 32 bits.
    bounds = np.round(np.cumsum(probabilities)[:-1] * 2**32).astype(np.int64) - 1
    return 1 + (random_bits[:, :, None] > jnp.asarray(bounds.astype(np.uint32))[None, None, :]).sum(-1, dtype=jnp.int32)


def _next_group(words: Words, length: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """At a word's first token: start of the word `length` words later, or the token itself if the run ends before."""
    positions = _positions(words.starts_word)
    seq_len = positions.shape[1]
    number = jnp.cumsum(words.starts_word, axis=1, dtype=jnp.int32) - 1
    start_of_word = position_of_nth(words.starts_word, seq_len)
    target = jnp.take_along_axis(start_of_word, number + length, axis=1, mode="fill", fill_value=seq_len)
    run = jnp.cumsum(words.starts_run, axis=1, dtype=jnp.int32)
    exists = target < seq_len
    inside = words.starts_word & exists & (jnp.take_along_axis(run, target, axis=1) == run)
    return jnp.where(inside, target, positions)


def position_of_nth(marks: Bool[Array, "B S"], size: int) -> Int[Array, "B M"]:
    """Positions of the first `size` marks of each row, S where there are fewer.

    It compares all pairs. With a scatter that drops indices past the end of a row, masking chose other tokens on a GPU
    with XLA's `--xla_gpu_deterministic_ops` (jax 0.11.2, docs/log/model.md, 2026-11-26).
    """
    marked_so_far = jnp.cumsum(marks, axis=1, dtype=jnp.int32)
    numbers = jnp.arange(size, dtype=jnp.int32)
    return (marked_so_far[:, None, :] <= numbers[None, :, None]).sum(-1, dtype=jnp.int32)


def _positions(like: Array) -> Int[Array, "B S"]:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, 1)


def _last_marked(marks: Bool[Array, "B S"], positions: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The last marked position up to and including each position; 0 before the first."""
    return jax.lax.cummax(jnp.where(marks, positions, 0), axis=1)
