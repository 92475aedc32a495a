"""Classification and regression of texts and pairs: GLUE's files, a TFDS dataset, and your own tables."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.convert.families.family import REGRESSION_LABELS
from bert_jax.errors import UserError, require
from bert_jax.finetune import glue
from bert_jax.finetune.encoding import encode_examples
from bert_jax.finetune.metrics import METRICS
from bert_jax.finetune.options import FileOptions
from bert_jax.finetune.tables import Columns, Example, TableRow, class_names, read_rows, to_examples, to_row
from bert_jax.finetune.task_data import Metrics, Split, write_json_lines
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

ENDINGS = (".tsv", ".csv", ".jsonl")


class SentenceTask(NamedTuple):
    """Labels, metrics and examples of a task."""

    labels: tuple[str, ...]
    """By class index; empty: a regression."""
    main_metrics: tuple[str, ...]
    splits: Mapping[str, Sequence[Example]]
    """train, and held-out splits by name."""
    glue_name: str | None = None
    """Key of `glue.GLUE`, whose form test predictions have."""


class SentenceData:
    """A `TaskData` whose examples are texts or pairs with a class or a number."""

    kind = "classification"

    def __init__(
        self, task: SentenceTask, tokenizer: Tokenizer, max_length: int, token_types: int, separators: int = 1
    ):
        """Encode all splits.

        Args:
          task: examples and metrics.
          tokenizer: of the model.
          max_length: tokens of an example, special ones included.
          token_types: of the model.
          separators: [SEP] between the texts of a pair; RoBERTa has 2.
        """
        self._task, self._examples = task, task.splits
        self.labels = task.labels or REGRESSION_LABELS
        self.main_metrics = task.main_metrics
        encoded = {
            name: encode_examples(examples, tokenizer, max_length, token_types, separators)
            for name, examples in task.splits.items()
        }
        self.train = encoded.pop("train")
        self.splits = {name: Split(examples, name.startswith("dev")) for name, examples in encoded.items()}

    def metrics(self, split: str, logits: np.ndarray) -> Metrics:
        """The main metrics and, of a classification, accuracy."""
        labels = self.splits[split].examples.labels
        return {name: METRICS[name](labels, self._predictions(logits)) for name in self._reported}

    def baseline(self, split: str) -> Metrics:
        """Metrics of the class with the best score if it is predicted for all.

        Correlations of a constant are 0, or 1 if the labels are constant too, which no prediction can exceed.
        """
        labels = self.splits[split].examples.labels
        if not self._task.labels:
            return dict.fromkeys(self.main_metrics, float(np.ptp(labels) == 0))
        constants = (np.full_like(labels, index) for index in range(len(self.labels)))
        scores = [{name: METRICS[name](labels, one) for name in self.main_metrics} for one in constants]
        return max(scores, key=lambda metrics: sum(metrics.values()))

    def correct(self, split: str, logits: np.ndarray) -> np.ndarray:
        """Whether each example has the right class, bool [E]; [0] if the score is not the accuracy."""
        if self.main_metrics != ("accuracy",):
            return np.zeros(0, bool)
        return self.splits[split].examples.labels == self._predictions(logits)

    def write_predictions(self, directory: StoredPath, logits: Mapping[str, np.ndarray]) -> None:
        """Write ``SPLIT.jsonl`` with the logits of each example; of a test split also GLUE's submission."""
        for split, rows in logits.items():
            predictions = self._predictions(rows)
            if split.startswith("test") and self._task.glue_name is not None:
                glue.write_submission(self._task.glue_name, directory, split.removeprefix("test"), predictions)
            examples = enumerate(self._examples[split])
            lines = [self._line(i, example, predictions[i], rows[i]) for i, example in examples]
            write_json_lines(directory / f"{split}.jsonl", lines)

    @property
    def _reported(self) -> tuple[str, ...]:
        extra = () if not self._task.labels or "accuracy" in self.main_metrics else ("accuracy",)
        return self.main_metrics + extra

    def _predictions(self, logits: np.ndarray) -> np.ndarray:
        return logits.argmax(-1) if self._task.labels else logits[:, 0]

    def _line(self, index: int, example: Example, prediction: Any, logits: np.ndarray) -> dict[str, Any]:
        def named(label: Any) -> Any:
            return self._task.labels[int(label)] if self._task.labels else float(label)

        label = {} if example.label is None else {"label": named(example.label)}
        return {"index": index, **label, "prediction": named(prediction), "logits": [float(x) for x in logits]}


