"""The merge loop of WordPiece and both kinds of BPE: merges the best adjacent pair until there are enough pieces.

The trainers of the `tokenizers` library number pieces and break ties in hash order, so every run gives another
vocabulary. This loop counts in the same way, and gives the same result for the same words.
"""

import array
import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence

from bert_jax.command.progress import progress_bar

MIN_COUNT = 2
"""Pairs that occur less often are not merged."""

_MIN_HEAP_LIMIT = 1 << 16

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class MergeResult:
    """The result of the merge loop.

    Attributes:
      pieces: the initial pieces, then the new ones in the order of their creation.
      merges: the merged pairs, in order; the i-th gives the i-th new piece.
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
    """Merges adjacent pairs until there are `size` pieces, or no pair occurs `min_count` times.

    The pair with the highest score is merged first. Ties are broken by the shorter resulting piece, then by the first
    occurrence in the words as they are spelled at that time. This reproduces both worked examples of the literature:
    "lo" before "ow" in {low, lower, newest, widest}, and "ab" before "aaa" in Gage's aaabdaaabac. A run such as "aaa"
    counts as two pairs, as in the `tokenizers` library.

    Args:
      words: spelled in `pieces`, each different.
      counts: of each word.
      pieces: the initial pieces, including special tokens; no duplicates.
      size: target number of pieces.
      score: one of `SCORES`. "count": how often the pair occurs (Gage 1994, Sennrich et al. 2016). "likelihood":
        count(ab) / (count(a) count(b)), the gain of a unigram model per merged occurrence (Schuster and
        Nakajima 2012).
      continuation: prefix that is removed from the second piece of a merged pair: "##" for WordPiece.
      min_count: rarer pairs are not merged.
    """
    loop = SCORES[score](words, counts, pieces, continuation)
    merges = []
    with progress_bar("merging pieces", size - len(pieces), "piece") as bar:
        while len(loop.pieces) < size and (pair := loop.take_best(min_count)) is not None:
            merges.append((loop.pieces[pair[0]], loop.pieces[pair[1]]))
            loop.merge(pair)
            bar.update()
    return MergeResult(loop.pieces, merges)


class _MergeByCount:
    """The words as currently spelled, with the count of each adjacent pair and the words that contain it.

    The heap contains for every pair a key at least as good as its true key. A key that got worse is corrected when
    it is popped; a key that got better is pushed again immediately.
    """

    def __init__(self, words: Iterable[Iterable[str]], counts: Sequence[int], pieces: Sequence[str], continuation: str):
        self.pieces = list(pieces)
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._lengths = [1] * len(self.pieces)  # in initial pieces
        self._continuation = continuation
        self._words = [tuple([ids[piece] for piece in word]) for word in words]
        self._counts = counts
        self._pair_counts: dict[Pair, int] = collections.defaultdict(int)
        # Indices of words, ascending; those before the head, and possibly others, no longer contain the pair.
        self._places: dict[Pair, array.array] = collections.defaultdict(lambda: array.array("I"))
        self._heads: dict[Pair, int] = {}
        for index, word in enumerate(self._words):
            for pair in itertools.pairwise(word):
                self._pair_counts[pair] += counts[index]
                self._add_place(pair, index)
        self._prepare()
        self._rebuild_heap()

    def _prepare(self) -> None:
        """Counts further values that the score needs."""

    def _score(self, pair: Pair) -> float:
        return self._pair_counts[pair]

    def _improved(self, pair: Pair, merged_id: int, times: int, created: set[Pair]) -> set[Pair]:
        """Pairs whose score may have risen after `pair` was merged `times` times, which created those in `created`."""
        return created

    def take_best(self, min_count: int) -> Pair | None:
        """Removes the pair to merge next from the heap and returns it."""
        while self._heap:
            key, pair = heapq.heappop(self._heap)
            if self._pair_counts.get(pair, 0) < min_count:
                continue
            true_key = self._key(pair)
            if key == true_key:
                return pair
            heapq.heappush(self._heap, (true_key, pair))
        return None

    def merge(self, pair: Pair) -> None:
        """Replaces every occurrence of the pair by a new piece."""
        # Always a new piece: equal letters are merged in the same order everywhere.
        merged_id = len(self.pieces)
        self.pieces.append(self.pieces[pair[0]] + self.pieces[pair[1]].removeprefix(self._continuation))
        self._lengths.append(self._lengths[pair[0]] + self._lengths[pair[1]])
        created: set[Pair] = set()
        times = 0
        for index in self._places.pop(pair):
            old = self._words[index]
            self._words[index] = new = _spell(old, pair, merged_id)
            if len(new) == len(old):
                continue
            count = self._counts[index]
            times += count * (len(old) - len(new))
            for other in itertools.pairwise(old):
                self._pair_counts[other] -= count
            for other in itertools.pairwise(new):
                self._pair_counts[other] += count
                if merged_id in other:
                    self._add_place(other, index)
                    created.add(other)
        del self._pair_counts[pair]
        for other in self._improved(pair, merged_id, times, created):
            heapq.heappush(self._heap, (self._key(other), other))
        if len(self._heap) > self._heap_limit:
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        """Drops pairs that no longer occur and outdated keys."""
        for pair in [pair for pair, count in self._pair_counts.items() if count <= 0]:
            del self._pair_counts[pair], self._places[pair]
            self._heads.pop(pair, None)
        self._heap = [(self._key(pair), pair) for pair in self._pair_counts]
        heapq.heapify(self._heap)
        self._heap_limit = 3 * len(self._heap) + _MIN_HEAP_LIMIT

    def _add_place(self, pair: Pair, index: int) -> None:
        places = self._places[pair]
        if not places or index > places[-1]:
            places.append(index)

    def _key(self, pair: Pair) -> tuple[float, int, int, int]:
        """Sort key of the heap: score, length, word, and offset in the word; the lowest is the best."""
        places, head = self._places[pair], self._heads.get(pair, 0)
        while (offset := self._offset(pair, places[head])) < 0:
            head += 1
        self._heads[pair] = head
        return -self._score(pair), self._lengths[pair[0]] + self._lengths[pair[1]], places[head], offset

    def _offset(self, pair: Pair, index: int) -> int:
        """Offset of a pair in a word, in initial pieces (which merges do not change); -1 if it does not occur."""
        offset = 0
        for other in itertools.pairwise(self._words[index]):
            if other == pair:
                return offset
            offset += self._lengths[other[0]]
        return -1


class _MergeByLikelihood(_MergeByCount):
    """A pair also improves when its parts become rarer."""

    def _prepare(self) -> None:
        self._piece_counts: dict[int, int] = collections.defaultdict(int)
        for word, count in zip(self._words, self._counts, strict=True):
            for piece in word:
                self._piece_counts[piece] += count
        self._pairs_of: dict[int, set[Pair]] = collections.defaultdict(set)
        self._index(self._pair_counts)

    def _score(self, pair: Pair) -> float:
        return self._pair_counts[pair] / (self._piece_counts[pair[0]] * self._piece_counts[pair[1]])

    def _improved(self, pair: Pair, merged_id: int, times: int, created: set[Pair]) -> set[Pair]:
        for piece in pair:
            self._piece_counts[piece] -= times
        self._piece_counts[merged_id] += times
        self._index(created)
        improved = set(created)
        for piece in set(pair):
            self._pairs_of[piece] = {other for other in self._pairs_of[piece] if self._pair_counts.get(other, 0) > 0}
            improved |= self._pairs_of[piece]
        return improved

    def _index(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            for piece in pair:
                self._pairs_of[piece].add(pair)


SCORES = {"count": _MergeByCount, "likelihood": _MergeByLikelihood}
"""Scores of pairs, by name."""


def _spell(word: tuple[int, ...], pair: Pair, merged_id: int) -> tuple[int, ...]:
    first, second = pair
    spelled, i, last = [], 0, len(word) - 1
    while i <= last:
        if word[i] == first and i < last and word[i + 1] == second:
            spelled.append(merged_id)
            i += 2
        else:
            spelled.append(word[i])
            i += 1
    return tuple(spelled)
