"""Structural probes: tree distances and depths as squared norms after a linear map (Hewitt and Manning 2019).

Shapes: r packs of sentences with p word places each, w words, H hidden, k rank.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.analysis.bootstrap import BootstrapMean, bootstrap_mean
from bert_jax.analysis.probes import trees
from bert_jax.analysis.rank_correlation import rank_correlation
from bert_jax.array_types import Array, Bool, Float, Int, Key

AnyArray = np.ndarray | Array
PACKS_PER_BATCH = 8
LEARNING_RATE = 1e-3
"""Of Adam, as in the paper's code; decayed linearly to 0."""
INITIAL_NORM = 4.0
"""Expected squared norm of a mapped vector before the first step, of the order of depths in a tree."""


class Tree(NamedTuple):
    """What a sentence's probe is fitted to and scored on."""

    heads: tuple[int, ...]
    """From 1; 0 is the root."""
    counted: np.ndarray
    """bool [n]: False at punctuation, which is left out of spanning trees and of roots."""


class Packs(NamedTuple):
    """Sentences packed into rows of equal length; arrays of NumPy or JAX."""

    words: AnyArray
    """int32 [r, p]: index of each place's word; 0 at empty places."""
    distances: AnyArray
    """float32 [r, p, p]: tree distances."""
    pair_weights: AnyArray
    """float32 [r, p, p]: 1 / n^2 in a sentence of n words, 0 between sentences."""
    depths: AnyArray
    """float32 [r, p]."""
    word_weights: AnyArray
    """float32 [r, p]: 1 / n, 0 at empty places."""


class TreeScores(NamedTuple):
    """Of both probes of one hidden state, in every sentence (Hewitt and Manning 2019, section 4.1)."""

    edges: Float[np.ndarray, " m"]
    """Gold edges between words that are not punctuation, undirected, in the spanning tree."""
    gold_edges: Float[np.ndarray, " m"]
    roots: Float[np.ndarray, " m"]
    """1 where the least deep word, punctuation aside, is the root."""
    gold_roots: Float[np.ndarray, " m"]
    """1 where the root is no punctuation."""
    distance_spearman: Float[np.ndarray, " m"]
    """Correlation of a word's distances to all words, mean over the words; NaN where there is none."""
    depth_spearman: Float[np.ndarray, " m"]
    lengths: Int[np.ndarray, " m"]
    """Words of the sentence."""


SCORES = {"uuas": ("edges", "gold_edges"), "root_accuracy": ("roots", "gold_roots")}
"""Names of ratios of sums over sentences."""
CORRELATIONS = ("distance_spearman", "depth_spearman")
"""Names of means over the sentences of a length, then over `trees.LENGTHS`."""


def correlation_items(scores: TreeScores, name: str) -> tuple[Float[np.ndarray, "*states m"], Bool[np.ndarray, " m"]]:
    """A correlation, and the sentences that count: of LENGTHS, and defined in all states."""
    values = getattr(scores, name)
    defined = np.isfinite(values).reshape(-1, values.shape[-1]).all(0)
    return values, defined & np.isin(_lengths(scores), trees.LENGTHS)


def _lengths(scores: TreeScores) -> np.ndarray:
    return scores.lengths.reshape(-1, scores.lengths.shape[-1])[0]


def mean_scores(scores: TreeScores) -> dict[str, dict[str, Any]]:
    """The means of SCORES and CORRELATIONS with their intervals, NaN without a sentence that counts.

    Args:
      scores: with any leading axes, such as hidden states.
    """
    found = {name: bootstrap_mean(getattr(scores, a), None, getattr(scores, b)) for name, (a, b) in SCORES.items()}
    for name in CORRELATIONS:
        values, counts = correlation_items(scores, name)
        nothing = np.full(values.shape[:-1], np.nan)[()]
        groups = list(map(str, _lengths(scores)[counts].tolist()))
        found[name] = bootstrap_mean(values[..., counts], groups) if counts.any() else BootstrapMean(*[nothing] * 3)
    return {name: mean._asdict() for name, mean in found.items()}


