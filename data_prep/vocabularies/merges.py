"""The loop that WordPiece and both kinds of BPE share: join the best pair of neighbours until there are enough pieces.

The trainers of the `tokenizers` library were tried first: they number pieces, and break ties, in hash order, so that
every run gives another vocabulary. This loop gives the same for the same words, and counts the same way.
"""

import array
import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence

from bert_jax.progress import progress

MIN_COUNT = 2
"""A pair seen less often is not joined."""

_MIN_HEAP_LIMIT = 1 << 16

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class MergeResult:
    """What the loop found.

    Attributes:
      pieces: the pieces given, then the new ones in the order in which they were made.
      merges: the pairs joined, in order; each made the next of the new pieces.
    """

    pieces: list[str]
    merges: list[tuple[str, str]]


def learn_merges(
    words: Iterable[Iterable[str]],
    counts: Sequence[int],
    pieces: Sequence[str],
    size: int,
    *,
    score: str = "count",
    continuation: str = "",
    min_count: int = MIN_COUNT,
) -> MergeResult:
    """Joins pairs of neighbours until there are `size` pieces, or none is left that occurs `min_count` times.

    The pair with the highest score goes first. Of equal ones it is the pair that makes the shorter piece, and then
    the one met first when the words, spelled in the pieces of that moment, are read in order. Both worked examples
    of the literature come out so: "lo" before "ow" in {low, lower, newest, widest}, and in Gage's aaabdaaabac "ab"
    before "aaa". A run such as "aaa" counts as two pairs, as in the `tokenizers` library.

    Args:
      words: spelled in `pieces`, each different.
      counts: how often each word occurs.
      pieces: all pieces known before, special ones included; none twice.
      size: how many pieces there shall be.
      score: one of `SCORES`. "count": how often the pair occurs (Gage 1994, Sennrich et al. 2016). "likelihood":
        count(ab) / (count(a) count(b)), what a join gains a unigram model for each time it is made (Schuster and
        Nakajima 2012).
      continuation: mark that the second piece of a pair loses when it is joined: "##" for WordPiece.
      min_count: rarer pairs are not joined.
    """
    loop = SCORES[score](words, counts, pieces, continuation)
    merges = []
    with progress("merging pieces", size - len(pieces), "piece") as bar:
        while len(loop.pieces) < size and (pair := loop.take_best(min_count)) is not None:
            merges.append((loop.pieces[pair[0]], loop.pieces[pair[1]]))
            loop.join(pair)
            bar.update()
    return MergeResult(loop.pieces, merges)


