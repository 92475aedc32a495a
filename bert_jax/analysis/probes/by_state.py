"""Scores of every hidden state as plain values: linear probes, scalar mixes and structural probes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.analysis.probes import mix, structural
from bert_jax.analysis.probes.label_tasks import LabelTask, control_task, uniform_of_type
from bert_jax.analysis.probes.linear import probe_state, uniform_code_bits
from bert_jax.analysis.probes.structural import Tree, TreeScores
from bert_jax.analysis.probes.trees import chain_distances, control_heads
from bert_jax.analysis.probes.vectors import ProbeVectors, Sample
from bert_jax.command.progress import progress_bar
from bert_jax.finetune.metrics import span_f1

PUNCTUATION = "PUNCT"
"""UPOS of words that are left out of spanning trees."""


def linear_scores(
    vectors: ProbeVectors,
    task: LabelTask,
    dev: Sample,
    *,
    epochs: int,
    penalty: float,
    seed: int,
    description: str,
    progress: bool,
) -> dict[str, list[float]]:
    """Linear probes of every hidden state for a task and its control task; of entities, F1 of spans as well.

    Args:
      vectors: of the words.
      task: from `tasks`.
      dev: sentences of the dev examples.
      epochs: as in `linear.fit`.
      penalty: as in `linear.fit`.
      seed: of the control task and of the order of examples.
      description: of the progress bar.
      progress: show a progress bar on stderr.
    """
    control, scores = control_task(task, seed), []
    with progress_bar(description, len(vectors.train), "state", shown=progress) as bar:
        for states in zip(vectors.train, vectors.dev, strict=True):
            scores.append(probe_state(*states, task, control, epochs=epochs, penalty=penalty, seed=seed))
            bar.update()
    uniform = uniform_code_bits(len(task.train.labels), len(task.names))
    found = {
        "score": [one.score for one in scores],
        "control_score": [one.control_score for one in scores],
        "selectivity": [one.score - one.control_score for one in scores],
        "code_kilobits": [one.code_bits / 1000 for one in scores],
        "compression": [uniform / one.code_bits for one in scores],
    }
    if task.outside is not None:
        found["span_f1"] = [_span_f1(task, one.predictions, dev) for one in scores]
    return found


def _span_f1(task: LabelTask, predictions: np.ndarray, dev: Sample) -> float:
    tags = [task.names[label] for label in predictions]
    predicted = [tags[start : start + n] for start, n in zip(dev.starts, dev.lengths, strict=True)]
    return span_f1([one.tags for one in dev.sentences], predicted)["f1"]


def mix_summary(vectors: ProbeVectors, task: LabelTask, *, epochs: int, seed: int) -> dict[str, Any]:
    """Scalar mixes over states 0 to l, where their gains are, and how concentrated; other arguments as above."""
    scores = mix.probe_mixes(vectors.train, vectors.dev, task, epochs=epochs, seed=seed)
    return {
        "score": scores.cumulative_scores,
        "weights": scores.weights,
        "centre_of_gravity": mix.centre_of_gravity(scores.weights),
        "weights_divergence_bits": mix.divergence_from_uniform_bits(scores.weights),
        "expected_layer": mix.expected_layer(scores.cumulative_scores),
        "gain_concentration_bits": mix.gain_concentration_bits(scores.cumulative_scores),
    }


def gold_trees(sample: Sample) -> list[Tree]:
    """The dependency trees of sentences."""
    return [Tree(one.heads, np.array([tag != PUNCTUATION for tag in one.upos])) for one in sample.sentences]


def control_trees(sample: Sample, seed: int) -> list[Tree]:
    """Trees of the control task: the type of a word, in lower case, and the seed decide where it attaches."""
    return [
        tree._replace(
            heads=control_heads(one.words, [uniform_of_type(w.lower(), "trees", seed) < 0.5 for w in one.words])
        )
        for one, tree in zip(sample.sentences, gold_trees(sample), strict=True)
    ]


def structural_scores(
    vectors: ProbeVectors,
    train: Sample,
    dev: Sample,
    *,
    rank: int,
    epochs: int,
    seed: int,
    with_control: bool,
    description: str,
    progress: bool,
) -> dict[str, Any]:
    """Structural probes of every hidden state, and of the state with the highest UUAS for the control trees.

    Args:
      vectors: of the words.
      train: sentences of the training vectors.
      dev: sentences of the dev vectors.
      rank: as in `structural.probe_state`.
      epochs: as in `structural.probe_state`.
      seed: of the control task, the initial maps and the order.
      with_control: whether the control task is run.
      description: of the progress bar.
      progress: show a progress bar on stderr.
    """

    def probe(state: int, train_packs: structural.Packs, dev_trees: Sequence[Tree]) -> TreeScores:
        states = vectors.train[state], vectors.dev[state]
        return structural.probe_state(*states, train_packs, dev_trees, dev.starts, rank=rank, epochs=epochs, seed=seed)

    count = len(vectors.train)
    packs, trees, scores = _pack(gold_trees(train), train), gold_trees(dev), []
    with progress_bar(description, count + with_control, "state", shown=progress) as bar:
        for state in range(count):
            scores.append(probe(state, packs, trees))
            bar.update()
        found: dict[str, Any] = {name: [getattr(one, name) for one in scores] for name in TreeScores._fields}
        if with_control:
            best = int(np.nanargmax(found["uuas"])) if np.isfinite(found["uuas"]).any() else 0
            of_control = control_trees(dev, seed)
            control = probe(best, _pack(control_trees(train, seed), train), of_control)
            found["control"] = {"state": best, "uuas": control.uuas, "chain_uuas": chain_scores(of_control).uuas}
            bar.update()
    return found


def _pack(trees: Sequence[Tree], sample: Sample) -> structural.Packs:
    return jax.tree.map(jax.numpy.asarray, structural.pack(trees, sample.starts))


def chain_scores(trees: Sequence[Tree]) -> TreeScores:
    """Scores of the chain that joins each word to its right neighbour, with the first word as the root."""
    lengths = [len(tree.heads) for tree in trees]
    return structural.score([chain_distances(n) for n in lengths], [np.arange(n) for n in lengths], trees)
