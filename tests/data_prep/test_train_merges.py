"""The merge loop against a reference implementation, and the worked examples of the literature."""

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.vocabularies import merges
from data_prep.vocabularies.merges import MergeResult, learn_merges

# Counts of words from Sennrich et al. (2016).
WORDS = {"low": 5, "lower": 2, "newest": 6, "widest": 3}


def spell(word, continuation):
    return [word[0], *(continuation + c for c in word[1:])]


def learn_from(words, more, score="count", continuation=""):
    spelled = [spell(word, continuation) for word in words]
    characters = sorted({piece for word in spelled for piece in word})
    size = len(characters) + more
    merged = learn_merges(spelled, list(words.values()), characters, size, score=score, continuation=continuation)
    assert merged.pieces[: len(characters)] == characters
    return merged, merged.pieces[len(characters) :]


def test_worked_example_of_bpe():
    """es before st, lo before ow, wi before id and dest: of equal pairs the shorter, then the first to occur."""
    merged, made = learn_from(WORDS, 8)
    assert made == ["es", "est", "lo", "low", "ne", "new", "newest", "wi"]
    assert merged.merges[:4] == [("e", "s"), ("es", "t"), ("l", "o"), ("lo", "w")]


def test_worked_example_of_gage():
    """aaabdaaabac -> ZabdZabac -> ZYdZYac (and then XdXac)."""
    merged, made = learn_from({"aaabdaaabac": 1}, 3)
    assert made == ["aa", "ab", "aaab"]
    assert merged.merges == [("a", "a"), ("a", "b"), ("aa", "ab")]


def test_likelihood_starts_elsewhere():
    """count(ab) / (count(a) count(b)): w+##i is 3 / (3 * 3), where e+s is 9 / (17 * 9)."""
    assert learn_from(WORDS, 1, "likelihood", "##")[1] == ["wi"]
    assert learn_from(WORDS, 1, "count", "##")[1] == ["##es"]


def test_rare_pairs_are_not_merged():
    assert learn_merges([list("ab"), list("cd")], [1, 2], list("abcd"), 9).merges == [("c", "d")]
    assert learn_merges([list("ab"), list("cd")], [1, 2], list("abcd"), 9, min_count=3).merges == []


def test_ties_go_to_the_word_met_first():
    assert learn_from({"ab": 2, "cd": 2}, 2)[1] == ["ab", "cd"]
    assert learn_from({"cd": 2, "ab": 2}, 2)[1] == ["cd", "ab"]


def reference(words, counts, pieces, size, score, continuation):
    """Counts everything again for every merge."""
    words, pieces = [list(word) for word in words], list(pieces)
    lengths, joins = dict.fromkeys(pieces, 1), []
    while len(pieces) < size:
        pairs, singles, first = collections.Counter(), collections.Counter(), {}
        for place, (word, count) in enumerate(zip(words, counts, strict=True)):
            for piece in word:
                singles[piece] += count
            for offset, pair in enumerate(itertools.pairwise(word)):
                pairs[pair] += count
                first.setdefault(pair, (place, offset))

        def rank(pair, pairs=pairs, singles=singles, first=first):
            together = pairs[pair] if score == "count" else pairs[pair] / (singles[pair[0]] * singles[pair[1]])
            return -together, lengths[pair[0]] + lengths[pair[1]], first[pair]

        frequent = [pair for pair in pairs if pairs[pair] >= merges.MIN_COUNT]
        if not frequent:
            break
        best = min(frequent, key=rank)
        joins.append(best)
        pieces.append(best[0] + best[1].removeprefix(continuation))
        lengths[pieces[-1]] = lengths[best[0]] + lengths[best[1]]
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [pieces[-1]]
                i += 1
    return MergeResult(pieces, joins)


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """So that outdated keys are dropped in small examples too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merges, "_MIN_HEAP_LIMIT", 3)
        yield


@settings(max_examples=300, deadline=None)
@given(
    words=st.dictionaries(st.text("abc", min_size=1, max_size=12), st.integers(1, 4), min_size=1, max_size=10),
    more=st.integers(0, 30),
    score=st.sampled_from(sorted(merges.SCORES)),
    continuation=st.sampled_from(["", "##"]),
)
def test_the_loop_equals_the_reference(words, more, score, continuation):
    spelled = [spell(word, continuation) for word in words]
    pieces = sorted({piece for word in spelled for piece in word})
    counts, size = list(words.values()), len(pieces) + more
    found = learn_merges(spelled, counts, pieces, size, score=score, continuation=continuation)
    assert found == reference(spelled, counts, pieces, size, score, continuation)
    assert len(set(found.pieces)) == len(found.pieces)
