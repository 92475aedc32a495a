"""Heads per relation: attention built from the tree is found, shuffled attention is at chance."""

import numpy as np
import pytest

from bert_jax.analysis.attention import relations
from bert_jax.analysis.attention.attention import selection_and_scoring
from bert_jax.analysis.attention.maps import TextAttention
from bert_jax.analysis.treebank import Sentence
from bert_jax.interventions.rows import TextRow

LABELS = ("nsubj", "obj", "det")
SHAPE = 2, 3  # layers, heads
FOLLOWS, REVERSED = (1, 2), (0, 1)
"""Heads that attend from the dependent to the head, and from the head to the dependent."""


def make_sentences(count: int, seed: int) -> list[Sentence]:
    """Random trees of 5 to 9 words; the last word is punctuation."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        words = int(rng.integers(5, 10))
        order = rng.permutation(words - 1)
        heads = np.zeros(words, int)
        for place in range(1, words - 1):
            heads[order[place]] = order[int(rng.integers(place))] + 1
        heads[-1] = order[0] + 1
        tags = ("X",) * (words - 1) + ("PUNCT",)
        labels = [str(rng.choice(LABELS)) if head else "root" for head in heads[:-1]]
        made.append(Sentence(("w",) * words, tags, tuple(heads.tolist()), (*labels, "punct")))
    return made


def make_rows(sentences: list[Sentence], seed: int) -> list[TextRow]:
    """Words of one to three tokens."""
    rng, rows = np.random.default_rng(seed), []
    for sentence in sentences:
        word_ids = np.repeat(np.arange(len(sentence.words)), rng.integers(1, 4, len(sentence.words)))
        ids = np.r_[-1, word_ids, -1].astype(np.int32)
        rows.append(TextRow(np.zeros_like(ids), np.zeros_like(ids), ids))
    return rows


def make_maps(sentences, rows, seed, *, shuffled=False):
    """Noise, and two heads that follow the tree; [CLS] gets the largest part of all attention."""
    rng = np.random.default_rng(seed)
    for index, (sentence, row) in enumerate(zip(sentences, rows, strict=True)):
        n, word_ids = len(row.input_ids), row.word_ids
        maps = 0.1 * rng.random((*SHAPE, n, n))
        for word, head in enumerate(sentence.heads):
            if head:
                # A head's tokens share its attention: the sum over them counts.
                of_word, of_head = word_ids == word, word_ids == head - 1
                maps[FOLLOWS][np.ix_(of_word, of_head)] += 3 / of_head.sum()
                maps[REVERSED][np.ix_(of_head, of_word)] += 3 / of_word.sum()
        if shuffled:
            # Of queries as well: shuffled keys alone leave it visible which words are heads of many.
            queries, keys = (1 + rng.permutation(n - 2) for _ in range(2))
            maps[..., 1:-1, 1:-1] = maps[..., queries, :][..., keys]
        maps[..., 0] += 9
        padded = np.zeros((*SHAPE, n + 4, n + 4))
        padded[..., :n, :n] = maps / maps.sum(-1, keepdims=True)
        yield TextAttention(index, padded, n)


def count(sentences, seed, labels=LABELS, **options):
    rows = make_rows(sentences, seed)
    return relations.count_correct(make_maps(sentences, rows, seed, **options), rows, sentences, labels)


def test_attention_that_follows_the_tree_has_accuracy_1():
    parts = [count(make_sentences(60, seed), seed) for seed in (0, 1)]
    best = relations.best_heads(*parts, LABELS)
    table = {one.about["relation"]: one.about for one in best}
    assert list(table) == [*LABELS, "all"]
    for row in table.values():
        assert row["accuracy"] == row["accuracy_on_selection"] == 1.0
        assert (row["layer"], row["head"]) == FOLLOWS and row["direction"] == "dependent to head"
        assert row["offset_accuracy"] < 0.5
    total = sum(row["words"] for name, row in table.items() if name != "all")
    assert total == table["all"]["words"] == parts[1].total[:, -1].sum()
    of_direction = parts[1].correct[:, -1].sum(0) / parts[1].total[:, -1].sum()
    # A head with one dependent is followed backwards as well; one that attends to several splits its attention.
    assert of_direction[1][REVERSED] == 1.0 > of_direction[0][REVERSED]
    # The items of the tests are the sentences with the relation.
    words, names = parts[1].total, [f"sentence {i}" for i in range(60)]
    tests = relations.item_scores(best, [one.correct for one in best], words, names)
    for r, label in enumerate(LABELS):
        one = tests[f"best head, {label}"]
        assert one.items == tuple(names[i] for i in range(60) if words[i, r])
        assert one.scores["model"].sum() == one.weights["model"].sum() == table[label]["words"]
        offset = one.scores["best_offset"].sum() / one.weights["best_offset"].sum()
        assert offset == pytest.approx(table[label]["offset_accuracy"])
    gain = relations.mean_gain(best, words)
    assert gain["value"] == pytest.approx(np.mean([1 - table[label]["offset_accuracy"] for label in LABELS]))
    assert gain["value"] - 0.1 < gain["low"] < gain["value"] < gain["high"] < 1


def test_shuffled_attention_is_at_chance():
    sentences = make_sentences(250, 1)
    parts = [count(make_sentences(250, 0), 0, shuffled=True), count(sentences, 1, shuffled=True)]
    row = relations.best_heads(*parts, LABELS)[-1].about
    chances = np.concatenate([[1 / (len(s.words) - 1)] * int(relations.scored_words(s).sum()) for s in sentences])
    assert abs(row["accuracy"] - chances.mean()) < 0.06
    assert abs(row["accuracy"] - row["offset_accuracy"]) < 0.06


def test_the_best_head_of_the_selection_is_scored():
    """Not the one that happens to be the best where it is scored."""
    correct = np.zeros((2, 1, 1, 2, *SHAPE), np.int64)
    correct[0, 0, 0, 1, 0, 2], correct[0, 0, 0, 0, 1, 1] = 9, 8
    correct[1, 0, 0, 1, 0, 2], correct[1, 0, 0, 0, 1, 1] = 3, 6
    offsets, totals = np.zeros((1, 1, len(relations.OFFSETS)), np.int64), np.array([[10]])
    ((row, *_),) = relations.best_heads(*(relations.Counts(one, offsets, totals) for one in correct), ())
    assert (row["layer"], row["head"], row["direction"]) == (0, 2, "head to dependent")
    assert (row["accuracy"], row["accuracy_on_selection"]) == (0.3, 0.9)


def test_a_word_does_not_predict_itself():
    found = relations.predicted_heads(np.array([[9.0, 1, 2], [3, 9, 2], [0, 1, 9]]))
    assert found.tolist() == [[2, 0, 1], [1, 0, 0]]


def test_offsets_stay_in_the_sentence():
    found = dict(zip(relations.OFFSETS, relations.offset_heads(4).tolist(), strict=True))
    assert (found[1], found[-1], found[5]) == ([1, 2, 3, 3], [0, 0, 1, 2], [3, 3, 3, 3]) and 0 not in found


def test_the_baseline_is_the_best_offset_of_the_selection():
    """In chains all heads are the next word, but in half of the scored sentences."""
    chain = Sentence(("w",) * 5, ("X",) * 5, (2, 3, 4, 5, 0), (*("det",) * 4, "root"))
    back = Sentence(("w",) * 5, ("X",) * 5, (0, 1, 2, 3, 4), ("root", *("det",) * 4))
    parts = [count(one, 0, ("det",)) for one in ([chain] * 3, [chain] * 2 + [back] * 2)]
    row = relations.best_heads(*parts, ("det",))[-1].about
    assert (row["offset"], row["offset_accuracy"], row["words"], row["words_of_selection"]) == (1, 0.5, 16, 12)


def test_which_words_count():
    sentence = Sentence(("a", "b", ",", "c"), ("X", "X", "PUNCT", "X"), (2, 0, 2, 2), ("det", "root", "punct", "obj"))
    assert relations.scored_words(sentence).tolist() == [True, False, False, True]
    kept, rare = relations.frequent_relations([[sentence] * 3, [sentence, sentence._replace(deprels=("x",) * 4)]], 1)
    assert (kept, rare) == (["det", "obj"], 1)
    assert relations.frequent_relations([[sentence] * 3, [sentence]], 2) == ([], 2)


@pytest.mark.parametrize(
    ("present", "names", "first"),
    [
        (("train", "dev", "test"), ("dev", "test"), {"dev": 4, "test": 4}),
        (("train", "test"), ("test, odd sentences", "test, even sentences"), {"test": 2}),
        (("train",), ("train, odd sentences", "train, even sentences"), {"train": 2}),
    ],
)
def test_selection_and_scoring_have_different_sentences(present, names, first):
    splits = {name: make_sentences(4, len(name)) for name in present}
    found, parts = selection_and_scoring(splits)
    assert found == names and [len(part) for part in parts] == [*first.values()] * (2 // len(first))
    assert not any(one is other for one in parts[0] for other in parts[1])
