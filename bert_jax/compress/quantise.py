"""Quantisation after training: a model with kernels and tables in 8-bit integers, beside the one that it comes from.

The scheme is in model/int8.py. The written model has ``dense_dtype int8``, so that it also rounds the inputs of its
dense layers, as Q8BERT does (Zafrir et al. 2019). Rounding again, in every forward pass, gives the stored integers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath

from bert_jax.convert.conversion import check_destination, convert
from bert_jax.convert.formats import input_formats, native
from bert_jax.convert.parity.sample_texts import TEXTS
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import require
from bert_jax.finetune.label_order import in_order_of_task
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.task_data import TaskData
from bert_jax.finetune.tasks import open_task
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, encode_sentences
from bert_jax.interventions.task_evaluation import rows_of, task_score
from bert_jax.model import bert
from bert_jax.model.int8 import dequantise, quantise
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.param_paths import map_with_paths, name_leaves

ADVICE = "give the data that it was fine-tuned on"


class QuantiseResult(NamedTuple):
    """The quantised model beside its source."""

    parameters: int
    float32_bytes: int
    """Of all parameters."""
    int8_bytes: int
    """Of the written file of parameters."""
    output: str
    """What was compared: the logits of the task head or of the MLM head, or the hidden states of a model without."""
    texts: int
    largest_difference: float
    root_mean_square: float
    """Of the output of the source."""
    scores: tuple[float, float] | None
    """On the task, of source and quantised model; None: no task was given."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        scores = None if self.scores is None else dict(zip(("source", "int8"), self.scores, strict=True))
        return self._asdict() | {"scores": scores, "share_of_float32": self.int8_bytes / self.float32_bytes}

    def summary_lines(self) -> list[str]:
        """Size, differences and scores as lines of text."""
        lines = [
            f"{self.parameters:,} parameters: {self.float32_bytes / 1e6:,.2f} MB in float32, "
            f"{self.int8_bytes / 1e6:,.2f} MB in int8, {self.int8_bytes / self.float32_bytes:.1%}",
            f"{self.output} of {self.texts:,} texts: largest difference {self.largest_difference:.3g}, root mean "
            f"square {self.root_mean_square:.3g}",
        ]
        if self.scores is None:
            return lines
        before, after = self.scores
        return [*lines, f"score {before:.4f} before, {after:.4f} in int8 ({after - before:+.4f})"]


def quantise_model(
    source: StoredPath,
    out: StoredPath,
    *,
    task: str | None = None,
    data: StoredPath | None = None,
    options: FinetuneOptions = FinetuneOptions(),  # noqa: B008 (frozen)
    announce: Callable[[str], None] = lambda line: None,
) -> QuantiseResult:
    """Write a model with kernels and tables in 8-bit integers, and compare it with its source.

    Args:
      source: any model that `bert-jax convert` reads.
      out: the directory to create, in the native format.
      task: name of the task of the source's head, as in `finetune`; both models are then scored on dev.
      data: directory with the task's files.
      options: columns of the data, and the longest example.
      announce: called with a line before each long step.

    Raises:
      UserError: the source is in 8-bit integers already, or has no tokenizer; the data do not belong to its head; or
        `out` exists or cannot be written.
    """
    check_destination(out, "--out ")
    require(
        (task is None) == (data is None),
        f"{'--task' if task else '--data'} is given alone: give --task and --data, or neither",
    )
    with input_formats.open_model(source) as source_model:
        tokenizer = source_model.loaded_tokenizer
        require(tokenizer is not None, f"{source} has no tokenizer: put its tokenizer.json in its directory")
        before, task_data = source_model.model, None
        if task is not None and data is not None:
            task_data = _open_data(source_model, task, data, options)
            before = in_order_of_task(before, task_data, source, ADVICE, announce)
        rounded = round_model(source_model)
        after = rounded.model
        if task_data is not None:
            after = in_order_of_task(after, task_data, source, ADVICE, lambda line: None)
        models = [_load(one, tokenizer) for one in (before, after)]
        rows, scores = _sample_rows(tokenizer, models[0].config.max_positions), None
        if task_data is not None:
            announce(f"scoring {task} with both models")
            scores = tuple(task_score(model, task_data) for model in models)
            examples = next(split.examples for split in task_data.splits.values() if split.is_scored)
            rows = rows_of(examples, range(len(examples.lengths)))
        output, difference, size = _compare(models, rows)
        announce("writing and checking the model")
        convert(rounded, out, "bert-jax")
        count = sum(np.size(leaf) for leaf in name_leaves(rounded.model.params).values())
        stored = epath.Path(out / native.PARAMS).stat().length
    return QuantiseResult(count, 4 * count, stored, output, len(rows), difference, size, scores)


def round_model(source_model: SourceModel) -> SourceModel:
    """The model with rounded parameters and ``dense_dtype int8``, in memory; without optimizer state.

    Raises:
      UserError: all its parameters are rounded already.
    """
    family, config, heads, params = source_model.model
    axes = bert.int8_axes(config, heads)

    def round_leaf(path: str, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf, np.float32)
        return np.asarray(dequantise(*quantise(jnp.asarray(array), axes[path]))) if path in axes else array

    rounded = map_with_paths(round_leaf, params)
    before, after = name_leaves(params), name_leaves(rounded)
    require(
        config.dense_dtype != "int8" or not all(np.array_equal(before[path], after[path]) for path in axes),
        f"{source_model} is in 8-bit integers already: there is nothing to quantise",
    )
    model = NativeModel(family, dataclasses.replace(config, dense_dtype="int8"), heads, rounded)
    notes = (*source_model.notes, native.INT8_NOTE)
    return dataclasses.replace(source_model, model=model, hf_model=None, optimizer_state=None, notes=notes)


def _open_data(source: SourceModel, task: str, directory: StoredPath, options: FinetuneOptions) -> TaskData:
    head = source.model.heads.task
    require(head is not None, f"{source} has no head of a task: fine-tune it first, or leave --task and --data out")
    assert source.loaded_tokenizer is not None
    encoder = SourceEncoder(source.model, source.loaded_tokenizer, str(source), sha256="")
    return open_task(task, directory, options, encoder)[0]


def _load(model: NativeModel, tokenizer: Tokenizer) -> LoadedModel:
    return LoadedModel(model.config, model.heads, model.params, tokenizer)


def _sample_rows(tokenizer: Tokenizer, max_positions: int) -> list[TextRow]:
    return [row for row in encode_sentences(TEXTS, tokenizer, max_positions) if row is not None]


def _compare(models: Sequence[LoadedModel], rows: Sequence[TextRow]) -> tuple[str, float, float]:
    """The name of the output, its largest difference, and the root mean square of the first model's."""
    heads = models[0].heads
    name = "task_logits" if heads.task else "mlm_logits" if heads.mlm else "hidden_states"
    by_text = heads.task is not None and heads.task.reads != "tokens"
    largest, squares, count = 0.0, 0.0, 0
    for batch in batches(rows, models[0].tokenizer.pad_id):
        used = batch.indices >= 0
        first, second = (capture(model, batch, [name])[name] for model in models)
        if name == "hidden_states":
            first, second = first[-1], second[-1]
        first, second = first[used], second[used]
        if not by_text:  # values at padding have no meaning
            real = batch.attention_mask[used] > 0
            first, second = first[real], second[real]
        largest = max(largest, float(np.abs(first - second).max()))
        squares, count = squares + float(np.square(first, dtype=np.float64).sum()), count + first.size
    words = {"task_logits": "logits of the task head", "mlm_logits": "logits of the MLM head"}
    return words.get(name, "last hidden states"), largest, (squares / count) ** 0.5
