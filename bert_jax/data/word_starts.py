"""Where words begin in long sentences, one bit per token: so planning, which reads no record, cuts between words."""

from typing import NamedTuple

import numpy as np

from bert_jax.numba_cache import cached_njit

LONG_SENTENCE_TOKENS = 60
"""Longer sentences have bits: all that are longer than a row of 64 tokens. They take 0.05 bytes per token of books."""


class WordStarts(NamedTuple):
    """The bits of a corpus, found by sentence."""

    bits: np.ndarray
    """of the long sentences in order, each from a new byte on, lowest bit first; uint8 [num_bytes]"""
    groups: np.ndarray
    """first sentence of each group of consecutive sentences, int64 [n]"""
    offsets: np.ndarray
    """first byte of each group, int64 [n]"""


def pack_word_starts(tokens: np.ndarray, sentence_lengths: np.ndarray, begins_word: np.ndarray) -> np.ndarray:
    """The bits of some sentences, uint8.

    Args:
      tokens: ids of the sentences, concatenated.
      sentence_lengths: tokens of each, integers [num_sentences].
      begins_word: `Tokenizer.begins_word`.
    """
    long = np.flatnonzero(sentence_lengths > LONG_SENTENCE_TOKENS)
    if not len(long):
        return np.zeros(0, np.uint8)
    ends = np.cumsum(sentence_lengths, dtype=np.int64)
    starts = (begins_word[tokens[ends[i] - sentence_lengths[i] : ends[i]]] for i in long)
    return np.concatenate([np.packbits(one, bitorder="little") for one in starts])


@cached_njit
def _bits_size(length):
    return (length + 7) // 8 if length > LONG_SENTENCE_TOKENS else 0


@cached_njit
def word_start_offsets(lengths, groups):
    """First byte of the bits of each group of sentences, int64 [n].

    Args:
      lengths: tokens of each sentence, uint16.
      groups: first sentence of each group, int64 [n]; the last may be the end of the sentences.
    """
    offsets = np.zeros(len(groups), np.int64)
    for group in range(len(groups) - 1):
        size = 0
        for sentence in range(groups[group], groups[group + 1]):
            size += _bits_size(lengths[sentence])
        offsets[group + 1] = offsets[group] + size
    return offsets


@cached_njit
def cut_between_words(words, lengths, sentence, skip, size):
    """Tokens of a piece that begins at token `skip` of a sentence: `size`, or up to half of them less, so that a word
    begins after it. `size` if none does.
    """
    if lengths[sentence] > LONG_SENTENCE_TOKENS:
        group = np.searchsorted(words.groups, sentence, "right") - 1
        first = words.offsets[group]
        for before in range(words.groups[group], sentence):
            first += _bits_size(lengths[before])
        for end in range(skip + size, skip + size // 2, -1):
            if words.bits[first + (end >> 3)] >> (end & 7) & 1:
                return end - skip
    return size
