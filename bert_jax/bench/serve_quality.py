"""The score of a fine-tuned task for models in any runtime, from the same ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.bench import harness
from bert_jax.bench.serve_models import TEXTS, TOKENS, ServedModel
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.errors import UserError, require
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.finetune import read_source
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.task_data import score
from bert_jax.finetune.tasks import encode_splits, read_splits
from bert_jax.inference.embedding import pad_rows
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

ROWS, STEP = 32, 16
"""Rows of a batch, and the multiple to which its longest row is padded: a jitted model compiles few shapes."""


def measure_quality(
    models: Sequence[ServedModel], first: StoredPath, task: str, directory: StoredPath
) -> list[dict[str, Any]]:
    """The scores of all models: a row of the table for each.

    Args:
      models: with the head of the task.
      first: path of the first model, whose tokenizer encodes the examples; bert_jax must read it.
      task: a name that `bert-jax finetune` takes.
      directory: with its files.

    Raises:
      UserError: a model without the head of the task, or with another tokenizer; or as `read_splits`.
    """
    for one in models:
        require(
            one.head is not None,
            f"{one.name} has no head for --task {task}: give a model that `bert-jax finetune` trained on it",
        )
    splits = read_splits(task, directory, FinetuneOptions())
    encoder = _read_first(first, task)
    data, _ = encode_splits(task, splits, FinetuneOptions(), encoder)
    for one in models:
        _check_model(one, task, data.kind, data.labels)
        check_tokenizer(one, encoder.tokenizer, encoder.path)
    table: list[dict[str, Any]] = []
    for one in models:
        harness.progress(f"quality on {task}: {one.name}")
        pad_id = encoder.tokenizer.pad_id
        metrics = {}
        for name, split in data.splits.items():
            if split.is_scored:
                by_token = data.kind in ("tagging", "span")
                metrics[name] = data.metrics(name, task_logits(one, split.examples, pad_id, by_token=by_token))
        value = score(data, metrics.__getitem__)
        ratio = value / table[0]["score"] if table else 1.0
        examples = sum(data.splits[name].examples.count for name in metrics)
        table.append({"model": one.name, "task": task, "examples": examples, "score": value, "score / first": ratio})
    return table


def _read_first(first: StoredPath, task: str) -> SourceEncoder:
    try:
        return read_source(first)
    except UserError as error:
        raise UserError(
            f"--task {task}: the first MODEL is the reference and must be one that bert_jax reads ({error})"
        ) from error


def _check_model(model: ServedModel, task: str, kind: str, labels: tuple[str, ...]) -> None:
    """Raise UserError unless the model has the head of the task."""
    kind_fits = model.head in (kind, TOKENS if kind in ("tagging", "span") else TEXTS)
    named = kind not in ("span", "multiple_choice")
    if not kind_fits or (model.labels and model.labels != labels and named):
        raise UserError(
            f"{model.name} has a head of {model.head} with the labels {', '.join(model.labels) or '(unknown)'}, --task "
            f"{task} has {', '.join(labels)}: give a model that was fine-tuned on this task"
        )


def check_tokenizer(model: ServedModel, tokenizer: Tokenizer, reference: str) -> None:
    """Raise UserError if the model has another tokenizer than the reference, which encodes the examples."""
    if model.tokenizer is not None and model.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{model.name} has another tokenizer than {reference}: their scores are not comparable")


def task_logits(model: ServedModel, examples: EncodedExamples, pad_id: int, *, by_token: bool) -> np.ndarray:
    """Logits of all examples [E, C], or of all their tokens [T, C], one example per row.

    Examples are sorted by length. A batch is padded to a multiple of STEP of its longest example, and has always ROWS
    rows, so that all runtimes get the same arrays.
    """
    lengths = examples.lengths
    order = np.argsort(lengths, kind="stable")
    found: list[np.ndarray] = [np.zeros((0, 0), np.float32)] * len(lengths)
    for start in range(0, len(order), ROWS):
        rows = order[start : start + ROWS]
        length = min(-(-int(lengths[rows].max()) // STEP) * STEP, model.max_positions)
        logits = model.call(pad_examples(examples, rows, length, pad_id))
        for row, index in enumerate(rows):
            found[index] = logits[row, : lengths[index]] if by_token else logits[row : row + 1]
    return np.concatenate(found)


def pad_examples(examples: EncodedExamples, indices: np.ndarray, length: int, pad_id: int) -> ForwardInputs:
    """These examples as a batch of ROWS rows; those after them repeat the first one."""
    filled = [*indices, *[indices[0]] * (ROWS - len(indices))]
    parts = [slice(examples.starts[index], examples.starts[index + 1]) for index in filled]
    ids, mask = pad_rows([examples.input_ids[part] for part in parts], length, pad_id)
    types, _ = pad_rows([examples.token_type_ids[part] for part in parts], length, 0)
    return ForwardInputs(ids, types, mask)