def pack(trees_of: Sequence[Tree], starts: Int[np.ndarray, " m"]) -> Packs:
    """Put sentences into rows as long as the longest one, in their order.

    Args:
      trees_of: of each sentence.
      starts: index of each sentence's first word.
    """
    places = max(len(tree.heads) for tree in trees_of)
    rows: list[list[int]] = [[]]
    used = 0
    for i, tree in enumerate(trees_of):
        if used + len(tree.heads) > places:
            rows.append([])
            used = 0
        rows[-1].append(i)
        used += len(tree.heads)
    count = -(-len(rows) // PACKS_PER_BATCH) * PACKS_PER_BATCH
    shapes = ((count, places), (count, places, places), (count, places, places), (count, places), (count, places))
    packs = Packs(np.zeros(shapes[0], np.int32), *(np.zeros(shape, np.float32) for shape in shapes[1:]))
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            n = len(trees_of[i].heads)
            there, distances = slice(at, at + n), trees.tree_distances(trees_of[i].heads)
            packs.words[r, there] = starts[i] + np.arange(n)
            packs.distances[r, there, there] = distances
            packs.pair_weights[r, there, there] = 1 / n**2
            packs.depths[r, there] = distances[trees_of[i].heads.index(0)]
            packs.word_weights[r, there] = 1 / n
            at += n
    return packs


@functools.partial(jax.jit, static_argnames=("rank", "epochs"))
def fit(
    vectors: Float[Array, "w H"], packs: Packs, *, rank: int, epochs: int, key: Key[Array, ""]
) -> Float[Array, "2 H k"]:
    """The maps of the distance probe and of the depth probe, fitted side by side on the same batches.

    Loss: |squared distance - tree distance| / n^2 summed over a sentence's pairs, and |squared norm - depth| / n summed
    over its words; mean over the sentences of a batch.

    Args:
      vectors: of the words.
      packs: from `pack`.
      rank: k.
      epochs: passes over the sentences.
      key: of the initial maps and of the order.
    """
    count = len(packs.words)
    steps, per_epoch = epochs * count // PACKS_PER_BATCH, count // PACKS_PER_BATCH
    optimizer = optax.adam(optax.linear_schedule(LEARNING_RATE, 0.0, steps))
    bound = (3 * INITIAL_NORM / (vectors.shape[1] * rank)) ** 0.5
    maps = jax.random.uniform(key, (2, vectors.shape[1], rank), minval=-bound, maxval=bound)

    def loss(maps, batch):
        of_batch = vectors[batch.words]
        by_distance, by_depth = of_batch @ maps[0], of_batch @ maps[1]
        distance_loss = batch.pair_weights * jnp.abs(_squared_distances(by_distance) - batch.distances)
        depth_loss = batch.word_weights * jnp.abs(jnp.square(by_depth).sum(-1) - batch.depths)
        return (distance_loss.sum() + depth_loss.sum()) / batch.word_weights.sum()

    def step(i, carry):
        maps, state = carry
        order = jax.random.permutation(jax.random.fold_in(key, i // per_epoch), count)
        chosen = jax.lax.dynamic_slice_in_dim(order, (i % per_epoch) * PACKS_PER_BATCH, PACKS_PER_BATCH)
        batch = jax.tree.map(lambda values: jnp.asarray(values)[chosen], packs)
        updates, state = optimizer.update(jax.grad(loss)(maps, batch), state)
        return optax.apply_updates(maps, updates), state

    return jax.lax.fori_loop(0, steps, step, (maps, optimizer.init(maps)))[0]


def _squared_distances(mapped: Float[Array, "*rows p k"]) -> Float[Array, "*rows p p"]:
    norms = jnp.square(mapped).sum(-1)
    products = mapped @ jnp.swapaxes(mapped, -1, -2)
    return jnp.maximum(norms[..., :, None] + norms[..., None, :] - 2 * products, 0)


@jax.jit
def _mapped(vectors: Float[Array, "w H"], maps: Float[Array, "2 H k"]) -> Float[Array, "2 w k"]:
    return vectors @ maps


@jax.jit
def _scaled(train: Float[Array, "w H"], dev: Float[Array, "v H"]) -> tuple[Array, Array]:
    """Both divided by one number, so that training vectors have variance 1; the space of vectors keeps its form."""
    scale = 1 / jnp.maximum(jnp.sqrt(jnp.square(train - train.mean(0, keepdims=True)).mean()), 1e-6)
    return train * scale, dev * scale


def probe_state(
    train: Float[Array, "w H"],
    dev: Float[Array, "v H"],
    packs: Packs,
    dev_trees: Sequence[Tree],
    dev_starts: Int[np.ndarray, " m"],
    *,
    rank: int,
    epochs: int,
    seed: int,
) -> TreeScores:
    """Fit both probes on one hidden state and score them.

    Args:
      train: word vectors of the training sentences.
      dev: of the dev sentences.
      packs: of the training sentences.
      dev_trees: of the dev sentences.
      dev_starts: index of each dev sentence's first word.
      rank: of the maps, at most H.
      epochs: passes over the training sentences.
      seed: of the initial maps and of the order.
    """
    train, dev = _scaled(train, dev)
    maps = fit(train, packs, rank=min(rank, train.shape[1]), epochs=epochs, key=jax.random.key(seed))
    by_distance, by_depth = np.asarray(_mapped(dev, maps), np.float64)
    distances, depths = [], []
    for tree, start in zip(dev_trees, dev_starts, strict=True):
        there = slice(start, start + len(tree.heads))
        differences = by_distance[there, None] - by_distance[None, there]
        distances.append(np.square(differences).sum(-1))
        depths.append(np.square(by_depth[there]).sum(-1))
    return score(distances, depths, dev_trees)


def score(distances: Sequence[np.ndarray], depths: Sequence[np.ndarray], of: Sequence[Tree]) -> TreeScores:
    """Scores of predicted distances and depths.

    Args:
      distances: predicted, [n, n] for each sentence; any that grow with the tree distance.
      depths: predicted, [n] for each sentence.
      of: gold trees.
    """
    found = []
    for predicted, depth, tree in zip(distances, depths, of, strict=True):
        edges, gold = trees.correct_edges(predicted, tree.heads, tree.counted)
        root = tree.heads.index(0)
        is_root = bool(tree.counted[root]) and np.where(tree.counted, depth, np.inf).argmin() == root
        gold_distances = trees.tree_distances(tree.heads)
        rows = rank_correlation(predicted, gold_distances)
        by_distance = rows.mean() if len(rows) > 1 else np.nan
        by_depth = rank_correlation(depth, gold_distances[root])
        found.append((edges, gold, is_root, tree.counted[root], by_distance, by_depth))
    columns = np.array(found, np.float64).T
    return TreeScores(*columns, np.array([len(tree.heads) for tree in of]))
