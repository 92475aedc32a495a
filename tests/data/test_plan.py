"""The plan of an epoch against a slow, obvious twin, and what must hold of every plan."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.plan import plan_epoch
from bert_jax.errors import UserError

ALPHA = 1e-4
WORD = 2**64 - 1


def make_corpus(documents: list[list[int]]) -> Corpus:
    """A corpus with these sentence lengths and nothing on disk."""
    corpus = object.__new__(Corpus)
    lengths = np.array([n for document in documents for n in document], np.uint16)
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    corpus.__dict__.update(directory="memory", split="train", sentence_lengths=lengths, document_offsets=offsets)
    return corpus


class Draws:
    """The plan's counter hash in Python's own integers: SplitMix64 over a folded key."""

    def __init__(self, *words: int):
        self.key, self.count = 0, 0
        for word in words:
            self.key = self.mix(self.fold(self.key, word))

    @staticmethod
    def fold(a: int, b: int) -> int:
        return (a * 0x9E3779B97F4A7C15 + b + 1) & WORD

    @staticmethod
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        return z ^ (z >> 31)

    def next(self) -> int:
        self.count += 1
        return self.mix(self.fold(self.key, self.count))

    def below(self, bound: int) -> int:
        return ((self.next() >> 32) * bound) >> 32

    def happens(self, rate: float) -> bool:
        return (self.next() >> 11) < round(rate * 2**53)


def twin(documents: list[list[int]], seq_len: int, short: float, seed: int, example_epoch: int):
    """Rows as lists of (sentence, token) of A and of B with the label, and the tokens cut away.

    The recipe of google-research/bert create_pretraining_data.py, with sentences as lists of tokens.
    """
    room, rows, truncated, first = seq_len - 3, [], 0, 0
    texts = []
    for document in documents:
        texts.append([[(first + s, t) for t in range(length)] for s, length in enumerate(document)])
        first += len(document)
    for number, document in enumerate(texts):
        draws = Draws(seed, 0xE4A, example_epoch, number)
        waiting = list(document)
        while waiting:
            target = 2 + draws.below(room - 1) if draws.happens(short) else room
            chunk, size = [], 0
            while waiting and size < target:
                chunk.append(waiting.pop(0))
                size += len(chunk[-1])
            cut = 1 + draws.below(len(chunk) - 1) if len(chunk) >= 2 else 1
            a = [token for sentence in chunk[:cut] for token in sentence]
            if len(chunk) == 1 or draws.happens(0.5):
                waiting = chunk[cut:] + waiting
                other = draws.below(len(texts) - 1)
                source = texts[other + (other >= number)]
                b, at = [], draws.below(len(source))
                while True:
                    b += source[at]
                    at += 1
                    if at == len(source) or len(b) >= target - len(a):
                        break
                label = 1
            else:
                b, label = [token for sentence in chunk[cut:] for token in sentence], 0
            before = len(a), len(b)
            while len(a) + len(b) > room:
                longer = a if len(a) > len(b) else b
                longer.pop(0 if draws.happens(0.5) else -1)
            truncated += before[0] - len(a) + (label == 0) * (before[1] - len(b))
            rows.append((a, b, label))
    return rows, truncated


def tokens(row, side: str, lengths: np.ndarray) -> list[tuple[int, int]]:
    """(sentence, token) of a segment of a planned row, as the reader of batches cuts it."""
    span = range(row[f"{side}_start"], row[f"{side}_stop"])
    everything = [(s, t) for s in span for t in range(int(lengths[s]))]
    return everything[row[f"{side}_skip"] :][: row[f"{side}_tokens"]]


def random_documents(seed: int, count: int, longest: int = 30, most: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, longest, rng.integers(1, most)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("seq_len", "short", "seed", "epoch"),
    [(32, 0.1, 0, 0), (32, 0.1, 0, 1), (64, 0.5, 7, 3), (8, 1.0, 1, 0), (128, 0.0, 2**31 - 1, 5)],
)
def test_plan_equals_twin(seq_len, short, seed, epoch):
    documents = random_documents(seq_len, 60)
    corpus = make_corpus(documents)
    plan = plan_epoch(corpus, DataConfig(short_example_rate=short), seq_len, seed, epoch)
    expected, truncated = twin(documents, seq_len, short, seed, epoch)
    assert len(plan) == len(expected) > 60 and plan.truncated_tokens == truncated > 0
    assert {0, 1} == set(plan.rows["pair_label"].tolist())
    for row, (a, b, label) in zip(plan.rows, expected, strict=True):
        assert tokens(row, "a", corpus.sentence_lengths) == a
        assert tokens(row, "b", corpus.sentence_lengths) == b
        assert row["pair_label"] == label


lengths_of_documents = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=2, max_size=8)


@settings(max_examples=150, deadline=None)
@given(lengths_of_documents, st.integers(8, 70), st.floats(0, 1), st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_invariants(documents, seq_len, short, seed, epoch):
    corpus = make_corpus(documents)
    offsets, lengths = corpus.document_offsets, corpus.sentence_lengths
    plan = plan_epoch(corpus, DataConfig(short_example_rate=short), seq_len, seed, epoch)
    document_of = np.repeat(np.arange(len(documents)), np.diff(offsets))
    shown, position, cut = Counter(), 0, 0
    for row in plan.rows:
        a_tokens, b_tokens = int(row["a_tokens"]), int(row["b_tokens"])
        assert a_tokens >= 1 and b_tokens >= 1 and a_tokens + b_tokens + 3 <= seq_len
        for side, count in (("a", a_tokens), ("b", b_tokens)):
            start, stop = int(row[f"{side}_start"]), int(row[f"{side}_stop"])
            whole = int(lengths[start:stop].sum())
            assert start < stop and row[f"{side}_skip"] >= 0 and row[f"{side}_skip"] + count <= whole
            assert document_of[start] == document_of[stop - 1]
            if side == "a" or row["pair_label"] == 0:
                shown.update(range(start, stop))
                cut += whole - count
        same = document_of[row["a_start"]] == document_of[row["b_start"]]
        if row["pair_label"] == 0:
            assert same and row["b_start"] == row["a_stop"]
        else:
            assert not same
        # Rows follow each other: what a random B displaced starts the next row.
        assert row["a_start"] == position
        position = int(row["b_stop"] if row["pair_label"] == 0 else row["a_stop"])
    assert position == len(lengths) and shown == Counter(range(len(lengths)))
    assert plan.truncated_tokens == cut
    assert sorted(plan.example_at(np.arange(len(plan))).tolist()) == list(range(len(plan)))


def test_share_of_random_pairs():
    """0.5 + 0.5 P(chunk of one sentence), by a two-sided binomial test at alpha 1e-4.

    Sentences of 10 tokens into 12 tokens of room: a chunk takes two sentences, unless only one is left.
    """
    documents = [[10] * 5] * 4000
    plan = plan_epoch(make_corpus(documents), DataConfig(short_example_rate=0.0), 15, 0, 0)
    starts = plan.rows["a_start"] % 5
    single = starts == 4
    assert (plan.rows["pair_label"][single] == 1).all()
    label = plan.rows["pair_label"][~single]
    assert stats.binomtest(int(label.sum()), len(label), 0.5).pvalue > ALPHA
    expected = 0.5 + 0.5 * single.mean()
    assert 0.55 < expected < 0.7
    bound = stats.norm.isf(ALPHA / 2) * 0.5 * np.sqrt(len(label)) / len(plan)
    assert abs(plan.rows["pair_label"].mean() - expected) < bound


def test_random_documents_are_uniform():
    """Where random Bs come from: chi-square at alpha 1e-4 over the other documents, seen from the first."""
    rows = []
    for epoch in range(400):
        plan = plan_epoch(make_corpus([[3] * 6] * 12), DataConfig(short_example_rate=0.0), 16, 1, epoch)
        rows.append(plan.rows[(plan.rows["pair_label"] == 1) & (plan.rows["a_start"] < 6)])
    starts = np.concatenate(rows)["b_start"]
    counts = np.bincount(starts // 6, minlength=12)
    assert counts[0] == 0 and counts.sum() > 500
    assert stats.chisquare(counts[1:]).pvalue > ALPHA
    assert stats.chisquare(np.bincount(starts % 6, minlength=6)).pvalue > ALPHA


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 255, 256, 257, 1000, 4096, 4097])
def test_order_is_a_permutation(size):
    # Rows of two one-sentence documents, one row each; `size` of them.
    corpus = make_corpus([[5]] * max(size, 2))
    plans = [plan_epoch(corpus, DataConfig(), 16, 0, epoch) for epoch in range(4)]
    count = len(plans[0])
    assert count == max(size, 2)
    orders = [plan.example_at(np.arange(count)) for plan in plans]
    for plan, order in zip(plans, orders, strict=True):
        np.testing.assert_array_equal(np.sort(order), np.arange(count))
        # Any place without the ones before it.
        assert int(plan.example_at(count - 1)[0]) == order[-1]
    if size > 4:
        assert len({tuple(order.tolist()) for order in orders}) == 4
        assert all((order != np.arange(count)).any() for order in orders)


def test_order_of_one_row():
    plan = plan_epoch(make_corpus([[5], [5]]), DataConfig(), 16, 0, 0)
    single = type(plan)(plan.rows[:1], 0, plan.order_key)
    assert single.example_at(0).tolist() == [0]


def test_order_looks_random():
    """Chi-square of which quarter each of 4,096 rows comes from against which quarter it goes to, alpha 1e-4."""
    corpus = make_corpus([[5]] * 4096)
    for epoch in range(5):
        order = plan_epoch(corpus, DataConfig(), 16, 3, epoch).example_at(np.arange(4096))
        table = np.histogram2d(np.arange(4096), order, bins=8)[0]
        assert stats.chi2.sf(np.square(table - 64).sum() / 64, 49) > ALPHA
        assert (np.diff(order) == 1).sum() < 12


def test_example_copies_repeat_examples_and_not_the_order():
    corpus = make_corpus(random_documents(3, 40))

    def plan(epoch, copies):
        return plan_epoch(corpus, DataConfig(example_copies=copies), 32, 0, epoch)

    for epoch in range(6):
        np.testing.assert_array_equal(plan(epoch, 2).rows, plan(epoch % 2, None).rows)
    assert plan(0, 2).order_key != plan(2, 2).order_key == plan(2, None).order_key
    assert not np.array_equal(plan(0, None).rows, plan(1, None).rows)
    assert not np.array_equal(plan(0, None).rows, plan_epoch(corpus, DataConfig(), 32, 1, 0).rows)


@pytest.mark.parametrize("documents", [[], [[5, 6]]])
def test_pairs_need_two_documents(documents):
    with pytest.raises(UserError, match="sentence pairs need at least 2: add text") as caught:
        plan_epoch(make_corpus(documents), DataConfig(), 16, 0, 0)
    assert f"has {len(documents)} document" in str(caught.value)
