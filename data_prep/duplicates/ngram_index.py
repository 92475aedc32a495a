"""Which documents hold text of evaluation sets: runs of words that occur in both (Brown et al. 2020, appendix C)."""

import dataclasses
from collections.abc import Iterable

import numba
import numpy as np

from data_prep.duplicates.word_hashes import ngram_hashes, word_hashes

DEFAULT_NGRAM_WORDS = 13
"""As in Brown et al. 2020: long enough that it is seldom a common phrase"""


@dataclasses.dataclass(frozen=True)
class NgramIndex:
    """The runs of `ngram_words` words of a set of texts; picklable, 16 bytes for each different run.

    Attributes:
      ngram_words: words in a run.
      num_texts: texts it was built from.
      num_ngrams: different runs in them.
      too_short: texts with fewer words; they have no run and are not looked for.
      slots: hash table, uint64 [2 * num_ngrams + 1]; 0 is free.
    """

    ngram_words: int
    num_texts: int
    num_ngrams: int
    too_short: int
    slots: np.ndarray

    @classmethod
    def build(cls, texts: Iterable[str], words: int = DEFAULT_NGRAM_WORDS) -> "NgramIndex":
        """Indexes texts; the order in which they come does not matter.

        Args:
          texts: of the evaluation sets; what comes as one text may match across its sentences.
          words: in a run, positive.
        """
        found, too_short = [np.empty(0, np.uint64)], 0
        for text in texts:
            ngrams = ngram_hashes(word_hashes(text), words)
            too_short += not len(ngrams)
            found.append(ngrams)
        ngrams = np.unique(np.concatenate(found))
        return cls(words, len(found) - 1, len(ngrams), too_short, _table(ngrams))

    def hits(self, words: np.ndarray) -> int:
        """At how many places of a document a run of words begins that the texts have too.

        Of a document in parts it is the sum over the parts, but for the runs that a cut divides.

        Args:
          words: `word_hashes` of the document, uint64 [num_words].
        """
        return int(_hits(ngram_hashes(words, self.ngram_words), self.slots))


@numba.njit(cache=True, nogil=True)
def _table(ngrams: np.ndarray) -> np.ndarray:
    slots = np.zeros(2 * len(ngrams) + 1, np.uint64)
    for ngram in ngrams:
        slots[_find(ngram, slots)] = _stored(ngram)
    return slots


@numba.njit(cache=True, nogil=True)
def _hits(ngrams: np.ndarray, slots: np.ndarray) -> int:
    hits = 0
    for ngram in ngrams:
        hits += slots[_find(ngram, slots)] != 0
    return hits


@numba.njit(cache=True, nogil=True)
def _find(ngram, slots):
    """The slot that holds the n-gram, or the free one where it would go."""
    size = np.uint64(len(slots))
    slot = ((ngram >> np.uint64(32)) * size) >> np.uint64(32)
    while slots[slot] != 0 and slots[slot] != _stored(ngram):
        slot += np.uint64(1)
        if slot == size:
            slot = np.uint64(0)
    return slot


@numba.njit(cache=True, nogil=True)
def _stored(ngram):
    return max(ngram, np.uint64(1))
