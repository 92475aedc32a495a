"""Labelling tasks for probes: parts of speech, dependency relations and entities, each with its control task."""

import collections
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.analysis.probes.vectors import Sample
from bert_jax.array_types import Float
from bert_jax.errors import require

UNSEEN = -1
"""Label that no training example has; a probe cannot predict it, so it counts as an error."""


OUTSIDE = "O"


class ProbeExamples(NamedTuple):
    """What is labelled, and how."""

    words: np.ndarray
    """int32 [n, k]: indices of the words whose vectors are concatenated as the probe's input; k is 1 or 2."""
    labels: np.ndarray
    """int32 [n]: index in `LabelTask.names`, or UNSEEN."""
    types: list[str]
    """Word of each example, in lower case."""


class LabelTask(NamedTuple):
    """A task of labelling words or arcs."""

    title: str
    names: tuple[str, ...]
    """Labels of the training examples, sorted."""
    train: ProbeExamples
    dev: ProbeExamples
    outside: int | None = None
    """Label of words that are in no span, for tags of spans such as B-PER and O; most words have it. None: no tags of
    spans."""

    @property
    def metric(self) -> str:
        """What `score` computes."""
        return "accuracy" if self.outside is None else "label F1"


def score(task: LabelTask, predictions: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy; of tags of spans, micro-averaged F1 of all labels but `outside`, because most words have that one.

    Args:
      task: with the labels' meaning.
      predictions: int [n].
      labels: int [n].
    """
    points, weights = score_examples(task, predictions, labels)
    return float(points.sum() / max(1, weights.sum()))


def score_examples(
    task: LabelTask, predictions: np.ndarray, labels: np.ndarray
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Scores and weights of the examples, of which `score` is the ratio of the sums; arguments as there."""
    right = predictions == labels
    if task.outside is None:
        return right.astype(float), np.ones(len(right))
    expected, found = labels != task.outside, predictions != task.outside
    return 2.0 * (expected & right), expected.astype(float) + found


def score_sentences(
    task: LabelTask, predictions: np.ndarray, labels: np.ndarray, starts: np.ndarray
) -> Float[np.ndarray, "2 m"]:
    """Sums of `score_examples` over the words of each sentence, whose first words are at `starts`."""
    return np.add.reduceat(np.stack(score_examples(task, predictions, labels)), starts, axis=1)


def part_of_speech_task(train: Sample, dev: Sample) -> LabelTask:
    """UPOS from the vector of the word.

    Raises:
      UserError: the training sentences have fewer than two tags.
    """
    tags = [[list(one.upos) for one in split.sentences] for split in (train, dev)]
    return _task("parts of speech", train, dev, tags, [_own(train), _own(dev)])


def relation_task(train: Sample, dev: Sample) -> LabelTask:
    """Label of a dependency arc, with subtype, from the vectors of the word and of its head; the root's is itself.

    Raises:
      UserError: the training sentences have fewer than two relations.
    """
    relations = [[list(one.deprels) for one in split.sentences] for split in (train, dev)]
    arcs = []
    for split in (train, dev):
        heads = [
            start + np.array([head - 1 if head else i for i, head in enumerate(one.heads)])
            for one, start in zip(split.sentences, split.starts, strict=True)
        ]
        arcs.append(np.stack([_own(split)[:, 0], np.concatenate(heads)], axis=1))
    return _task("dependency relations", train, dev, relations, arcs)


def entity_task(train: Sample, dev: Sample) -> LabelTask:
    """Entity tag from the vector of the word.

    Raises:
      UserError: the training sentences have fewer than two tags.
    """
    tags = [[list(one.tags) for one in split.sentences] for split in (train, dev)]
    task = _task("entities", train, dev, tags, [_own(train), _own(dev)])
    return task._replace(outside=task.names.index(OUTSIDE) if OUTSIDE in task.names else UNSEEN)


def _own(sample: Sample) -> np.ndarray:
    return np.arange(sample.lengths.sum())[:, None]


def _task(
    title: str, train: Sample, dev: Sample, labels: Sequence[list[list[str]]], words: Sequence[np.ndarray]
) -> LabelTask:
    flat = [[label for one in split for label in one] for split in labels]
    names = tuple(sorted(set(flat[0])))
    require(len(names) >= 2, f"probes: all words of the training sentences have the label '{names[0]}' for {title}")
    index = {name: i for i, name in enumerate(names)}
    examples = []
    for split, split_labels, indices in zip((train, dev), flat, words, strict=True):
        ids = np.array([index.get(label, UNSEEN) for label in split_labels], np.int32)
        types = [word.lower() for one in split.sentences for word in one.words]
        examples.append(ProbeExamples(indices.astype(np.int32), ids, types))
    return LabelTask(title, names, *examples)


def control_task(task: LabelTask, seed: int) -> LabelTask:
    """The task with a random label for every word type (Hewitt and Liang 2019, arXiv:1909.03368, section 2).

    The label of a type is a function of the type and the seed, drawn from the distribution of labels over the training
    examples; dev examples whose type is not in training have one, too, which no probe can know.

    Args:
      task: the linguistic task.
      seed: of the labels.
    """
    cumulative = np.cumsum(np.bincount(task.train.labels, minlength=len(task.names))) / len(task.train.labels)
    splits = []
    for examples in (task.train, task.dev):
        uniform = np.array([uniform_of_type(one, task.title, seed) for one in examples.types])
        labels = np.minimum(np.searchsorted(cumulative, uniform, side="right"), len(task.names) - 1)
        splits.append(examples._replace(labels=labels.astype(np.int32)))
    return task._replace(title=f"control of {task.title}", train=splits[0], dev=splits[1])


def uniform_of_type(word: str, purpose: str, seed: int) -> float:
    """A number in [0, 1) that depends on the arguments only."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{word}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def constant_predictions(task: LabelTask) -> dict[str, np.ndarray]:
    """Dev labels without vectors: the most frequent label, and each word type's most frequent label."""
    majority = int(np.bincount(task.train.labels).argmax())
    counts: dict[str, collections.Counter] = {}
    for word, label in zip(task.train.types, task.train.labels.tolist(), strict=True):
        counts.setdefault(word, collections.Counter())[label] += 1
    # Of equally frequent labels the first one, independent of the order of the sentences.
    best = {word: min(of_type, key=lambda label: (-of_type[label], label)) for word, of_type in counts.items()}
    of_types = np.array([best.get(word, majority) for word in task.dev.types])
    return {"majority": np.full_like(task.dev.labels, majority), "word_type": of_types}


def describe(task: LabelTask) -> dict[str, float | int | str]:
    """Sizes and special cases of a task, for the result."""
    counts = np.bincount(task.train.labels, minlength=len(task.names))
    seen = set(task.train.types)
    return {
        "metric": task.metric,
        "labels": len(task.names),
        "train_examples": len(task.train.labels),
        "dev_examples": len(task.dev.labels),
        "labels_that_occur_once": int((counts == 1).sum()),
        "dev_examples_with_unseen_label": int((task.dev.labels == UNSEEN).sum()),
        "dev_share_with_seen_type": float(np.mean([word in seen for word in task.dev.types])),
        **{name: score(task, found, task.dev.labels) for name, found in constant_predictions(task).items()},
    }
