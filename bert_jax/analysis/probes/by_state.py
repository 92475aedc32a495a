"""Scores of every hidden state: linear probes, scalar mixes and structural probes.

Shapes: S hidden states, m dev sentences.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.analysis.bootstrap import (
    PARTS,
    BootstrapMean,
    bootstrap_mean,
    jackknife,
    mean_over_seeds,
    percentiles,
    resampled_means,
)
from bert_jax.analysis.item_scores import mean_of_seeds
from bert_jax.analysis.probes import mix, structural
from bert_jax.analysis.probes.label_tasks import LabelTask, control_task, score_sentences, uniform_of_type
from bert_jax.analysis.probes.linear import probe_state, uniform_code_bits
from bert_jax.analysis.probes.structural import Tree, TreeScores
from bert_jax.analysis.probes.trees import chain_distances, control_heads
from bert_jax.analysis.probes.vectors import ProbeVectors, Sample
from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.finetune.metrics import span_counts

PUNCTUATION = "PUNCT"
"""UPOS of words that are left out of spanning trees."""


class LabelScores(NamedTuple):
    """Probes of one task. Of sentences there are scores and weights, whose ratio of sums is the score."""

    states: Float[np.ndarray, "S 2 m"]
    """Of every hidden state."""
    control: Float[np.ndarray, "S 2 m"]
    """Of the control task."""
    spans: Float[np.ndarray, "S 2 m"] | None
    """F1 of spans, of tags of spans."""
    mixes: Float[np.ndarray, "S 2 m"]
    """Of the scalar mixes of states 0 to l, by l."""
    code_bits: Float[np.ndarray, " S"]
    mix_weights: Float[np.ndarray, " S"]


def probe_labels(
    vectors: ProbeVectors,
    task: LabelTask,
    dev: Sample,
    *,
    epochs: int,
    mix_epochs: int,
    penalty: float,
    seed: int,
    description: str,
    progress: bool,
) -> LabelScores:
    """Linear probes of every hidden state for a task and its control task, and scalar mixes.

    Args:
      vectors: of the words.
      task: from `label_tasks`.
      dev: sentences of the dev examples.
      epochs, penalty: as in `linear.fit`.
      mix_epochs: as in `mix.fit`.
      seed: of the control task and of the order of examples.
      description: of the progress bar.
      progress: show a progress bar on stderr.
    """
    control, found = control_task(task, seed), []
    with progress_bar(description, len(vectors.train), "state", shown=progress) as bar:
        for states in zip(vectors.train, vectors.dev, strict=True):
            found.append(probe_state(*states, task, control, epochs=epochs, penalty=penalty, seed=seed))
            bar.update()
    mixes = mix.probe_mixes(vectors.train, vectors.dev, task, epochs=mix_epochs, seed=seed)

    def of_sentences(task: LabelTask, predictions: Iterable[np.ndarray]) -> np.ndarray:
        return np.stack([score_sentences(task, one, task.dev.labels, dev.starts) for one in predictions])

    return LabelScores(
        of_sentences(task, (one.predictions for one in found)),
        of_sentences(control, (one.control_predictions for one in found)),
        None if task.outside is None else np.stack([_spans(task, one.predictions, dev) for one in found]),
        of_sentences(task, mixes.predictions),
        np.array([one.code_bits for one in found]),
        mixes.weights,
    )


def _spans(task: LabelTask, predictions: np.ndarray, dev: Sample) -> Float[np.ndarray, "2 m"]:
    """Twice the right spans, and the gold and the predicted ones together, of each sentence."""
    expected = [one.tags for one in dev.sentences]
    places = zip(dev.starts, dev.lengths, strict=True)
    predicted = [[task.names[label] for label in predictions[start : start + n]] for start, n in places]
    right, of_gold, of_predicted = span_counts(expected, predicted).T.astype(np.float64)
    return np.stack([2 * right, of_gold + of_predicted])


def summarize_labels(of_seeds: Sequence[LabelScores], task: LabelTask) -> dict[str, Any]:
    """Scores by hidden state with intervals over sentences, and standard deviations over seeds, as plain values.

    Code lengths and weights of mixes are no means over dev sentences but functions of training: their intervals are
    over its seeds (Student's t), on the same training sentences; one seed gives none. What follows from scores of mixes
    has an interval of the jackknife over dev sentences: noise makes gains unequal, so their divergence from equal ones
    is higher in a bootstrap sample, which has fewer different sentences.

    Args:
      of_seeds: probes of one task; scores are means over the seeds.
      task: that was probed.
    """
    mean, uniform = mean_of_seeds(of_seeds), uniform_code_bits(len(task.train.labels), len(task.names))
    bits, weights = (np.stack([getattr(one, name) for one in of_seeds]) for name in ("code_bits", "mix_weights"))
    parts = np.arange(mean.mixes.shape[-1]) % PARTS
    without_part = [_ratios(mean.mixes[..., parts != one]) for one in np.unique(parts)]

    def of_training(values: Sequence[Any] | np.ndarray) -> dict[str, Any]:
        return mean_over_seeds(np.asarray(values))._asdict()

    def of_mixes(measure: Callable[[np.ndarray], float]) -> dict[str, Any]:
        return jackknife(measure(_ratios(mean.mixes)), list(map(measure, without_part)))._asdict()

    found = {
        "score": score_means(mean.states),
        "control_score": score_means(mean.control),
        "selectivity": _selectivity(mean),
        "code_kilobits": of_training(bits / 1000),
        "compression": of_training(uniform / bits),
        "mix": {
            "score": score_means(mean.mixes),
            "weights": of_training(weights),
            "centre_of_gravity": of_training([mix.centre_of_gravity(one) for one in weights]),
            "weights_divergence_bits": of_training([mix.divergence_from_uniform_bits(one) for one in weights]),
            "expected_layer": of_mixes(mix.expected_layer),
            "gain_concentration_bits": of_mixes(mix.gain_concentration_bits),
        },
        "seeds": len(of_seeds),
        "deviation_of_seeds": _deviations(of_seeds) if len(of_seeds) > 1 else None,
    }
    return found if mean.spans is None else found | {"span_f1": score_means(mean.spans)}


def _ratios(scores: Float[np.ndarray, "S 2 m"]) -> Float[np.ndarray, " S"]:
    """Scores of all sentences together."""
    return scores[:, 0].sum(-1) / np.maximum(scores[:, 1].sum(-1), 1)


def score_means(scores: Float[np.ndarray, "S 2 m"]) -> dict[str, Any]:
    """Scores with their intervals over sentences."""
    return bootstrap_mean(scores[:, 0], None, scores[:, 1])._asdict()


def _selectivity(scores: LabelScores) -> dict[str, Any]:
    """Score less that of the control task, in the same bootstrap samples."""
    both = np.concatenate([scores.states, scores.control])
    (value, control), (resampled, of_control) = (
        np.split(one, 2, axis=-1) for one in resampled_means(both[:, 0], both[:, 1])
    )
    return BootstrapMean(value - control, *percentiles(resampled - of_control))._asdict()


def _deviations(of_seeds: Sequence[LabelScores]) -> dict[str, Any]:
    """Standard deviations over the seeds of the probes, in the units of the numbers themselves."""
    scores, control = (np.array([_ratios(getattr(one, of)) for one in of_seeds]) for of in ("states", "control"))
    return {"score": scores.std(0, ddof=1), "selectivity": (scores - control).std(0, ddof=1)}


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


def probe_trees(
    vectors: ProbeVectors,
    train: Sample,
    dev: Sample,
    *,
    rank: int,
    epochs: int,
    seed: int,
    description: str,
    progress: bool,
) -> TreeScores:
    """Structural probes of every hidden state, [S, m] each.

    Args:
      vectors: of the words.
      train: sentences of the training vectors.
      dev: sentences of the dev vectors.
      rank: as in `structural.probe_state`.
      epochs: as in `structural.probe_state`.
      seed: of the initial maps and the order.
      description: of the progress bar.
      progress: show a progress bar on stderr.
    """
    packs, trees, scores = _pack(gold_trees(train), train), gold_trees(dev), []
    with progress_bar(description, len(vectors.train), "state", shown=progress) as bar:
        for states in zip(vectors.train, vectors.dev, strict=True):
            settings = {"rank": rank, "epochs": epochs, "seed": seed}
            scores.append(structural.probe_state(*states, packs, trees, dev.starts, **settings))
            bar.update()
    return TreeScores(*map(np.stack, zip(*scores, strict=True)))


def probe_control_trees(
    vectors: ProbeVectors, train: Sample, dev: Sample, state: int, *, rank: int, epochs: int, seed: int
) -> dict[str, Any]:
    """UUAS of the control trees in one hidden state, beside that of their chain; arguments as `probe_trees`."""
    trees, packs = control_trees(dev, seed), _pack(control_trees(train, seed), train)
    states = vectors.train[state], vectors.dev[state]
    found = structural.probe_state(*states, packs, trees, dev.starts, rank=rank, epochs=epochs, seed=seed)
    means = (structural.mean_scores(one)["uuas"] for one in (found, chain_scores(trees)))
    return {"state": state, **dict(zip(("uuas", "chain_uuas"), means, strict=True))}


def _pack(trees: Sequence[Tree], sample: Sample) -> structural.Packs:
    return jax.tree.map(jax.numpy.asarray, structural.pack(trees, sample.starts))


def chain_scores(trees: Sequence[Tree]) -> TreeScores:
    """Scores of the chain that joins each word to its right neighbour, with the first word as the root."""
    lengths = [len(tree.heads) for tree in trees]
    return structural.score([chain_distances(n) for n in lengths], [np.arange(n) for n in lengths], trees)
