"""`reference`: the text of the shipped reference curves, to compare a set-up with them. It is generated.

The language is artificial. Stems are drawn once; articles, adjectives and nouns agree in class and number, verbs with
their subject in number. A document has a topic, which provides most of its nouns and verbs, and two recurring nouns, so
that a model can learn whether two passages belong together. Every choice is a counter-based hash in integer arithmetic:
the text is the same, bit for bit, on every machine and with every version of Python.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from data_prep.sources.base import Document, Input, InputRecord, Source, SourceBlock

VERSION = "1"
"""Of the text. A new version gives another corpus and requires new reference curves."""
NUM_DOCUMENTS = 1600

_DOCUMENT_BYTES = 900
"""Approximate size of a document, for progress."""

_WORD_BITS = 0xFFFF_FFFF_FFFF_FFFF
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_NOUN_ENDINGS = (("a", "ai"), ("o", "oi"), ("en", "eni"), ("u", "uri"), ("is", "isti"))
"""Of each noun class, singular and plural; adjectives take those of their noun."""
_ARTICLES = (("la", "lai"), ("lo", "loi"), ("len", "leni"), ("lu", "luri"), ("lis", "listi"))
_TOPICS = len(_NOUN_ENDINGS)
"""The nouns of a topic have one class, so the class is predictable from the document."""
_VERB_ENDINGS = ("it", "irun")
_PREPOSITIONS = ("po", "sur", "dek", "anta", "mi")
_CONNECTIVES = ("ke", "dum", "alor", "tan")
_MIN_WORDS = 4
_BLOCKS_PER_INPUT = 16


@dataclasses.dataclass(frozen=True)
class SyntheticSource(Source):
    """Nothing is read; the payload of a block is a range of documents."""

    block_documents: int = 200

    def inputs(self) -> list[Input]:
        """Ranges of documents."""
        length = _BLOCKS_PER_INPUT * self.block_documents
        bounds = [*range(0, NUM_DOCUMENTS, length), NUM_DOCUMENTS]
        return [
            Input((), (stop - start) * _DOCUMENT_BYTES, start=start, stop=stop)
            for start, stop in itertools.pairwise(bounds)
        ]

    def read_blocks(self, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        """Ranges of documents."""
        for start in range(part.start, part.stop, self.block_documents):
            stop = min(start + self.block_documents, part.stop)
            yield SourceBlock(_origin(start), range(start, stop), (stop - start) * _DOCUMENT_BYTES)
        if part.stop == NUM_DOCUMENTS:
            record.files.append({"name": "reference", "version": VERSION})

    def documents(self, block: SourceBlock) -> Iterator[Document]:
        """Generates the documents, one sentence per line."""
        for index in block.payload:
            yield Document(_origin(index), "\n".join(document(index)), sentence_per_line=True)


def _origin(index: int) -> str:
    return f"reference document {index}"


class HashRandom:
    """Counter-based random numbers: SplitMix64 (Steele et al. 2014) of a key and a counter."""

    def __init__(self, *key: int):
        self._state = 0
        for part in key:
            self._state = _hash64(self._state ^ part)
        self._count = 0

    def uniform_int(self, limit: int) -> int:
        """An integer in [0, limit), with a bias of at most limit / 2^64."""
        self._count += 1
        return _hash64(self._state + self._count * 0x9E3779B97F4A7C15) % limit

    def happens_percent(self, percent: int) -> bool:
        """True with a probability of `percent` / 100."""
        return self.uniform_int(100) < percent

    def zipf(self, count: int) -> int:
        """An integer n in [0, count) with probability proportional to 1 / (n + 2) (Zipf's law of words)."""
        sums = _zipf_sums(count)
        return bisect.bisect_right(sums, self.uniform_int(sums[-1]))


def _hash64(value: int) -> int:
    value &= _WORD_BITS
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD_BITS
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD_BITS
    return value ^ value >> 31


@cache
def _zipf_sums(count: int) -> list[int]:
    return list(itertools.accumulate(1_000_000 // (rank + 2) for rank in range(count)))


class _Noun(NamedTuple):
    """A stem and its class, with which articles and adjectives agree."""

    stem: str
    kind: int


class _Lexicon(NamedTuple):
    """Nouns and verbs, by decreasing frequency."""

    nouns: tuple[_Noun, ...]
    verbs: tuple[str, ...]


class _Language(NamedTuple):
    """All words of the language."""

    common: _Lexicon
    topics: tuple[_Lexicon, ...]
    adjectives: tuple[str, ...]
    adverbs: tuple[str, ...]


@cache
def language() -> _Language:
    """The words of the language; all stems differ."""
    stems = _stems(HashRandom(1))

    def lexicon(kinds: Sequence[int], verbs: int) -> _Lexicon:
        return _Lexicon(tuple(_Noun(next(stems), kind) for kind in kinds), tuple(itertools.islice(stems, verbs)))

    return _Language(
        common=lexicon([kind for kind in range(_TOPICS) for _ in range(2)], 5),
        topics=tuple(lexicon([topic] * 12, 6) for topic in range(_TOPICS)),
        adjectives=tuple(itertools.islice(stems, 18)),
        adverbs=tuple(f"{stem}ek" for stem in itertools.islice(stems, 9)),
    )


def _stems(draws: HashRandom) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        letters = [_CONSONANTS, _VOWELS, _CONSONANTS]
        if draws.happens_percent(60):
            letters += [_VOWELS, _CONSONANTS]
        stem = "".join(kind[draws.uniform_int(len(kind))] for kind in letters)
        if stem not in seen:
            seen.add(stem)
            yield stem


def document(index: int) -> list[str]:
    """The sentences of a document: 3 to 30 of 4 to 14 words, each beginning with a capital and ending with a period.

    Args:
      index: in [0, NUM_DOCUMENTS).
    """
    draws, words = HashRandom(2, index), language()
    topic = words.topics[draws.uniform_int(_TOPICS)]
    recurring = [topic.nouns[draws.uniform_int(len(topic.nouns))] for _ in range(2)]
    return [_sentence(draws, words, topic, recurring) for _ in range(3 + draws.uniform_int(28))]


def _sentence(draws: HashRandom, words: _Language, topic: _Lexicon, recurring: Sequence[_Noun]) -> str:
    sentence = [_CONNECTIVES[draws.zipf(len(_CONNECTIVES))]] if draws.happens_percent(20) else []
    number = draws.uniform_int(2)
    sentence += _noun_phrase(draws, words, _noun(draws, words, topic, recurring), number)
    lexicon = topic if draws.happens_percent(70) else words.common
    sentence.append(lexicon.verbs[draws.zipf(len(lexicon.verbs))] + _VERB_ENDINGS[number])
    if draws.happens_percent(60):
        sentence += _noun_phrase(draws, words, _noun(draws, words, topic, recurring), draws.uniform_int(2))
    if draws.happens_percent(40):
        sentence.append(_PREPOSITIONS[draws.zipf(len(_PREPOSITIONS))])
        sentence += _noun_phrase(draws, words, _noun(draws, words, topic, recurring), draws.uniform_int(2))
    if len(sentence) < _MIN_WORDS or draws.happens_percent(25):
        sentence.append(words.adverbs[draws.zipf(len(words.adverbs))])
    return " ".join(sentence).capitalize() + "."


def _noun(draws: HashRandom, words: _Language, topic: _Lexicon, recurring: Sequence[_Noun]) -> _Noun:
    if draws.happens_percent(40):
        return recurring[draws.uniform_int(len(recurring))]
    lexicon = topic if draws.happens_percent(85) else words.common
    return lexicon.nouns[draws.zipf(len(lexicon.nouns))]


def _noun_phrase(draws: HashRandom, words: _Language, noun: _Noun, number: int) -> list[str]:
    ending = _NOUN_ENDINGS[noun.kind][number]
    adjective = [words.adjectives[draws.zipf(len(words.adjectives))] + ending] if draws.happens_percent(40) else []
    return [_ARTICLES[noun.kind][number], *adjective, noun.stem + ending]
