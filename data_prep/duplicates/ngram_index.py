"""Finds documents that contain word n-grams of evaluation texts (Brown et al. 2020, appendix C)."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from bert_jax.numba_cache import cached_njit
from data_prep.word_hashes import ngram_hashes, word_hashes

DEFAULT_NGRAM_WORDS = 13
"""As in Brown et al. 2020: long enough that it is rarely a common phrase"""

_NONE = np.empty(0, np.uint64)


@dataclasses.dataclass(frozen=True)
class NgramIndex:
    """The n-grams of `ngram_words` words of a set of texts.

    Attributes:
      ngram_words: words per n-gram.
      num_texts: number of indexed texts.
      too_short: texts with fewer words, which have no n-gram.
      ngrams: hashes of the distinct n-grams, sorted, uint64 [num_ngrams].
    """

    ngram_words: int
    num_texts: int
    too_short: int
    ngrams: np.ndarray

    @classmethod
    def build(cls, texts: Iterable[str], words: int = DEFAULT_NGRAM_WORDS) -> "NgramIndex":
        """Indexes texts; their order has no effect.

        Args:
          texts: of the evaluation sets; n-grams may extend over the sentences of one text.
          words: per n-gram, positive.
        """
        text_ngrams, too_short = [_NONE], 0
        for text in texts:
            ngrams = ngram_hashes(word_hashes(text), words)
            too_short += not len(ngrams)
            text_ngrams.append(ngrams)
        return cls(words, len(text_ngrams) - 1, too_short, np.unique(np.concatenate(text_ngrams)))

    @classmethod
    def merge(cls, indexes: Sequence["NgramIndex"], words: int) -> "NgramIndex":
        """The index of all texts of indexes with this number of words per n-gram."""
        num_texts, too_short = sum(one.num_texts for one in indexes), sum(one.too_short for one in indexes)
        ngrams = np.unique(np.concatenate([_NONE, *(one.ngrams for one in indexes)]))
        return cls(words, num_texts, too_short, ngrams)

    def slots(self) -> np.ndarray:
        """A hash table, uint64 [2 * num_ngrams + 1], 16 bytes per n-gram; 0 is free."""
        return _table(self.ngrams)


def count_hits(words: np.ndarray, ngram_words: int, slots: np.ndarray) -> int:
    """The number of n-grams of a document that occur in the texts of an index.

    For a document in parts, it is the sum over the parts, except for n-grams across a boundary of parts.

    Args:
      words: `word_hashes` of the document, uint64 [num_words].
      ngram_words: of the index.
      slots: `NgramIndex.slots` of it.
    """
    return int(_hits(ngram_hashes(words, ngram_words), slots))


@cached_njit
def _table(ngrams: np.ndarray) -> np.ndarray:
    slots = np.zeros(2 * len(ngrams) + 1, np.uint64)
    for ngram in ngrams:
        slots[_find(ngram, slots)] = _stored(ngram)
    return slots


@cached_njit
def _hits(ngrams: np.ndarray, slots: np.ndarray) -> int:
    hits = 0
    for ngram in ngrams:
        hits += slots[_find(ngram, slots)] != 0
    return hits


@cached_njit
def _find(ngram, slots):
    """The slot of the n-gram, or the free slot for it."""
    size = np.uint64(len(slots))
    slot = ((ngram >> np.uint64(32)) * size) >> np.uint64(32)
    while slots[slot] != 0 and slots[slot] != _stored(ngram):
        slot += np.uint64(1)
        if slot == size:
            slot = np.uint64(0)
    return slot


@cached_njit
def _stored(ngram):
    return max(ngram, np.uint64(1))
