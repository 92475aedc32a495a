"""Weights of the classes in the loss of a task."""

import math

import numpy as np

from bert_jax.errors import require
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.task_data import TaskData

BALANCED = ("balanced",)


def class_weights(task: str, options: FinetuneOptions, data: TaskData) -> tuple[float, ...]:
    """The weight of each label, in the order of `data.labels`; empty without `--class-weights`.

    `balanced` weights are n / (C n_c), for n examples or tagged tokens of train, of which n_c are of the class c of C,
    as `compute_class_weight` of scikit-learn has them (King and Zeng 2001).

    Raises:
      UserError: the task has no classes, or none to smooth with `--label-smoothing`; a weight is no number, is of an
        unknown class, or is missing; a balanced class has no example.
    """
    has_classes = data.kind == "tagging" or (data.kind == "classification" and len(data.labels) > 1)
    for flag, given, allowed in (
        ("--class-weights", options.class_weights, has_classes),
        ("--label-smoothing", options.label_smoothing, has_classes or data.kind == "multiple_choice"),
    ):
        require(
            allowed or not given, f"{flag} is for tasks with one class per example or word, not {task}: leave it out"
        )
    if not options.class_weights:
        return ()
    if options.class_weights == BALANCED:
        labels = data.train.labels[data.train.labels >= 0]
        counts = np.bincount(labels, minlength=len(data.labels))
        missing = [name for name, count in zip(data.labels, counts, strict=True) if not count]
        require(
            not missing,
            f"--class-weights balanced: train has no example of the class '{missing and missing[0]}': give all "
            "weights, as CLASS=WEIGHT",
        )
        return tuple((len(labels) / (len(counts) * counts)).tolist())
    given = dict(_parse(text, data.labels) for text in options.class_weights)
    missing = [name for name in data.labels if name not in given]
    require(
        not missing and len(given) == len(options.class_weights),
        f"--class-weights {' '.join(options.class_weights)}: it must have one weight for each of "
        f"{', '.join(data.labels[:20])}, or be `balanced`",
    )
    require(any(given.values()), "--class-weights: all weights are 0: give one above 0")
    return tuple(given[name] for name in data.labels)


def _parse(text: str, labels: tuple[str, ...]) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    require(
        bool(name) and math.isfinite(weight) and weight >= 0,
        f"--class-weights {text}: it must be `balanced`, or CLASS=WEIGHT with a weight of at least 0",
    )
    require(name in labels, f"--class-weights {text}: the task has no class '{name}', it has {', '.join(labels[:20])}")
    return name, weight