class _ByCount:
    """The words as they are spelled now, and for each pair of neighbours its count and the words that hold it.

    The heap holds for every pair a key at least as good as its true one. A count that falls, or a first place that
    moves on, is noticed when the key is popped; what gets better is pushed again at once.
    """

    def __init__(self, words: Iterable[Iterable[str]], counts: Sequence[int], pieces: Sequence[str], continuation: str):
        self.pieces = list(pieces)
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._lengths = [1] * len(self.pieces)  # in pieces of the beginning
        self._continuation = continuation
        self._words = [tuple([ids[piece] for piece in word]) for word in words]
        self._counts = counts
        self._pair_counts: dict[Pair, int] = collections.defaultdict(int)
        # Indices of words, ascending; those before the head, and maybe more, have lost the pair since.
        self._places: dict[Pair, array.array] = collections.defaultdict(lambda: array.array("I"))
        self._heads: dict[Pair, int] = {}
        for index, word in enumerate(self._words):
            for pair in itertools.pairwise(word):
                self._pair_counts[pair] += counts[index]
                self._note(pair, index)
        self._prepare()
        self._tidy()

    def _prepare(self) -> None:
        """Counts what else the score needs."""

    def _score(self, pair: Pair) -> float:
        return self._pair_counts[pair]

    def _improved(self, pair: Pair, joined: int, times: int, made: set[Pair]) -> set[Pair]:
        """Pairs whose score may have risen because `pair` was joined so many times, which made those in `made`."""
        return made

    def take_best(self, min_count: int) -> Pair | None:
        """The pair to join next, no longer on the heap."""
        while self._heap:
            key, pair = heapq.heappop(self._heap)
            if self._pair_counts.get(pair, 0) < min_count:
                continue
            true_key = self._key(pair)
            if key == true_key:
                return pair
            heapq.heappush(self._heap, (true_key, pair))
        return None

    def join(self, pair: Pair) -> None:
        """Makes one piece of the pair wherever it stands."""
        # A new piece each time: everywhere in the words the same letters have been joined in the same order.
        joined = len(self.pieces)
        self.pieces.append(self.pieces[pair[0]] + self.pieces[pair[1]].removeprefix(self._continuation))
        self._lengths.append(self._lengths[pair[0]] + self._lengths[pair[1]])
        made: set[Pair] = set()
        times = 0
        for index in self._places.pop(pair):
            old = self._words[index]
            self._words[index] = new = _spell(old, pair, joined)
            if len(new) == len(old):
                continue
            count = self._counts[index]
            times += count * (len(old) - len(new))
            for other in itertools.pairwise(old):
                self._pair_counts[other] -= count
            for other in itertools.pairwise(new):
                self._pair_counts[other] += count
                if joined in other:
                    self._note(other, index)
                    made.add(other)
        del self._pair_counts[pair]
        for other in self._improved(pair, joined, times, made):
            heapq.heappush(self._heap, (self._key(other), other))
        if len(self._heap) > self._heap_limit:
            self._tidy()

    def _tidy(self) -> None:
        """Forgets pairs that are gone and keys that are out of date."""
        for pair in [pair for pair, count in self._pair_counts.items() if count <= 0]:
            del self._pair_counts[pair], self._places[pair]
            self._heads.pop(pair, None)
        self._heap = [(self._key(pair), pair) for pair in self._pair_counts]
        heapq.heapify(self._heap)
        self._heap_limit = 3 * len(self._heap) + _MIN_HEAP_LIMIT

    def _note(self, pair: Pair, index: int) -> None:
        places = self._places[pair]
        if not places or index > places[-1]:
            places.append(index)

    def _key(self, pair: Pair) -> tuple[float, int, int, int]:
        """What the heap sorts by: score, length, word and place in it; the lowest is the best."""
        places, head = self._places[pair], self._heads.get(pair, 0)
        while (offset := self._offset(pair, places[head])) < 0:
            head += 1
        self._heads[pair] = head
        return -self._score(pair), self._lengths[pair[0]] + self._lengths[pair[1]], places[head], offset

    def _offset(self, pair: Pair, index: int) -> int:
        """Where in a word a pair stands, in pieces of the beginning (which joins do not move); -1: nowhere."""
        offset = 0
        for other in itertools.pairwise(self._words[index]):
            if other == pair:
                return offset
            offset += self._lengths[other[0]]
        return -1


class _ByLikelihood(_ByCount):
    """Here a pair also improves when its parts become rarer."""

    def _prepare(self) -> None:
        self._piece_counts: dict[int, int] = collections.defaultdict(int)
        for word, count in zip(self._words, self._counts, strict=True):
            for piece in word:
                self._piece_counts[piece] += count
        self._pairs_of: dict[int, set[Pair]] = collections.defaultdict(set)
        self._index(self._pair_counts)

    def _score(self, pair: Pair) -> float:
        return self._pair_counts[pair] / (self._piece_counts[pair[0]] * self._piece_counts[pair[1]])

    def _improved(self, pair: Pair, joined: int, times: int, made: set[Pair]) -> set[Pair]:
        for piece in pair:
            self._piece_counts[piece] -= times
        self._piece_counts[joined] += times
        self._index(made)
        improved = set(made)
        for piece in set(pair):
            self._pairs_of[piece] = {other for other in self._pairs_of[piece] if self._pair_counts.get(other, 0) > 0}
            improved |= self._pairs_of[piece]
        return improved

    def _index(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            for piece in pair:
                self._pairs_of[piece].add(pair)


SCORES = {"count": _ByCount, "likelihood": _ByLikelihood}
"""How pairs are ranked, by name."""


def _spell(word: tuple[int, ...], pair: Pair, joined: int) -> tuple[int, ...]:
    first, second = pair
    spelled, i, last = [], 0, len(word) - 1
    while i <= last:
        if word[i] == first and i < last and word[i + 1] == second:
            spelled.append(joined)
            i += 2
        else:
            spelled.append(word[i])
            i += 1
    return tuple(spelled)
