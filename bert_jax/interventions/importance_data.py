"""Texts for the MLM loss, or the examples of the task of a fine-tuned model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.convert.translate import NativeModel, infer_model_type
from bert_jax.errors import require
from bert_jax.finetune.finetune import native_sha256
from bert_jax.finetune.label_order import check_head
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.task_data import TaskData, baseline_score
from bert_jax.finetune.tasks import check_one_label, encode_splits, read_splits
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.loss_examples import labelled_examples, masked_texts, scored_examples, shorten_held_out
from bert_jax.interventions.pruning_masks import Examples
from bert_jax.interventions.rows import sample_texts
from bert_jax.storage.paths import StoredPath


class ImportanceData(NamedTuple):
    """Examples of a loss, and what they are."""

    for_importance: Examples
    for_losses: Examples
    """Others than those for the importances."""
    about: dict[str, Any]
    """Plain values for the result."""
    names: tuple[str, ...]
    """What tells the examples for the losses apart."""


def read_texts(
    model: LoadedModel, paths: Sequence[StoredPath], count: int, max_length: int, mask_share: float, seed: int
) -> ImportanceData:
    """Two sets of `count` lines of text files with masked tokens; fewer if the files have fewer lines that fit.

    Args:
      model: with an MLM head.
      paths: of the files.
      count: lines of a set.
      max_length: tokens of a line, special ones included, at most the model's positions.
      mask_share: share of a line's tokens that are masked.
      seed: of the choice of lines and tokens.

    Raises:
      UserError: fewer than two lines fit or have a token that the vocabulary knows.
    """
    tokenizer = model.tokenizer
    length = min(max_length, model.config.max_positions)
    sample = sample_texts(paths, tokenizer, length, 2 * count, seed, least=2)
    half = len(sample.rows) // 2
    special = tokenizer.special_ids
    kept = [i for i, row in enumerate(sample.rows) if not np.isin(row.input_ids, special).all()]
    sides = [[i for i in kept if i < half], [i for i in kept if i >= half]]
    parts = [
        masked_texts([sample.rows[i] for i in side], tokenizer, mask_share, seed + number)
        for number, side in enumerate(sides)
    ]
    known = all(part.count for part in parts)
    require(known, f"{paths[0]}: too few lines have a token that the vocabulary knows: give other texts")
    about = {
        "objective": "mlm",
        "metric": "accuracy at masked tokens",
        "mask_share": mask_share,
        "lines": sample.lines,
        "skipped_lines": sample.skipped,
        "best_constant_score": None,
    }
    return ImportanceData(*parts, about, tuple(f"text {sample.numbers[i]}" for i in sides[1]))


def read_task(
    model: LoadedModel,
    directory: StoredPath,
    task: str,
    options: FinetuneOptions,
    count: int,
    seed: int,
    max_dev_examples: int | None = None,
) -> ImportanceData:
    """`count` examples of train, and at most `max_dev_examples` of each dev split.

    Args:
      model: fine-tuned on the task.
      directory: with the files of its splits.
      task, options: as of fine-tuning.
      count: examples of train, drawn at random; all if there are fewer.
      seed: of the draws.
      max_dev_examples: most examples of each dev split; None: all.

    Raises:
      UserError: task data that do not have the form or the labels of the model's head.
    """
    head = model.heads.task
    data, _ = open_task(model, directory, task, options, seed, max_dev_examples)
    check_head(head, data, "the model", "give the data that it was fine-tuned on")
    order = np.random.default_rng(seed).permutation(len(data.train.lengths))[:count]
    pad_id = model.tokenizer.pad_id
    about = {
        "objective": task,
        "metric": f"mean of {', '.join(data.main_metrics)} on dev",
        "mask_share": None,
        "lines": None,
        "skipped_lines": None,
        "best_constant_score": baseline_score(data),
    }
    examples = scored_examples(data, pad_id)
    names = tuple(f"dev, example {i}" for i in range(examples.count))
    return ImportanceData(labelled_examples(data.kind, data.train, np.sort(order), pad_id), examples, about, names)


def open_task(
    model: LoadedModel,
    directory: StoredPath,
    task: str,
    options: FinetuneOptions,
    seed: int,
    max_dev_examples: int | None,
) -> tuple[TaskData, FinetuneOptions]:
    """`tasks.open_task` for a loaded model, without test splits and with at most `max_dev_examples` per dev split."""
    splits = shorten_held_out(read_splits(task, directory, options), max_dev_examples, seed)
    data, options = encode_splits(task, splits, options, as_source(model))
    check_one_label(task, data, "the importance of heads and layers")
    return data, options


def as_source(model: LoadedModel) -> SourceEncoder:
    """A loaded model as the source of fine-tuning."""
    params = jax.tree.map(np.asarray, model.params)
    native = NativeModel(infer_model_type(model.config, model.heads), model.config, model.heads, params)
    return SourceEncoder(native, model.tokenizer, "MODEL", native_sha256(native))
