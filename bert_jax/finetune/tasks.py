"""The tasks of fine-tuning: a new one is a row of `TASKS`, a function that reads its files, and a `TaskData`."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.convert.families import FAMILIES
from bert_jax.data.hash_random import make_key, permute
from bert_jax.errors import UserError, did_you_mean, require
from bert_jax.finetune import glue
from bert_jax.finetune.options import FileOptions, FinetuneOptions
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.sentence_data import (
    SentenceData,
    SentenceTask,
    read_choices,
    read_glue,
    read_multilabel,
    read_own,
)
from bert_jax.finetune.squad import Question
from bert_jax.finetune.squad_data import SquadData, read_squad_splits
from bert_jax.finetune.tagging import TaggedSentence
from bert_jax.finetune.tagging_data import TaggingData, read_tagging
from bert_jax.finetune.task_data import SELECTION, TaskData, baseline_score, labelled_tests
from bert_jax.storage.paths import StoredPath

HELD_OUT = 0x5E1EC7
"""Word of keys: which examples `hold_out` holds out."""
Splits = dict[str, list[TaggedSentence]] | dict[str, list[Question]] | SentenceTask
"""The examples of a task: of tagging, squad, and all others."""


@dataclass(frozen=True)
class TaskSpec:
    """How a task is read and encoded. Its labels and metrics are those of the `TaskData`."""

    read: Callable[[StoredPath, FinetuneOptions], Any]
    """The `Splits` of a directory."""
    encode: Callable[[Any, SourceEncoder, FinetuneOptions], TaskData]
    """The data of these splits for a model; `max_length` is given."""
    file_options: tuple[str, ...] = ()
    """Fields of `FileOptions` that `read` uses."""
    default_length: int = 128
    """Of `max_length`, in tokens."""
    best_score: float = 1.0
    """That of predictions without an error; a task whose dev split gives it to a constant is refused."""
    reads_tokens: bool = False
    """Whether the head reads each token, and not a vector of the example."""


def _encode_texts(splits: SentenceTask, encoder: SourceEncoder, options: FinetuneOptions) -> SentenceData:
    assert options.max_length is not None
    config, separators = encoder.model.config, FAMILIES[encoder.model.family].pair_separators
    return SentenceData(splits, encoder.tokenizer, options.max_length, config.type_vocab_size, separators)


def _encode_words(
    splits: dict[str, list[TaggedSentence]], encoder: SourceEncoder, options: FinetuneOptions
) -> TaggingData:
    assert options.max_length is not None
    return TaggingData(splits, encoder.tokenizer, options.max_length)


def _encode_questions(splits: dict[str, list[Question]], encoder: SourceEncoder, options: FinetuneOptions) -> SquadData:
    config, separators = encoder.model.config, FAMILIES[encoder.model.family].pair_separators
    return SquadData(splits, encoder.tokenizer, options, config.type_vocab_size, separators)


def _glue(name: str) -> TaskSpec:
    return TaskSpec(lambda directory, options: read_glue(name, directory), _encode_texts)


def _own(name: str) -> TaskSpec:
    return TaskSpec(lambda directory, options: read_own(name, directory, options), _encode_texts, _COLUMNS)


_COLUMNS = ("text_columns", "label_column")
TASKS = {
    **{name: _glue(name) for name in glue.GLUE},
    "classification": _own("classification"),
    "multilabel": TaskSpec(read_multilabel, _encode_texts, (*_COLUMNS, "label_separator")),
    "regression": _own("regression"),
    "multiple_choice": TaskSpec(read_choices, _encode_texts, _COLUMNS),
    "tagging": TaskSpec(read_tagging, _encode_words, (*_COLUMNS, "tag_column", "word_column"), reads_tokens=True),
    "squad": TaskSpec(
        read_squad_splits,
        _encode_questions,
        ("skip_damaged",),
        default_length=384,
        best_score=100.0,
        reads_tokens=True,
    ),
}


def check_task(task: str) -> None:
    """Raise UserError for an unknown task."""
    require(
        task in TASKS,
        f"--task {task} is unknown: use one of {', '.join(TASKS)}. {did_you_mean(task, TASKS)}".rstrip(),
    )


def read_splits(task: str, directory: StoredPath, options: FinetuneOptions) -> Splits:
    """Read the examples of a task, which need no model yet.

    Raises:
      UserError: an unknown task, an option about files that the task does not read, or a split is missing or does not
        have the form of the task.
    """
    check_task(task)
    for field in dataclasses.fields(FileOptions):
        if field.name not in TASKS[task].file_options and getattr(options, field.name) != field.default:
            readers = [name for name, spec in TASKS.items() if field.name in spec.file_options]
            raise UserError(
                f"--{field.name.replace('_', '-')} is for --task {', '.join(readers)}; the files of {task} do not "
                "need it: leave it out"
            )
    require(directory.is_dir(), f"--data {directory} is not a directory: give the one with the task's files")
    return TASKS[task].read(directory, options)


def hold_out(splits: Splits, share: float, seed: int) -> Splits:
    """The splits with a share of train as the split `SELECTION`, on which a run chooses its best epoch.

    Args:
      splits: of `read_splits`; of squad, examples are questions.
      share: of the examples of train.
      seed: of the run; an example is held out depending on it, the example's index, and their number.

    Raises:
      UserError: one of the two parts would have no example, or train none of a class.
    """
    by_name: dict[str, Any] = dict(splits.splits if isinstance(splits, SentenceTask) else splits)
    train = by_name["train"]
    total, count = len(train), round(share * len(train))
    flag = f"--selection-share {share:g}"
    require(0 < count < total, f"{flag} holds out {count} of {total} training examples: choose another share")
    is_held = np.zeros(total, bool)
    is_held[permute(np.arange(total), total, make_key(seed, HELD_OUT))[:count]] = True
    parts = {
        name: [train[i] for i in np.flatnonzero(which)] for name, which in (("train", ~is_held), (SELECTION, is_held))
    }
    lost = sorted(_classes(splits, train) - _classes(splits, parts["train"]))
    require(
        not lost,
        f"{flag} with seed {seed} leaves no example of '{lost and lost[0]}' for training: choose another share",
    )
    by_name |= parts
    return splits._replace(splits=by_name) if isinstance(splits, SentenceTask) else by_name


def _classes(splits: Splits, examples: Sequence[Any]) -> set[str]:
    """The classes of examples; of words and questions, too."""
    if not isinstance(splits, SentenceTask):
        groups = (one.tags if isinstance(one, TaggedSentence) else (str(bool(one.answers)),) for one in examples)
        return {name for group in groups for name in group}
    if not splits.labels or splits.kind == "multiple_choice":
        return set()
    several = splits.kind == "multilabel"
    return {splits.labels[i] for one in examples for i in (np.flatnonzero(one.label) if several else [one.label])}


def encode_splits(
    task: str, splits: Splits, options: FinetuneOptions, encoder: SourceEncoder
) -> tuple[TaskData, FinetuneOptions]:
    """Encode the splits of a task, which `read_splits` read, with the tokenizer of a model.

    Returns:
      the data, and
      the options with `max_length`.

    Raises:
      UserError: an option that the head of the task does not read, or `max_length` exceeds the model's positions.
    """
    spec = TASKS[task]
    if spec.reads_tokens:
        advice = f"which the head of --task {task} does not read: leave the flag out"
        require(options.cls_norm == "none", f"--cls-norm normalises [CLS], {advice}")
        require(options.pooling is None, f"--pooling is the vector of an example, {advice}")
    options = options.with_length(encoder.model.config, spec.default_length)
    return spec.encode(splits, encoder, options), options


def check_one_label(task: str, data: TaskData, what: str) -> None:
    """Raise UserError for a task whose examples do not have one text, or pair, with one label for it or its tokens."""
    require(
        data.kind in ("classification", "tagging", "span"),
        f"task {task}: {what} needs tasks with one text and one label per example or token: choose another task",
    )


def open_task(
    task: str, directory: StoredPath, options: FinetuneOptions, encoder: SourceEncoder
) -> tuple[TaskData, FinetuneOptions]:
    """Read and encode the splits of a task.

    Returns:
      the data, and
      the options with `max_length`.

    Raises:
      UserError: as `read_splits` and `encode_splits`; or a constant prediction has the best score of dev.
    """
    data, options = encode_splits(task, read_splits(task, directory, options), options, encoder)
    require(
        baseline_score(data) < TASKS[task].best_score,
        f"--data {directory}: all examples of dev have the same label, so no model is better than a constant "
        "prediction: give a dev split with several labels",
    )
    require(
        options.test_score != "required" or bool(labelled_tests(data)),
        f"--test-score required: {directory} has no test split with labels: add one, or leave the flag out",
    )
    return data, options
