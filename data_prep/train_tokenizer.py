"""Trains a WordPiece vocabulary.

The trainer of the `tokenizers` library was tried first and numbers the "##" pieces in hash order, so that
every run gives another vocabulary; this one gives the same for the same text, and counts the same way.
"""

import collections
import heapq
import itertools
import sys
import unicodedata
from collections.abc import Iterable, Iterator

from bert_jax.errors import UserError
from bert_jax.progress import progress
from bert_jax.tokenizer import (
    CONTINUATION,
    MAX_CHARS_PER_WORD,
    SPECIAL_TOKENS,
    Tokenizer,
    bert_normalizer,
    wordpiece,
)

MAX_ALPHABET = 1000
"""Rarer characters become [UNK]; each kept one takes up to two pieces."""
MIN_FREQUENCY = 2
"""A pair seen less often is not merged."""

_CHARACTERS_PER_CHUNK = 1 << 20

Pair = tuple[int, int]


def train_wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool = True) -> Tokenizer:
    """Trains a BERT tokenizer: [PAD] [UNK] [CLS] [SEP] [MASK] are 0..4, then characters, then merges.

    Starts from characters ("##" before those inside a word) and merges the pair of pieces with the
    highest count until the vocabulary is full, ties broken by the lower ids. That is what the
    `tokenizers` library does under the name WordPiece; scoring by likelihood gain, count(ab) /
    (count(a) count(b)), spends a small vocabulary on rare words. Memory grows with the number of
    different words, not with the text.

    Args:
      texts: any pieces of text; words do not reach from one into the next.
      vocab_size: number of pieces; fewer where the text has no more, which is said on stderr.
      lowercase: lower-case and strip accents.

    Raises:
      UserError: no words in the texts, or a vocab_size that cannot hold the characters.
    """
    counts = _count_words(texts, lowercase)
    if not counts:
        raise UserError("no words in the text; a tokenizer cannot be trained on it")
    alphabet = _alphabet(counts)
    words = [word for word in counts if alphabet.issuperset(word)]
    spelled = [_spell(word) for word in words]
    characters = sorted(alphabet) + sorted({c for word in spelled for c in word[1:]})
    pieces = [*SPECIAL_TOKENS, *characters]
    if len(pieces) > vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size} cannot hold the characters of this text; use at least {len(pieces)}"
        )
    ids = {piece: i for i, piece in enumerate(pieces)}
    pieces = _merge([[ids[c] for c in word] for word in spelled], [counts[word] for word in words], pieces, vocab_size)
    if len(pieces) < vocab_size:
        print(f"note: the text gives only {len(pieces)} pieces, not {vocab_size}", file=sys.stderr)
    return wordpiece(pieces, lowercase, "the trained vocabulary")


class _SpacedPunctuation(dict):
    """For str.translate: spaces around what BERT's pre-tokenizer cuts off, found out once a character."""

    def __missing__(self, code: int) -> str:
        c = chr(code)
        ascii_punctuation = 33 <= code < 127 and not c.isalnum()
        is_punctuation = ascii_punctuation or unicodedata.category(c).startswith("P")
        self[code] = f" {c} " if is_punctuation else c
        return self[code]


def _count_words(texts: Iterable[str], lowercase: bool) -> collections.Counter[str]:
    normalizer = bert_normalizer(lowercase)
    spaced = _SpacedPunctuation()
    counts: collections.Counter[str] = collections.Counter()
    for chunk in _chunks(texts):
        counts.update(normalizer.normalize_str(chunk).translate(spaced).split())
    for word in [word for word in counts if len(word) > MAX_CHARS_PER_WORD]:
        del counts[word]  # the tokenizer gives up on these
    return counts


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    chunk, size = [], 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHARACTERS_PER_CHUNK:
            yield "\n".join(chunk)
            chunk, size = [], 0
    yield "\n".join(chunk)


def _alphabet(words: collections.Counter[str]) -> frozenset[str]:
    counts: collections.Counter[str] = collections.Counter()
    for word, frequency in words.items():
        for c in word:
            counts[c] += frequency
    return frozenset(sorted(counts, key=lambda c: (-counts[c], c))[:MAX_ALPHABET])


def _spell(word: str) -> list[str]:
    return [word[0], *(CONTINUATION + c for c in word[1:])]


def _merge(words: list[list[int]], frequencies: list[int], pieces: list[str], vocab_size: int) -> list[str]:
    """Pieces with merges added; `words` are spelled in ids of `pieces` and change in place."""
    pieces = list(pieces)
    ids = {piece: i for i, piece in enumerate(pieces)}
    counts: collections.Counter[Pair] = collections.Counter()
    places: dict[Pair, set[int]] = collections.defaultdict(set)
    for index, word in enumerate(words):
        for pair in itertools.pairwise(word):
            counts[pair] += frequencies[index]
            places[pair].add(index)
    # Counts in the heap may be too high, never too low: what falls is noticed when it is popped.
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    with progress("merging pieces", vocab_size - len(pieces), "piece") as bar:
        while heap and len(pieces) < vocab_size:
            negative, pair = heapq.heappop(heap)
            if -negative != counts[pair]:
                heapq.heappush(heap, (-counts[pair], pair))
                continue
            if counts[pair] < MIN_FREQUENCY:
                break
            piece = pieces[pair[0]] + pieces[pair[1]].removeprefix(CONTINUATION)
            if piece not in ids:  # two ways to one piece: rare, if there are any
                ids[piece] = len(pieces)
                pieces.append(piece)
                bar.update()
            grown = set()
            for index in places.pop(pair):
                old = words[index]
                words[index] = new = _join(old, pair, ids[piece])
                for other in itertools.pairwise(old):
                    counts[other] -= frequencies[index]
                for other in itertools.pairwise(new):
                    counts[other] += frequencies[index]
                    places[other].add(index)
                    if ids[piece] in other:
                        grown.add(other)
            for other in grown:
                heapq.heappush(heap, (-counts[other], other))
    return pieces


def _join(word: list[int], pair: Pair, joined: int) -> list[int]:
    result, i = [], 0
    while i < len(word):
        if word[i] == pair[0] and i + 1 < len(word) and word[i + 1] == pair[1]:
            result.append(joined)
            i += 2
        else:
            result.append(word[i])
            i += 1
    return result
