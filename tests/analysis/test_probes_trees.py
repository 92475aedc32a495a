"""Structural probes on vectors built from trees, spanning trees against a twin, and trees from attention."""

import itertools

import jax
import numpy as np
import pytest

from bert_jax.analysis.probes import attention_trees, by_state, probe_items, structural, trees, vectors
from bert_jax.analysis.probes.structural import Tree
from bert_jax.analysis.treebank import Sentence
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import batches, encode_words, word_attention
from tests.interventions.models import small_model

WIDTH = 16


def random_heads(n, rng):
    """A random tree over words in random order."""
    order = rng.permutation(n)
    heads = np.zeros(n, int)
    for i in range(1, n):
        heads[order[i]] = order[rng.integers(i)] + 1
    return tuple(heads.tolist())


def random_sentences(count, seed):
    rng = np.random.default_rng(seed)
    found = []
    for n in rng.integers(4, 13, count):
        words, tags = rng.choice(list("abcdefghij"), n), rng.choice(["NOUN", "VERB", "PUNCT"], n, p=[0.5, 0.4, 0.1])
        found.append(Sentence(tuple(words), tuple(tags), random_heads(n, rng), ("dep",) * n))
    return found


def tree_vectors(sentence, rotation):
    """A word has a dimension, and is the sum of the dimensions from it to the root, without that of the root.

    Squared distances are then tree distances, and squared norms depths.
    """
    n = len(sentence.heads)
    found = np.zeros((n, WIDTH))
    for word in range(n):
        at = word
        while sentence.heads[at]:
            found[word, at] = 1
            at = sentence.heads[at] - 1
    return found @ rotation


def sample_of(sentences):
    rows = encode_words([one.words for one in sentences], small_model().tokenizer, 64)
    return vectors.Sample(sentences, rows, 0, len(sentences))


def test_distances_and_depths_of_a_chain_and_a_star():
    np.testing.assert_array_equal(trees.tree_distances((0, 1, 2, 3)), trees.chain_distances(4))
    np.testing.assert_array_equal(trees.tree_depths((2, 3, 0, 3)), [2, 1, 0, 1])
    np.testing.assert_array_equal(trees.tree_distances((0, 1, 1)), [[0, 1, 1], [1, 0, 2], [1, 2, 0]])


def kruskal(distances):
    parent, found = list(range(len(distances))), set()
    for i, j in sorted(itertools.combinations(parent, 2), key=lambda pair: distances[pair]):
        one, other = parent[i], parent[j]
        if one != other:
            found.add((i, j))
            parent = [one if p == other else p for p in parent]
    return found


def test_spanning_trees_are_those_of_kruskal():
    distances = np.random.default_rng(0).normal(size=(2, 3, 7, 7))
    distances += np.swapaxes(distances, -1, -2)
    edges = trees.spanning_edges(distances)
    for i, j in itertools.product(range(2), range(3)):
        assert {tuple(sorted(edge)) for edge in edges[i, j].tolist()} == kruskal(distances[i, j])
    assert trees.spanning_edges(np.zeros((1, 1))).shape == (0, 2)


def test_punctuation_is_removed_before_the_spanning_tree():
    heads, counted = (2, 0, 2, 3), np.array([True, True, False, True])
    found, gold = trees.correct_edges(trees.tree_distances(heads), heads, counted)
    assert (int(found), gold) == (1, 1)
    # The way over the punctuation is shorter than the arc.
    distances = np.array([[0, 1, 1.5], [1, 0, 1], [1.5, 1, 0]])
    found, gold = trees.correct_edges(distances, (0, 1, 1), np.array([True, False, True]))
    assert (int(found), gold) == (1, 1)
    assert trees.correct_edges(np.zeros((2, 2)), (0, 1), np.array([True, False]))[1] == 0


def test_means_over_sentences():
    """Correlations over the sentences of a length, then over lengths from 5 to 50; edges and roots over all.

    The single sentence of length 7 has the spread of all: -0.5, 0 and 0.5.
    """
    nan, spearman = np.nan, np.array([1.0, 0.0, 0.5, 9.0, 9.0, np.nan])
    counts = [
        np.array(one, float) for one in ([3, 0, 2, 1, 9, 0], [4, 4, 4, 4, 9, 0], [1, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0])
    ]
    scores = structural.TreeScores(*counts, spearman, spearman[::-1] * nan, np.array([5, 5, 7, 4, 51, 6]))
    found = structural.mean_scores(scores)
    assert found["uuas"]["value"] == pytest.approx(15 / 25) and found["root_accuracy"]["value"] == pytest.approx(2 / 5)
    correlation = found["distance_spearman"]
    assert (correlation["value"], correlation["low"], correlation["high"]) == (0.5, 0, 1)
    assert np.isnan(found["depth_spearman"]["value"])
    states = structural.TreeScores(*(np.stack([one, one]) for one in scores))
    np.testing.assert_array_equal(structural.mean_scores(states)["uuas"]["low"], [found["uuas"]["low"]] * 2)


def test_gold_trees_have_the_best_scores_and_reversed_ones_the_worst():
    of = by_state.gold_trees(sample_of(random_sentences(40, 0)))
    distances = [trees.tree_distances(tree.heads) for tree in of]
    depths = [trees.tree_depths(tree.heads) for tree in of]
    best = structural.mean_scores(structural.score(distances, depths, of))
    np.testing.assert_allclose([list(one.values()) for one in best.values()], 1)
    worst = structural.mean_scores(structural.score([-one for one in distances], [-one for one in depths], of))
    assert worst["uuas"]["value"] < 0.2 and worst["root_accuracy"]["value"] == 0
    np.testing.assert_allclose([worst[name]["value"] for name in structural.CORRELATIONS], -1)


