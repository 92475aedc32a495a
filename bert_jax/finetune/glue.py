"""The nine tasks of GLUE (Wang et al. 2019) and its diagnostic set: published files, labels, metrics, submissions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.errors import UserError
from bert_jax.finetune.tables import Columns, Example, read_rows, read_text, to_examples
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath

ENTAILMENT = ("entailment", "not_entailment")
BINARY = ("0", "1")


@dataclass(frozen=True)
class GlueTask:
    """A task with the form of its files and its official metrics."""

    columns: Columns
    """Of the training and validation files."""
    labels: tuple[str, ...]
    """Names in the files by class index; empty: a regression."""
    metrics: tuple[str, ...]
    """Names in `metrics.METRICS`; the task's score is their mean."""
    submission: str
    """Stem of the file of test predictions."""
    test_columns: tuple[str, ...] | None = None
    """Text columns of the test file; None: those of `columns`."""
    evaluated: tuple[str, ...] = ("",)
    """Endings of the validation and test files: MNLI has two sets of each."""
    skip_short: bool = False
    """Whether lines with missing columns are left out; the published file of QQP has some."""


GLUE = {
    "cola": GlueTask(Columns(("3",), "1"), BINARY, ("matthews_correlation",), "CoLA", ("sentence",)),
    "sst2": GlueTask(Columns(("sentence",), "label"), BINARY, ("accuracy",), "SST-2"),
    "mrpc": GlueTask(Columns(("#1 String", "#2 String"), "Quality"), BINARY, ("accuracy", "f1"), "MRPC"),
    "stsb": GlueTask(Columns(("sentence1", "sentence2"), "score"), (), ("pearson", "spearman"), "STS-B"),
    "qqp": GlueTask(
        Columns(("question1", "question2"), "is_duplicate"), BINARY, ("accuracy", "f1"), "QQP", skip_short=True
    ),
    "mnli": GlueTask(
        Columns(("sentence1", "sentence2"), "gold_label"),
        ("entailment", "neutral", "contradiction"),
        ("accuracy",),
        "MNLI",
        evaluated=("_matched", "_mismatched"),
    ),
    "qnli": GlueTask(Columns(("question", "sentence"), "label"), ENTAILMENT, ("accuracy",), "QNLI"),
    "rte": GlueTask(Columns(("sentence1", "sentence2"), "label"), ENTAILMENT, ("accuracy",), "RTE"),
    "wnli": GlueTask(Columns(("sentence1", "sentence2"), "label"), BINARY, ("accuracy",), "WNLI"),
}

COLA_PUBLISHED = {"train": ("in_domain_train",), "dev": ("in_domain_dev", "out_of_domain_dev")}
"""Files of CoLA's own release (Warstadt et al. 2019); together they are GLUE's."""


def read_split(name: str, directory: StoredPath, split: str, ending: str = "") -> list[Example]:
    """The examples of a split as GLUE publishes it: ``train.tsv``, ``dev.tsv``, ``test.tsv``.

    Args:
      name: of the task, a key of `GLUE`.
      directory: with the files. For CoLA, those of its own release are read too.
      split: "train", "dev" or "test"; published test examples have no labels.
      ending: one of the task's `evaluated`, for "dev" and "test".

    Raises:
      UserError: the split does not exist, or a file does not have the published form.
    """
    task = GLUE[name]
    columns = task.columns
    stems = [split if split == "train" else f"{split}{ending}"]
    if name == "cola" and not (directory / f"{stems[0]}.tsv").exists():
        stems = list(COLA_PUBLISHED.get(split, stems))
    paths = [directory / f"{stem}.tsv" for stem in stems]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: --task {name} reads the files of GLUE's {task.submission}")
    if split == "test":
        header = read_text(paths[0]).split("\n", 1)[0].rstrip("\r").split("\t")
        if not set(columns.required).issubset(header):  # as it is published
            columns = Columns(task.test_columns or columns.texts, None)
    rows = [row for path in paths for row in read_rows(path, columns, skip_short=task.skip_short and split != "test")]
    return to_examples(rows, task.labels)


def write_submission(
    name: str, directory: StoredPath, ending: str, predictions: Sequence[float] | np.ndarray
) -> StoredPath:
    """Write test predictions as gluebenchmark.com expects them, e.g. ``MNLI-m.tsv``, and return the path.

    Args:
      name: of the task.
      directory: of all submissions.
      ending: one of the task's `evaluated`.
      predictions: class indices, or for a regression scores, which are clipped to [0, 5].
    """
    task = GLUE[name]
    short = {"": "", "_matched": "-m", "_mismatched": "-mm"}[ending]
    path = directory / f"{task.submission}{short}.tsv"
    values = [task.labels[int(p)] if task.labels else f"{min(max(float(p), 0.0), 5.0):.3f}" for p in predictions]
    lines = ["index\tprediction", *(f"{i}\t{value}" for i, value in enumerate(values))]
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path
