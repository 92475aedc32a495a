"""Logits, losses and metrics of a task for any parameters, one example per row.

Unlike `finetune`, which packs examples, this needs no run directory; logits are equal to rounding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Float
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.task_data import TaskData, score
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches
from bert_jax.training.task import Params


def with_params(model: LoadedModel, params: Params) -> LoadedModel:
    """The model with other parameters."""
    return LoadedModel(model.config, model.heads, params, model.tokenizer)


def rows_of(examples: EncodedExamples, indices: Sequence[int] | np.ndarray) -> list[TextRow]:
    """Examples as rows; every token is its own word."""
    rows = []
    for index in indices:
        part = slice(examples.starts[index], examples.starts[index + 1])
        ids = examples.input_ids[part]
        rows.append(TextRow(ids, examples.token_type_ids[part], np.arange(len(ids), dtype=np.int32)))
    return rows


def task_logits(model: LoadedModel, examples: EncodedExamples, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Logits of the task head for each example: [1, C], or [tokens, C] if the head reads tokens."""
    rows = rows_of(examples, indices)
    by_token = model.heads.task is not None and model.heads.task.reads == "tokens"
    found: list[np.ndarray] = [np.zeros((0, 0))] * len(rows)
    for batch in batches(rows, model.tokenizer.pad_id):
        logits = capture(model, batch, ["task_logits"])["task_logits"]
        for b, index in enumerate(batch.indices):
            if index >= 0:
                found[index] = logits[b, : batch.lengths[b] if by_token else 1]
    return found


class ExampleLosses(NamedTuple):
    """Losses of examples; the loss is the sum of the sums over that of the weights."""

    sums: Float[np.ndarray, " E"]
    """Over the labels of an example."""
    weights: Float[np.ndarray, " E"]
    """Number of its labels."""


def task_losses(
    logits: Sequence[np.ndarray], examples: EncodedExamples, indices: Sequence[int] | np.ndarray, kind: str
) -> ExampleLosses:
    """The loss of fine-tuning (`FineTuning`) without dropout.

    It is the mean cross-entropy of examples or labelled tokens in nats; of a regression, the mean squared error; of
    spans, the mean of the cross-entropies of start and end.

    Args:
      logits: of `task_logits`.
      examples: of the split, with labels.
      indices: of the examples.
      kind: of the task head.
    """
    losses: list[tuple[float, float]] = []
    for one, index in zip(logits, indices, strict=True):
        one = np.asarray(one, np.float64)
        if kind == "span":
            log_probabilities = log_softmax(one.T)
            losses.append((-np.mean([log_probabilities[i, examples.labels[index, i]] for i in range(2)]), 1))
        elif kind == "tagging":
            labels = examples.labels[examples.starts[index] : examples.starts[index + 1]]
            labelled = np.flatnonzero(labels >= 0)
            losses.append((-log_softmax(one)[labelled, labels[labelled]].sum(), len(labelled)))
        elif one.shape[-1] == 1:
            losses.append(((one[0, 0] - examples.labels[index]) ** 2, 1))
        else:
            losses.append((-log_softmax(one)[0, examples.labels[index]], 1))
    return ExampleLosses(*np.array(losses, np.float64).T)


def scored_logits(model: LoadedModel, data: TaskData) -> dict[str, np.ndarray]:
    """Logits of the dev splits, of their examples or tokens, as `TaskData.metrics` takes them."""
    examples = {name: split.examples for name, split in data.splits.items() if split.is_scored}
    return {name: np.concatenate(task_logits(model, one, range(len(one.lengths)))) for name, one in examples.items()}


def task_score(model: LoadedModel, data: TaskData) -> float:
    """The task's score, as `bert-jax finetune` reports it: the mean of the main metrics over the dev splits."""
    logits = scored_logits(model, data)
    return score(data, lambda split: data.metrics(split, logits[split]))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
