"""Classification with one or several labels, regression and multiple choice: GLUE's files and your own."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax.array_types import Float
from bert_jax.convert.families.family import REGRESSION_LABELS
from bert_jax.errors import require
from bert_jax.finetune import glue
from bert_jax.finetune.encoding import encode_choices, encode_examples
from bert_jax.finetune.metrics import METRICS, class_f1, label_set_f1
from bert_jax.finetune.options import FileOptions
from bert_jax.finetune.split_files import Values, find_splits, has_splits, is_tfds, read_files, read_tables, read_tfds
from bert_jax.finetune.tables import (
    Columns,
    Example,
    TableRow,
    check_unicode,
    class_names,
    ordered,
    to_examples,
    to_row,
)
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
    kind: Literal["classification", "multilabel", "multiple_choice"] = "classification"
    """Of the head. The label of a multilabel example is 1 or 0 for every class; the texts of a multiple choice are the
    context and every ending."""


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
        self.labels = task.labels if task.labels and task.kind != "multiple_choice" else REGRESSION_LABELS
        self.main_metrics = task.main_metrics
        encode = encode_choices if task.kind == "multiple_choice" else encode_examples
        encoded = {}
        for name, examples in task.splits.items():
            one = encode(examples, tokenizer, max_length, token_types, separators)
            if task.kind == "multilabel" and one.labels.ndim == 1:  # a test split without labels
                one = one._replace(labels=np.full((one.count, len(self.labels)), -1, np.int32))
            encoded[name] = one
        self.train = encoded.pop("train")
        self.splits = {
            name: Split(examples, name.startswith("dev"), task.splits[name][0].label is not None)
            for name, examples in encoded.items()
        }

    def metrics(self, split: str, logits: np.ndarray, dev_logits: np.ndarray | None = None) -> Metrics:
        """The main metrics and, of a classification, accuracy and macro F1 (GLUE's: accuracy)."""
        labels = self.splits[split].examples.labels
        if self.kind == "multilabel":
            return label_set_f1(labels > 0, self._predictions(logits))
        return {name: METRICS[name](labels, self._predictions(logits)) for name in self._reported}

    def class_f1(self, split: str, logits: np.ndarray) -> Metrics:
        """F1 of each class, by name; empty for regression and multiple choice."""
        if not self._task.labels or self.kind == "multiple_choice":
            return {}
        labels, predictions = self.splits[split].examples.labels, self._predictions(logits)
        if self.kind == "classification":
            classes = np.arange(len(self.labels))
            labels, predictions = labels[:, None] == classes, predictions[:, None] == classes
        return dict(zip(self.labels, class_f1(labels > 0, predictions > 0).tolist(), strict=True))

    def baseline(self, split: str) -> Metrics:
        """Metrics of the class, or the set of classes, with the best score if it is predicted for all.

        The best set of a given size has the most frequent classes, for both micro and macro F1.
        Correlations of a constant are 0, or 1 if the labels are constant too, which no prediction can exceed.
        """
        labels = self.splits[split].examples.labels
        if not self._task.labels:
            return dict.fromkeys(self.main_metrics, float(np.ptp(labels) == 0))
        if self.kind == "multilabel":
            order = np.argsort(-labels.sum(0), kind="stable")
            sets = (np.isin(np.arange(len(order)), order[:size]) for size in range(1, len(order) + 1))
            scores = [label_set_f1(labels > 0, np.broadcast_to(one, labels.shape)) for one in sets]
            return max(scores, key=lambda metrics: sum(metrics.values()))
        constants = (np.full_like(labels, index) for index in range(len(self._task.labels)))
        scores = [{name: METRICS[name](labels, one) for name in self.main_metrics} for one in constants]
        return max(scores, key=lambda metrics: sum(metrics.values()))

    def item_scores(self, split: str, logits: np.ndarray) -> dict[str, Float[np.ndarray, "2 E"]]:
        """Of accuracy, and of F1 where it is a main metric; of one class for each example, or none."""
        if not self._task.labels or self.kind == "multilabel":
            return {}
        labels, predictions = self.splits[split].examples.labels, self._predictions(logits)
        right, of_class_1 = labels == predictions, (labels == 1).astype(float) + (predictions == 1)
        found = {"accuracy": (right, np.ones(len(labels))), "f1": (2 * (right & (labels == 1)), of_class_1)}
        return {name: np.array(of, np.float64) for name, of in found.items() if name in self._reported}

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
        extra = ("accuracy",) if self._task.labels else ()
        if self.kind == "classification" and self._task.labels and self._task.glue_name is None:
            extra += ("macro_f1",)
        return tuple(dict.fromkeys(self.main_metrics + extra))

    def _by_example(self, logits: np.ndarray) -> np.ndarray:
        """Logits [E, classes]; of a multiple choice from one logit of each text, [texts, 1], too."""
        return logits.reshape(-1, max(1, len(self._task.labels)))

    def _predictions(self, logits: np.ndarray) -> np.ndarray:
        """Classes or numbers [E]; of several labels whether the probability of each exceeds 0.5, bool [E, C]."""
        if self.kind == "multilabel":
            return logits > 0
        return self._by_example(logits).argmax(-1) if self._task.labels else logits[:, 0]

    def _line(self, index: int, example: Example, prediction: Any, logits: np.ndarray) -> dict[str, Any]:
        def named(label: Any) -> Any:
            if self.kind == "multilabel":
                return [name for name, has in zip(self.labels, label, strict=True) if has]
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


def read_multilabel(directory: StoredPath, options: FileOptions) -> SentenceTask:
    """Texts that have any number of labels, also none: lists of JSON lines and Parquet, or texts with a separator.

    The order of the classes is as of `read_own`.

    Raises:
      UserError: no training or validation split, files that are not tables, a label that train does not have, or a test
        split in which only some rows have a column of labels.
    """
    columns = Columns(options.text_columns or ("text",), options.label_column, _ADVICE)
    tables = read_tables(directory, columns)
    names, found = tables.class_names.get(options.label_column, ()), {}
    for split, values in tables.rows.items():
        rows = _to_rows(split, values, columns._replace(label=None))
        sets = [_label_set(where, one.get(options.label_column), options.label_separator) for where, one in values]
        if split.startswith("test") and all(one in (None, [], ["-1"]) for one in sets):
            sets = [None] * len(sets)
        if split.startswith("test") and any(one is None for one in sets):
            require(
                all(one is None for one in sets),
                f"{rows[sets.index(None)].where} has no labels, other rows of the split have some: give all or none",
            )
        for row, one in zip(rows, sets, strict=True):
            require(one is not None or split.startswith("test"), f"{row.where} has no list or text of labels")
        found[split] = rows, sets
    indices = {str(i): name for i, name in enumerate(names)}
    labels = names or ordered({name for one in found["train"][1] for name in one})
    require(len(labels) >= 2, f"{directory}: train has {len(labels)} labels: multilabel needs two or more")
    splits = {}
    for split, (rows, sets) in found.items():
        splits[split] = []
        for row, one in zip(rows, sets, strict=True):
            chosen = None if one is None else {indices.get(name, name) for name in one}
            unknown = sorted((chosen or set()) - set(labels))
            known = ", ".join(labels[:20])
            require(not unknown, f"{row.where}: the label '{unknown and unknown[0]}' is not one of {known}")
            splits[split].append(
                Example(row.texts, None if chosen is None else tuple(int(name in chosen) for name in labels))
            )
    return SentenceTask(labels, ("micro_f1", "macro_f1"), splits, kind="multilabel")


def _label_set(where: str, value: Any, separator: str) -> list[str] | None:
    """The labels of a row; None if it has no value."""
    if value is None:
        return None
    values = value.split(separator) if isinstance(value, str) else value if isinstance(value, list) else [value]
    require(all(isinstance(one, str | int) for one in values), f"{where}: a label is not a string or whole number")
    named = [str(one).strip() for one in values]
    check_unicode(where, *named)
    return [name for name in named if name]


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
