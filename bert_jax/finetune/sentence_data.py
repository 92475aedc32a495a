"""Classification, regression and multiple choice: GLUE's files, a TFDS dataset, and your own tables."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax.convert.families.family import REGRESSION_LABELS
from bert_jax.errors import require
from bert_jax.finetune import glue
from bert_jax.finetune.encoding import encode_choices, encode_examples
from bert_jax.finetune.metrics import METRICS
from bert_jax.finetune.options import FileOptions
from bert_jax.finetune.split_files import Values, find_splits, has_splits, is_tfds, read_files, read_tables, read_tfds
from bert_jax.finetune.tables import Columns, Example, TableRow, check_unicode, class_names, to_examples, to_row
from bert_jax.finetune.task_data import Metrics, Split, write_json_lines
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

CHOICE_COLUMNS = ("sent1", "sent2")
"""Of SWAG: the context, and the beginning of every ending."""


class SentenceTask(NamedTuple):
    """Labels, metrics and examples of a task."""

    labels: tuple[str, ...]
    """By class index; empty: a regression."""
    main_metrics: tuple[str, ...]
    splits: Mapping[str, Sequence[Example]]
    """train, and held-out splits by name."""
    glue_name: str | None = None
    """Key of `glue.GLUE`, whose form test predictions have."""
    kind: Literal["classification", "multiple_choice"] = "classification"
    """Of the head. The texts of a multiple choice are the context and every ending."""


class SentenceData:
    """A `TaskData` whose examples are texts or pairs with a class or a number, or a context with several endings."""

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
        self._task, self._examples, self.kind = task, task.splits, task.kind
        # The head has one output per class, or a single one for a regression and for each ending.
        self.labels = task.labels if task.labels and task.kind == "classification" else REGRESSION_LABELS
        self.main_metrics = task.main_metrics
        encode = encode_choices if task.kind == "multiple_choice" else encode_examples
        encoded = {
            name: encode(examples, tokenizer, max_length, token_types, separators)
            for name, examples in task.splits.items()
        }
        self.train = encoded.pop("train")
        self.splits = {
            name: Split(examples, name.startswith("dev"), task.splits[name][0].label is not None)
            for name, examples in encoded.items()
        }

    def metrics(self, split: str, logits: np.ndarray, dev_logits: np.ndarray | None = None) -> Metrics:
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
        constants = (np.full_like(labels, index) for index in range(len(self._task.labels)))
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
            predictions, rows = self._predictions(rows), self._by_example(rows)
            if split.startswith("test") and self._task.glue_name is not None:
                glue.write_submission(self._task.glue_name, directory, split.removeprefix("test"), predictions)
            examples = enumerate(self._examples[split])
            lines = [self._line(i, example, predictions[i], rows[i]) for i, example in examples]
            write_json_lines(directory / f"{split}.jsonl", lines)

    @property
    def _reported(self) -> tuple[str, ...]:
        extra = () if not self._task.labels or "accuracy" in self.main_metrics else ("accuracy",)
        return self.main_metrics + extra

    def _by_example(self, logits: np.ndarray) -> np.ndarray:
        """Logits [E, classes]; of a multiple choice from one logit of each text, [texts, 1], too."""
        return logits.reshape(-1, max(1, len(self._task.labels)))

    def _predictions(self, logits: np.ndarray) -> np.ndarray:
        return self._by_example(logits).argmax(-1) if self._task.labels else logits[:, 0]

    def _line(self, index: int, example: Example, prediction: Any, logits: np.ndarray) -> dict[str, Any]:
        def named(label: Any) -> Any:
            return self._task.labels[int(label)] if self._task.labels else float(label)

        label = {} if example.label is None else {"label": named(example.label)}
        return {"index": index, **label, "prediction": named(prediction), "logits": [float(x) for x in logits]}


def read_glue(name: str, directory: StoredPath) -> SentenceTask:
    """A task of GLUE: its published files, or a dataset of TFDS or of Hugging Face in Parquet files."""
    task = glue.GLUE[name]
    if is_tfds(directory) or has_splits(directory, ".parquet"):
        return _read_numbered_glue(name, directory)
    splits: dict[str, Sequence[Example]] = {"train": glue.read_split(name, directory, "train")}
    for ending in task.evaluated:
        splits[f"dev{ending}"] = glue.read_split(name, directory, "dev", ending)
    for ending in task.evaluated:
        if (directory / f"test{ending}.tsv").exists():
            splits[f"test{ending}"] = glue.read_split(name, directory, "test", ending)
    return SentenceTask(task.labels, task.metrics, splits, name)


def read_own(task: str, directory: StoredPath, options: FileOptions) -> SentenceTask:
    """A classification or regression on the user's files.

    The order of the classes is that of their names: numbers by value, else by text; or that of the dataset's class
    indices, if its Parquet files name them.

    Raises:
      UserError: no training or validation split, or files that are not tables.
    """
    columns = Columns(options.text_columns or ("text",), options.label_column, _ADVICE)
    tables = read_tables(directory, columns)
    names = tables.class_names.get(options.label_column, ())
    rows = {split: _to_rows(split, values, columns, names) for split, values in tables.rows.items()}
    is_regression = task == "regression"
    labels = () if is_regression else names or class_names(rows["train"])
    metrics = ("pearson", "spearman") if is_regression else ("accuracy",)
    return SentenceTask(labels, metrics, _to_splits(rows, labels))


def read_choices(directory: StoredPath, options: FileOptions) -> SentenceTask:
    """A multiple choice in the form of SWAG (Zellers et al. 2018): a context, endings, and the number of the right one.

    The columns are ``sent1``, the context, ``sent2``, with which every ending begins, ``ending0`` to ``endingN`` or a
    list ``endings``, and ``label``.

    Raises:
      UserError: no training or validation split, files that are not tables, or examples that differ in their number of
        endings.
    """
    columns = Columns(options.text_columns or CHOICE_COLUMNS, options.label_column, _ADVICE)
    values = read_tables(directory, columns).rows
    rows = {split: _to_rows(split, of_split, columns) for split, of_split in values.items()}
    count = 0
    for split, of_split in values.items():
        for i, (where, one) in enumerate(of_split):
            endings = _endings(where, one)
            count = count or len(endings)
            require(
                len(endings) == count,
                f"{where} has {len(endings)} endings, the first example {count}: all examples need the same number",
            )
            context, *start = rows[split][i].texts
            rows[split][i] = rows[split][i]._replace(texts=(context, *(" ".join([*start, one]) for one in endings)))
    labels = tuple(map(str, range(count)))
    return SentenceTask(labels, ("accuracy",), _to_splits(rows, labels), kind="multiple_choice")


def _endings(where: str, values: Mapping[str, Any]) -> list[str]:
    """The endings of a row; a table can fill the columns of endings that an example lacks with empty texts."""
    names = sorted((name for name in values if re.fullmatch(r"ending\d+", name)), key=lambda name: int(name[6:]))
    endings = list(values.get("endings") or [values[name] for name in names])
    while endings and endings[-1] in (None, ""):
        endings.pop()
    require(
        len(endings) >= 2 and all(isinstance(one, str) and one for one in endings),
        f"{where} has no two endings: it needs texts in the columns ending0, ending1 and so on, or a list 'endings'",
    )
    check_unicode(where, *endings)
    return endings


_ADVICE = ": name them with --text-columns and --label-column"


def _to_rows(split: str, values: Sequence[Values], columns: Columns, names: Sequence[str] = ()) -> list[TableRow]:
    """The rows of a split; labels that are class indices of `names` are replaced by the names."""
    columns = columns._replace(label_optional=split.startswith("test"))
    rows = [to_row(where, one, columns) for where, one in values]
    indices = {str(i): name for i, name in enumerate(names)}
    return [row._replace(label=indices.get(row.label or "", row.label)) for row in rows]


def _to_splits(rows: Mapping[str, Sequence[TableRow]], labels: Sequence[str]) -> dict[str, list[Example]]:
    """The examples of all splits."""
    return {split: to_examples(of_split, labels) for split, of_split in rows.items()}


NUMBERED_COLUMNS = {
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
"""Texts in the dataset ``glue`` of TFDS and of Hugging Face, whose labels are class indices in the order of
`glue.GLUE`, or floats."""


def _read_numbered_glue(name: str, directory: StoredPath) -> SentenceTask:
    task, columns = glue.GLUE[name], Columns(NUMBERED_COLUMNS[name], "label")
    names = {"train": "train"}
    for ending in task.evaluated:
        names |= {f"dev{ending}": f"validation{ending}", f"test{ending}": f"test{ending}"}
    if is_tfds(directory):
        values = read_tfds(directory, names, columns)
    else:
        values = read_files(find_splits(directory, (".parquet",), tuple(names)), columns).rows
    rows = {split: _to_rows(split, of_split, columns) for split, of_split in values.items()}
    splits = _to_splits(rows, [str(index) for index in range(len(task.labels))])
    return SentenceTask(task.labels, task.metrics, splits, name)
