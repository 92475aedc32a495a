"""The data of the suite: texts for the MLM loss, or the examples of the task of a fine-tuned model."""

from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.analysis.heads.examples import labelled_examples, masked_texts, scored_examples, shorten_held_out
from bert_jax.analysis.heads.losses import Examples
from bert_jax.analysis.rows import sample_texts
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.convert.translate import NativeModel, infer_model_type
from bert_jax.errors import require
from bert_jax.finetune.finetune import encode_splits, native_sha256, read_splits
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.task_data import TaskData, baseline_score
from bert_jax.inference.loaded_model import LoadedModel


class HeadData(NamedTuple):
    """Examples of a loss, and what they are."""

    for_importance: Examples
    for_losses: Examples
    """Others than those for the importances."""
    about: dict[str, Any]
    """Plain values for the result."""


def read_texts(inputs: SuiteInputs, count: int, max_length: int, mask_share: float) -> HeadData:
    """Two sets of `count` texts with masked tokens; fewer if text/ has fewer lines that fit.

    Raises:
      UserError: no text/, or fewer than two of its lines fit or have a token that the vocabulary knows.
    """
    tokenizer = inputs.model.tokenizer
    length = min(max_length, inputs.model.config.max_positions)
    sample = sample_texts(inputs.files("text", ".txt"), tokenizer, length, 2 * count, inputs.seed, least=2)
    half = len(sample.rows) // 2
    parts = [
        masked_texts(rows, tokenizer, mask_share, inputs.seed + i)
        for i, rows in enumerate((sample.rows[:half], sample.rows[half:]))
    ]
    known = all(part.count for part in parts)
    require(known, "heads: too few lines of text/ have a token that the vocabulary knows: give other texts")
    about = {
        "objective": "mlm",
        "metric": "accuracy at masked tokens",
        "mask_share": mask_share,
        "lines": sample.lines,
        "skipped_lines": sample.skipped,
        "best_constant_score": None,
    }
    return HeadData(*parts, about)


def read_task(inputs: SuiteInputs, task: str, options: FinetuneOptions, count: int) -> HeadData:
    """`count` examples of train, and as many of each dev split.

    Raises:
      UserError: task data that do not have the form or the labels of the model's head.
    """
    model, head = inputs.model, inputs.model.heads.task
    data = open_short_task(inputs, task, options, count)
    require(
        (head.kind, head.labels) == (data.kind, data.labels),
        f"heads: the model's head has the labels {', '.join(head.labels)} ({head.kind}), task/ has "
        f"{', '.join(data.labels)} ({data.kind}): give the data that it was fine-tuned on",
    )
    order = np.random.default_rng(inputs.seed).permutation(len(data.train.lengths))[:count]
    pad_id = model.tokenizer.pad_id
    about = {
        "objective": task,
        "metric": f"mean of {', '.join(data.main_metrics)} on dev",
        "mask_share": None,
        "lines": None,
        "skipped_lines": None,
        "best_constant_score": baseline_score(data),
    }
    return HeadData(
        labelled_examples(data.kind, data.train, np.sort(order), pad_id), scored_examples(data, pad_id), about
    )


def open_short_task(inputs: SuiteInputs, task: str, options: FinetuneOptions, count: int) -> TaskData:
    """The encoded train and dev splits of a task in task/, with at most `count` examples of each dev split."""
    options = options.with_length(inputs.model.config, 384 if task == "squad" else 128)
    splits = shorten_held_out(read_splits(task, inputs.data / "task", options), count, inputs.seed)
    return encode_splits(task, splits, options, as_source(inputs.model))


def as_source(model: LoadedModel) -> SourceEncoder:
    """A loaded model as the source of fine-tuning."""
    params = jax.tree.map(np.asarray, model.params)
    native = NativeModel(infer_model_type(model.config, model.heads), model.config, model.heads, params)
    return SourceEncoder(native, model.tokenizer, "MODEL", native_sha256(native))
