"""Undirected trees from attention: the maximum spanning tree over words, of every head (Htut et al. 2019)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.analysis.probes.structural import Tree
from bert_jax.analysis.probes.trees import chain_distances, correct_edges
from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, word_attention

PROBABILITIES = "layers.*.attention.probabilities"


def head_uuas(
    model: LoadedModel, rows: Sequence[TextRow], trees: Sequence[Tree], *, description: str, progress: bool = False
) -> Float[np.ndarray, "L N"]:
    """Share of gold edges in the maximum spanning tree over a + a^T, for the attention a of every head.

    Args:
      model: from `inference.load`.
      rows: of the sentences.
      trees: of the sentences.
      description: of the progress bar.
      progress: show a progress bar on stderr.
    """
    correct, edges = np.zeros((model.config.num_layers, model.config.num_heads), np.int64), 0
    with progress_bar(description, len(rows), "sentence", shown=progress) as bar:
        for batch in batches(rows, model.tokenizer.pad_id):
            probabilities = capture(model, batch, [PROBABILITIES])[PROBABILITIES]
            for b, index in enumerate(batch.indices):
                if index < 0:
                    continue
                attention = word_attention(rows[index], probabilities[:, b])
                tree = trees[index]
                found, gold = correct_edges(-(attention + np.swapaxes(attention, -1, -2)), tree.heads, tree.counted)
                correct, edges = correct + found, edges + gold
            bar.update(int((batch.indices >= 0).sum()))
    return correct / max(edges, 1)


def baselines(trees: Sequence[Tree], seed: int) -> dict[str, Any]:
    """UUAS of the chain, which joins each word to its right neighbour, and of spanning trees of random distances."""
    rng = np.random.default_rng(seed)
    chain = random = edges = 0
    for tree in trees:
        n = len(tree.heads)
        distances = rng.random((n, n))
        found, gold = correct_edges(np.stack([chain_distances(n), distances + distances.T]), tree.heads, tree.counted)
        chain, random, edges = chain + int(found[0]), random + int(found[1]), edges + gold
    return {"edges": edges, "chain_uuas": chain / max(edges, 1), "random_uuas": random / max(edges, 1)}