def read_glue(name: str, directory: StoredPath) -> SentenceTask:
    """A task of GLUE: its published files, or a TFDS dataset directory."""
    task = glue.GLUE[name]
    if is_tfds(directory):
        return _read_glue_tfds(name, directory)
    splits: dict[str, Sequence[Example]] = {"train": glue.read_split(name, directory, "train")}
    for ending in task.evaluated:
        splits[f"dev{ending}"] = glue.read_split(name, directory, "dev", ending)
    for ending in task.evaluated:
        if (directory / f"test{ending}.tsv").exists():
            splits[f"test{ending}"] = glue.read_split(name, directory, "test", ending)
    return SentenceTask(task.labels, task.metrics, splits, name)


def read_own(task: str, directory: StoredPath, options: FileOptions) -> SentenceTask:
    """A classification or regression on the user's tables, or on a TFDS dataset.

    Raises:
      UserError: no training or validation split, or files that are not tables.
    """
    columns = Columns(options.text_columns, options.label_column, ": name them with --text-columns and --label-column")
    if is_tfds(directory):
        rows = _tfds_rows(directory, {"train": "train", "dev": "validation", "test": "test"}, columns)
    else:
        rows = {}
        for split in ("train", "dev", "test"):
            path = find_split(directory, split, ENDINGS, required=split != "test")
            if path is not None:
                rows[split] = read_rows(path, columns._replace(label=None) if split == "test" else columns)
    is_regression = task == "regression"
    labels = () if is_regression else class_names(rows["train"])
    metrics = ("pearson", "spearman") if is_regression else ("accuracy",)
    return SentenceTask(labels, metrics, {name: to_examples(one, labels) for name, one in rows.items()})


def find_split(directory: StoredPath, split: str, endings: Sequence[str], *, required: bool) -> StoredPath | None:
    """The file of a split, ``SPLIT`` with one of these endings; None if it is missing and not required.

    Raises:
      UserError: there is none, or more than one.
    """
    found = [path for path in (directory / f"{split}{ending}" for ending in endings) if path.exists()]
    if len(found) > 1:
        raise UserError(f"{directory} has {' and '.join(path.name for path in found)}: remove or rename one of them")
    if required and not found:
        raise UserError(f"{directory} has no {split} split: it needs a file {split} with ending {', '.join(endings)}")
    return found[0] if found else None


def is_tfds(directory: StoredPath) -> bool:
    """Whether a directory is that of a TFDS dataset."""
    return (directory / "dataset_info.json").exists()


TFDS_COLUMNS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
"""Texts in the TFDS dataset ``glue``, whose labels are class indices in the order of `glue.GLUE`, or floats."""


def _read_glue_tfds(name: str, directory: StoredPath) -> SentenceTask:
    task = glue.GLUE[name]
    names = {"train": "train"}
    for ending in task.evaluated:
        names |= {f"dev{ending}": f"validation{ending}", f"test{ending}": f"test{ending}"}
    rows = _tfds_rows(directory, names, Columns(TFDS_COLUMNS[name], "label"))
    labels = [str(index) for index in range(len(task.labels))]
    splits = {name: to_examples(of_split, labels) for name, of_split in rows.items()}
    return SentenceTask(task.labels, task.metrics, splits, name)


def _tfds_rows(directory: StoredPath, names: Mapping[str, str], columns: Columns) -> dict[str, list[TableRow]]:
    """Rows of the splits of a TFDS dataset in ArrayRecord files; labels of test splits are left out.

    Raises:
      UserError: damaged files, another file format, a missing split or feature, or as `to_row`.
    """
    import tensorflow_datasets as tfds

    with _tfds_errors(directory):
        builder = tfds.builder_from_directory(str(directory))
        features, splits = builder.info.features or {}, builder.info.splits
    needed = (*columns.texts, *filter(None, [columns.label]))
    missing = sorted(set(needed) - set(features))
    if missing:
        raise UserError(f"{directory} has no feature '{missing[0]}': it has {', '.join(features)}{columns.advice}")
    rows = {}
    for split, name in names.items():
        if name not in splits:
            require(split.startswith("test"), f"{directory} has no split '{name}'")
            continue
        with _tfds_errors(directory):
            items = list(builder.as_data_source(split=name))
            if items and "idx" in items[0]:  # TFDS stores examples in the order of a hash
                items.sort(key=lambda item: int(item["idx"]))
            examples = [{one: _decoded(item[one]) for one in needed} for item in items]
        of_split = columns._replace(label=None) if split.startswith("test") else columns
        rows[split] = [to_row(f"{directory}, {name} {i}", example, of_split) for i, example in enumerate(examples)]
    return rows


@contextlib.contextmanager
def _tfds_errors(directory: StoredPath) -> Iterator[None]:
    """Raise UserError for the errors of TFDS and of the libraries that it reads with, which have no common class."""
    try:
        yield
    except NotImplementedError as error:
        raise UserError(f"{directory} is not in ArrayRecord files: prepare it with file_format array_record") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"{directory} has a dataset_info.json, but TFDS cannot read the dataset ({reason}): prepare it again, or "
            "remove that file if the directory has tables"
        ) from error


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
