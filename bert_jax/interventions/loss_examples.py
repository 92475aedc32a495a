"""Examples of a loss: texts with masked tokens, or labelled examples of a task."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.sentence_data import SentenceTask
from bert_jax.finetune.task_data import TaskData, score
from bert_jax.finetune.tasks import Splits
from bert_jax.interventions.pruning_masks import ExampleBatch, Examples
from bert_jax.interventions.rows import TextRow, batches, choose_masked, masked_positions
from bert_jax.interventions.task_evaluation import rows_of
from bert_jax.tokenizers.tokenizer import Tokenizer

TOKENS_PER_BATCH = 256
"""Rows of a batch are at most this long together: few rows only fill a batch, whose passes are repeated per head."""


def masked_texts(rows: Sequence[TextRow], tokenizer: Tokenizer, share: float, seed: int) -> Examples:
    """Texts in which a share of the ordinary tokens is replaced by the mask token; these are the labels.

    Texts without an ordinary token are left out.

    Args:
      rows: of `rows.encode_texts`.
      tokenizer: of the model.
      share: of each text's ordinary tokens, at least one.
      seed: of the choice.
    """
    chosen = choose_masked(rows, tokenizer.special_ids, share, seed)
    kept = [i for i, positions in enumerate(chosen) if len(positions)]
    rows, masked = [rows[i] for i in kept], [chosen[i] for i in kept]
    most = max(map(len, masked), default=0)
    found = []
    for batch in batches(rows, tokenizer.pad_id, TOKENS_PER_BATCH):
        positions, valid = masked_positions(batch, masked, most)
        labels = np.where(valid, np.take_along_axis(batch.input_ids, positions, axis=1), -1)
        ids = batch.input_ids.copy()
        np.put_along_axis(ids, positions, tokenizer.mask_id, axis=1)
        inputs = (ids, batch.token_type_ids, batch.attention_mask)
        found.append(ExampleBatch(inputs, positions, labels.astype(np.int32), batch.indices))
    lengths = np.array([len(row.input_ids) for row in rows], np.int64)
    return Examples("mlm", found, len(rows), lengths, None)


def labelled_examples(kind: str, examples: EncodedExamples, indices: np.ndarray, pad_id: int) -> Examples:
    """Examples of a task's split; their score is the share of labels with the highest logit.

    Args:
      kind: of the task head.
      examples: of the split.
      indices: which of them.
      pad_id: of the tokenizer.
    """
    rows, labels = rows_of(examples, indices), _labels_by_example(examples, indices)
    found = []
    for batch in batches(rows, pad_id, TOKENS_PER_BATCH):
        inputs = (batch.input_ids, batch.token_type_ids, batch.attention_mask)
        width = batch.input_ids.shape[1] if examples.labels_tokens else 1
        missing = np.nan if np.issubdtype(examples.labels.dtype, np.floating) else -1
        batch_labels = np.full((len(batch.indices), width, *labels[0].shape[1:]), missing, examples.labels.dtype)
        for b, index in enumerate(batch.indices):
            if index >= 0:
                batch_labels[b, : len(labels[index])] = labels[index]
        found.append(ExampleBatch(inputs, None, batch_labels, batch.indices))
    lengths = np.array([len(row.input_ids) for row in rows], np.int64)
    return Examples(kind, found, len(rows), lengths, None)


def _labels_by_example(examples: EncodedExamples, indices: np.ndarray) -> list[np.ndarray]:
    """Labels [1], of spans [1, 2], of tags [tokens]."""
    if examples.labels_tokens:
        return [examples.labels[examples.starts[i] : examples.starts[i + 1]] for i in indices]
    return [examples.labels[i : i + 1] for i in indices]


def scored_examples(data: TaskData, pad_id: int) -> Examples:
    """All examples of the splits that are scored, with the task's score."""
    names = [name for name, split in data.splits.items() if split.is_scored]
    parts = [data.splits[name].examples for name in names]
    indices = [np.arange(len(part.lengths)) for part in parts]
    found = [labelled_examples(data.kind, part, which, pad_id) for part, which in zip(parts, indices, strict=True)]
    starts = np.cumsum([0, *(one.count for one in found)])

    def score_of(logits: list[np.ndarray]) -> float:
        by_split = {
            name: np.concatenate(logits[start:end])
            for name, (start, end) in zip(names, itertools.pairwise(starts), strict=True)
        }
        return score(data, lambda name: data.metrics(name, by_split[name]))

    moved = [
        batch._replace(indices=np.where(batch.indices >= 0, batch.indices + start, -1))
        for one, start in zip(found, starts[:-1], strict=True)
        for batch in one.batches
    ]
    lengths = np.concatenate([one.lengths for one in found])
    return Examples(data.kind, moved, int(starts[-1]), lengths, score_of)


def shorten_held_out(splits: Splits, count: int | None, seed: int) -> Splits:
    """The splits of a task with at most `count` examples of each dev split, drawn at random, and without test splits.

    Args:
      splits: of `tasks.read_splits`; of squad, examples are questions.
      count: examples to keep; None: all.
      seed: of the draw.
    """

    def shorten(by_name: Mapping[str, Sequence]) -> dict[str, list]:
        kept = {}
        for name, examples in by_name.items():
            if name.startswith("test"):
                continue
            order = np.random.default_rng(seed).permutation(len(examples))[:count]
            kept[name] = [examples[i] for i in np.sort(order)] if name.startswith("dev") else examples
        return kept

    if isinstance(splits, SentenceTask):
        return splits._replace(splits=shorten(splits.splits))
    return shorten(splits)
