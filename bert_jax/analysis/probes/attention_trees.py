"""Undirected trees from attention: the maximum spanning tree over words, of every head (Htut et al. 2019)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.analysis.probes.structural import Tree
from bert_jax.analysis.probes.trees import chain_distances, correct_edges
from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, word_attention

PROBABILITIES = "layers.*.attention.probabilities"


def head_edges(
    model: LoadedModel, rows: Sequence[TextRow], trees: Sequence[Tree], *, description: str, progress: bool = False
) -> Float[np.ndarray, "L N m"]:
    """Gold edges of each sentence in the maximum spanning tree over a + a^T, for the attention a of every head.

    Args:
      model: from `inference.load`.
      rows: of the sentences.
      trees: of the sentences.
      description: of the progress bar.
      progress: show a progress bar on stderr.
    """
    edges = np.zeros((model.config.num_layers, model.config.num_heads, len(rows)))
    with progress_bar(description, len(rows), "sentence", shown=progress) as bar:
        for batch in batches(rows, model.tokenizer.pad_id):
            probabilities = capture(model, batch, [PROBABILITIES])[PROBABILITIES]
            for b, index in enumerate(batch.indices):
                if index < 0:
                    continue
                attention = word_attention(rows[index], probabilities[:, b])
                tree = trees[index]
                both = attention + np.swapaxes(attention, -1, -2)
                edges[:, :, index], _ = correct_edges(-both, tree.heads, tree.counted)
            bar.update(int((batch.indices >= 0).sum()))
    return edges


class TreeBaselines(NamedTuple):
    """Gold edges of each sentence."""

    gold: Float[np.ndarray, " m"]
    chain: Float[np.ndarray, " m"]
    """In the chain, which joins each word to its right neighbour."""
    random: Float[np.ndarray, " m"]
    """In a spanning tree of random distances."""


def baselines(trees: Sequence[Tree], seed: int) -> TreeBaselines:
    """The edges of baselines; `seed` is of the random distances."""
    rng, edges = np.random.default_rng(seed), []
    for tree in trees:
        n = len(tree.heads)
        distances = rng.random((n, n))
        found, gold = correct_edges(np.stack([chain_distances(n), distances + distances.T]), tree.heads, tree.counted)
        edges.append((gold, *found))
    return TreeBaselines(*np.array(edges, np.float64).T)