def test_packs_hold_each_sentence_once():
    sample = sample_of(random_sentences(20, 1))
    of = by_state.gold_trees(sample)
    packs = structural.pack(of, sample.starts)
    assert len(packs.words) % structural.PACKS_PER_BATCH == 0 and packs.words.shape[1] == sample.lengths.max()
    np.testing.assert_allclose([packs.word_weights.sum(), packs.pair_weights.sum()], len(of), rtol=1e-5)
    np.testing.assert_array_equal(np.sort(packs.words[packs.word_weights > 0]), np.arange(sample.lengths.sum()))
    for row in range(len(packs.words)):
        for i, j in zip(*np.nonzero(packs.pair_weights[row]), strict=True):
            sentence = np.searchsorted(sample.starts, packs.words[row, i], side="right") - 1
            start = sample.starts[sentence]
            assert start <= packs.words[row, j] < start + sample.lengths[sentence]
            expected = trees.tree_distances(of[sentence].heads)
            assert packs.distances[row, i, j] == expected[packs.words[row, i] - start, packs.words[row, j] - start]


@pytest.fixture(scope="module")
def planted():
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))[0] * 3
    samples = [sample_of(random_sentences(count, seed)) for count, seed in ((300, 0), (60, 1))]
    arrays = [np.concatenate([tree_vectors(one, rotation) for one in sample.sentences]) for sample in samples]
    states = [
        jax.numpy.asarray(np.stack([x, np.random.default_rng(2).normal(size=x.shape)]), np.float32) for x in arrays
    ]
    found = vectors.ProbeVectors(*(list(one) for one in states))
    return found, *samples


def test_vectors_built_from_trees_are_recovered_and_the_control_task_is_not(planted):
    settings = {"rank": WIDTH, "epochs": 60, "seed": 0}
    scores = by_state.probe_trees(*planted, **settings, description="x", progress=False)
    found = {name: one["value"] for name, one in structural.mean_scores(scores).items()}
    assert found["uuas"][0] > 0.99 and found["distance_spearman"][0] > 0.95
    assert found["root_accuracy"][0] > 0.95 and found["depth_spearman"][0] > 0.9
    assert found["uuas"][1] < 0.5  # noise
    control = by_state.probe_control_trees(*planted, 0, **settings)
    assert control["uuas"]["value"] < control["chain_uuas"]["value"]
    # The state with the trees is chosen for both halves of the sentences.
    chain = by_state.chain_scores(by_state.gold_trees(planted[2]))
    items = probe_items.tree_items([str(i) for i in range(60)], {"model": scores, "chain": chain})
    np.testing.assert_array_equal(items[probe_items.UUAS].scores["model"], scores.edges[0])
    np.testing.assert_array_equal(items[probe_items.UUAS].weights["chain"], chain.gold_edges)
    depths = items[probe_items.DEPTHS]
    lengths = planted[2].lengths[[int(one) for one in depths.items]]
    assert min(lengths) >= 5 and depths.groups == tuple(map(str, lengths.tolist()))


def test_control_trees_depend_on_word_types(planted):
    _, train, _ = planted
    first_of: dict[str, set[bool]] = {}
    for sentence, tree in zip(train.sentences, by_state.control_trees(train, 0), strict=True):
        assert tree.heads[0] == 0
        for i in range(2, len(tree.heads)):
            assert tree.heads[i] in (1, i)
            first_of.setdefault(sentence.words[i], set()).add(tree.heads[i] == 1)
    assert all(len(values) == 1 for values in first_of.values()) and len(set(map(str, first_of.values()))) == 2


def test_uuas_of_heads_is_that_of_their_attention():
    model = small_model()
    sample = sample_of(random_sentences(12, 3))
    of = by_state.gold_trees(sample)
    found = attention_trees.head_edges(model, sample.rows, of, description="x")
    correct, edges = 0, 0
    for row, tree in zip(sample.rows, of, strict=True):
        (batch,) = batches([row], model.tokenizer.pad_id, 64)
        name = "layers.1.attention.probabilities"
        words = word_attention(row, capture(model, batch, [name])[name][0, 1])
        kept = np.flatnonzero(tree.counted)
        weights = -(words + words.T)[np.ix_(kept, kept)]
        gold = trees.gold_adjacency(tree.heads, tree.counted)
        correct += sum(gold[kept[i], kept[j]] for i, j in kruskal(weights))
        edges += gold.sum() // 2
    assert found[1, 1].sum() == correct and attention_trees.baselines(of, 0).gold.sum() == edges


def test_attention_that_follows_the_tree_and_shuffled_attention():
    rng = np.random.default_rng(0)
    correct = shuffled = edges = 0
    of = [Tree(random_heads(12, rng), np.ones(12, bool)) for _ in range(150)]
    for tree in of:
        attention = 0.01 * rng.random((12, 12)) + trees.gold_adjacency(tree.heads, tree.counted) * np.tri(12)
        weights = attention + attention.T
        order = rng.permutation(12)
        found, gold = trees.correct_edges(-np.stack([weights, weights[order][:, order]]), tree.heads, tree.counted)
        correct, shuffled, edges = correct + found[0], shuffled + found[1], edges + gold
    baseline = attention_trees.baselines(of, 0)
    assert correct == edges == baseline.gold.sum()
    random = baseline.random.sum() / edges
    assert abs(shuffled / edges - random) < 0.03 and random < 0.25
