"""Dependency trees as distances and depths, spanning trees of a matrix, and how they are scored."""

from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Bool, Int

LENGTHS = range(5, 51)
"""Sentence lengths over which Spearman correlations are averaged (Hewitt and Manning 2019, section 4.1)."""


def tree_distances(heads: Sequence[int]) -> Int[np.ndarray, "n n"]:
    """Number of arcs between every two words.

    Args:
      heads: of each word, from 1; 0 is the root.
    """
    n = len(heads)
    distances = np.full((n, n), n, np.int64)
    np.fill_diagonal(distances, 0)
    for word, head in enumerate(heads):
        if head:
            distances[word, head - 1] = distances[head - 1, word] = 1
    for k in range(n):
        distances = np.minimum(distances, distances[:, k, None] + distances[k])
    return distances


def tree_depths(heads: Sequence[int]) -> Int[np.ndarray, " n"]:
    """Arcs from every word to the root, whose depth is 0; arguments as `tree_distances`."""
    return tree_distances(heads)[list(heads).index(0)]


def spanning_edges(distances: np.ndarray) -> Int[np.ndarray, "*matrices e 2"]:
    """Edges of the minimum spanning tree of each matrix (Prim 1957), from word 0 on; e is n - 1.

    Args:
      distances: [..., n, n], symmetric; n at least 1. For a maximum spanning tree, give negative weights.
    """
    *matrices, n, _ = distances.shape
    flat = distances.reshape(-1, n, n)
    every = np.arange(len(flat))
    nearest, source = flat[:, 0].astype(np.float64), np.zeros((len(flat), n), np.int64)
    nearest[:, 0] = np.inf
    done = np.zeros((len(flat), n), bool)
    done[:, 0] = True
    edges = np.zeros((len(flat), n - 1, 2), np.int64)
    for i in range(n - 1):
        word = nearest.argmin(1)
        edges[:, i] = np.stack([source[every, word], word], axis=1)
        done[every, word] = True
        of_word = flat[every, word]
        closer = (of_word < nearest) & ~done
        nearest, source = np.where(closer, of_word, nearest), np.where(closer, word[:, None], source)
        nearest[done] = np.inf
    return edges.reshape(*matrices, n - 1, 2)


def gold_adjacency(heads: Sequence[int], counted: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, "n n"]:
    """Which pairs of words are joined by an arc, both ways; arcs at words that are not counted are left out."""
    found = np.zeros((len(heads), len(heads)), bool)
    for word, head in enumerate(heads):
        if head and counted[word] and counted[head - 1]:
            found[word, head - 1] = found[head - 1, word] = True
    return found


def correct_edges(
    distances: np.ndarray, heads: Sequence[int], counted: Bool[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, "*matrices"], int]:
    """Undirected gold edges that the minimum spanning tree has, and the number of gold edges.

    Words that are not counted are removed before the spanning tree is built.

    Args:
      distances: of the words, [..., n, n], symmetric.
      heads: as in `tree_distances`.
      counted: False at punctuation.
    """
    gold = gold_adjacency(heads, counted)
    kept = np.flatnonzero(counted)
    if len(kept) < 2:
        return np.zeros(distances.shape[:-2], np.int64), 0
    edges = kept[spanning_edges(distances[..., kept[:, None], kept])]
    return np.asarray(gold[edges[..., 0], edges[..., 1]].sum(-1)), int(gold.sum()) // 2


def chain_distances(n: int) -> Int[np.ndarray, "n n"]:
    """Distances of words in a linear chain, whose tree joins each word to its right neighbour."""
    return np.abs(np.arange(n)[:, None] - np.arange(n))


def control_heads(words: Sequence[str], attaches_to_first: Sequence[bool]) -> tuple[int, ...]:
    """Heads of the control tree, from 1, by a rule that depends on the word type only (as in Hewitt and Liang 2019).

    The first word is the root; the head of each other word is the first word or the word before it.

    Args:
      words: of the sentence.
      attaches_to_first: for each word whether its type attaches to the first word.
    """
    return tuple(0 if i == 0 else 1 if attaches_to_first[i] else i for i in range(len(words)))
