"""Word counts, from which WordPiece and BPE vocabularies are trained."""

import collections
import dataclasses
import itertools
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from tokenizers import normalizers, pre_tokenizers

from bert_jax.tokenizers.kinds import BYTE_SPACE, bert_normalizer

MAX_WORDS = 1_500_000
"""Maximum number of different words; merging takes up to 0.9 kB of memory for each. If there are more, the rarest are
dropped: those seen once so far, then those seen twice, and so on, until half as many are left."""

WEIGHT_SCALE = 1000
"""Weighted counts are integers, in thousandths, so that sums and differences are exact."""


@dataclasses.dataclass
class MarkCounts:
    """What the stripping of accents deletes: besides accents, vowel signs of Hindi and vowels and tones of Thai."""

    deleted: int = 0
    """marks"""
    characters: int = 0
    """letters and marks of the decomposed text"""

    def add(self, other: "MarkCounts") -> None:
        """Adds the counts of other text."""
        self.deleted += other.deleted
        self.characters += other.characters

    def add_word(self, word: str, count: int) -> None:
        """Adds a word that occurs `count` times."""
        categories = [unicodedata.category(c) for c in unicodedata.normalize("NFD", word)]
        self.deleted += count * categories.count("Mn")
        self.characters += count * sum(category[0] in "LM" for category in categories)


@dataclasses.dataclass(frozen=True)
class BertWordCounter:
    """Counts words as BERT's tokenizer splits them, punctuation separate."""

    lowercase: bool
    strip_accents: bool | None = None
    """None: the value of `lowercase`"""

    def __call__(self, texts: Iterable[str], marks: MarkCounts) -> collections.Counter[str]:
        """Counts of words, in the order of their first occurrence; adds to the counts of marks."""
        counts: collections.Counter[str] = collections.Counter()
        normalizer = bert_normalizer(self.lowercase, self.strip_accents)
        for word, count in _between_spaces(texts).items():
            if word.isascii() and word.isalnum():
                counts[word.lower() if self.lowercase else word] += count
                marks.characters += count * len(word)
            else:
                marks.add_word(word, count)
                for part in normalizer.normalize_str(word).translate(_SPACED_PUNCTUATION).split():
                    counts[part] += count
        return counts


@dataclasses.dataclass(frozen=True)
class ByteWordCounter:
    """Counts words as GPT-2's tokenizer splits them, in its byte alphabet, with a space before every text."""

    lowercase: bool

    def __call__(self, texts: Iterable[str], marks: MarkCounts) -> collections.Counter[str]:
        """Counts of words, in the order of their first occurrence; nothing is deleted."""
        counts: collections.Counter[str] = collections.Counter()
        for word, count in _between_spaces(texts).items():
            if self.lowercase:
                word = _LOWERCASE.normalize_str(word)
            if word.isascii() and word.isalpha():
                counts[BYTE_SPACE + word] += count
            else:
                # Its pattern has spaces only before a word, so the text between spaces can be split separately.
                for part, _ in _BYTE_LEVEL.pre_tokenize_str(f" {word}"):
                    counts[part] += count
        return counts


_LOWERCASE = normalizers.Lowercase()
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


class _SpacedPunctuation(dict):
    """For str.translate: puts spaces around the punctuation of BERT's pre-tokenizer; each character is checked once."""

    def __missing__(self, code: int) -> str:
        c = chr(code)
        ascii_punctuation = 33 <= code < 127 and not c.isalnum()
        is_punctuation = ascii_punctuation or unicodedata.category(c).startswith("P")
        self[code] = f" {c} " if is_punctuation else c
        return self[code]


_SPACED_PUNCTUATION = _SpacedPunctuation()


def _between_spaces(texts: Iterable[str]) -> collections.Counter[str]:
    # There are few different words, so slow steps run once per word.
    return collections.Counter(itertools.chain.from_iterable(map(str.split, texts)))


class BoundedWordCounts:
    """Counts of at most `limit` different words."""

    def __init__(self, limit: int = MAX_WORDS):
        self.counts: collections.Counter[str] = collections.Counter()
        self._limit = limit
        self._pruned = False

    def add(self, counts: Mapping[str, int]) -> None:
        """Adds counts; their order has an effect only if words are dropped."""
        self.counts.update(counts)
        if len(self.counts) > self._limit:
            self._prune()

    def _prune(self) -> None:
        if not self._pruned:
            print(f"note: more than {self._limit:,} different words; the rarest are dropped", file=sys.stderr)
            self._pruned = True
        least = 1
        while len(self.counts) > self._limit // 2:
            self.counts = collections.Counter({word: n for word, n in self.counts.items() if n > least})
            least += 1


@dataclasses.dataclass(frozen=True)
class BoundedWordCounter:
    """Counts the words of an input block by block."""

    words: BertWordCounter | ByteWordCounter
    limit: int
    """see `BoundedWordCounts`"""

    def __call__(self, blocks: Iterable[list[str]]) -> tuple[collections.Counter[str], MarkCounts]:
        """Counts of words, in the order of their first occurrence, and counts of marks."""
        table, marks = BoundedWordCounts(self.limit), MarkCounts()
        for texts in blocks:
            table.add(self.words(texts, marks))
        return table.counts, marks


def weighted_counts(tables: Sequence[Mapping[str, int]], weights: np.ndarray) -> dict[str, int]:
    """Sums counts of several texts with weights, in thousandths (`WEIGHT_SCALE`).

    Args:
      tables: counts of words.
      weights: float64 [num_tables].
    """
    total: collections.Counter[str] = collections.Counter()
    for table, weight in zip(tables, weights.tolist(), strict=True):
        for word, count in table.items():
            total[word] += round(count * weight * WEIGHT_SCALE)
    return total
