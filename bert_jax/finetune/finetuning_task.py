"""Fine-tuning as a Task: a head on labelled examples, with packed rows and official metrics."""

import dataclasses
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Float, Int, Key, UInt32
from bert_jax.config import Config, FinetuneConfig, TaskHead
from bert_jax.data.cursor import Cursor
from bert_jax.model import bert
from bert_jax.model.cls_norm import Statistics, SumOverDevices
from bert_jax.model.dropout import DropoutKey, dropout
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.heads import Heads, label_log_likelihoods
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.sharding import sum_over_devices
from bert_jax.training.task import Params, Score

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch
    from bert_jax.finetune.example_rows import ExampleRows

HEAD_DROPOUT_SITE = 0xF1E
CLS_NORM = "task/cls_norm"
"""Path of the parameters of `TaskHead.cls_norm`."""
ALL_BUT_ADAPTERS = (r"encoder/(?!(.*/)?(\w+_adapter|\w*norm)/).*",)
"""Only adapters, all LayerNorms and the task head are trained, the pooler is not (Houlsby et al. 2019, figure 2;
google-research/adapter-bert). Of a model without adapters, only LayerNorms and head."""
ENCODER = (r"encoder/(embeddings|layers|final_norm)/.*",)
"""Only the task head, and the pooler that it reads, are trained."""
Metric = Callable[[np.ndarray], dict[str, float]]
"""Logits of a split's examples, [E, C], or of its tokens, [T, C], to metrics."""


@dataclass(frozen=True)
class FineTuning:
    """A task head on the encoder, trained on labelled examples.

    The loss is the mean over a batch's examples, or labelled tokens, of the cross-entropy, in a multiple choice over
    the endings; of the squared error if the head is that of a regression; for spans of the mean of the cross-entropies
    of start and end over the tokens of the example; in `multilabel` of the mean of the binary cross-entropies of all
    labels. Weights of classes and label smoothing are those of PyTorch's CrossEntropyLoss, so that with weights the
    loss is a weighted mean.
    Dropout with the rate of the encoder is applied to what the head reads (Devlin et al. 2019,
    run_classifier.py), after mixing, normalisation and pooling.
    """

    config: Config
    heads: Heads
    """With a task head."""
    batch_examples: int
    """Examples per step."""
    train: "ExampleRows"
    row_counts: tuple[int, ...]
    """Rows of a batch, ascending: each has the smallest sufficient number; the last is the batch size of the phase."""
    evaluated: "Mapping[str, tuple[ExampleRows, Metric]]" = dataclasses.field(default_factory=dict)
    """Held-out splits by the prefix of their metrics, with the function that computes these."""
    process: tuple[int, int] = (0, 1)
    """Index and number of processes: each reads its part of the rows."""
    phase: int = -1

    @property
    def head(self) -> TaskHead:
        """The task head."""
        assert self.heads.task is not None
        return self.heads.task

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers."""
        return self.head.kind == "classification" and len(self.head.labels) == 1

    def in_phase(self, phase: int) -> "FineTuning":
        """The same task in a phase of the run."""
        return dataclasses.replace(self, phase=phase)

    def init_params(self, key: Key[Array, ""]) -> Params:
        """New parameters of encoder and head."""
        return bert.init(self.config.model, key, self.heads)

    def prepare(
        self, batch: Batch, seed: UInt32[Array, ""] | None, mask_counts: Int[Array, " n"] | None = None
    ) -> Batch:
        """The same rows."""
        return batch

    def loss_weight_sums(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Number of labels, or sum of their weights."""
        return {"task_loss": self._label_weights(batch["labels"]).sum(dtype=jnp.float32)}

    def sums(self, params: Params, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
        """Loss and, for classes, accuracy; with batch normalisation of [CLS], also its new running statistics."""
        logits, statistics = self._logits(params, batch, dropout_key, sum_over_devices)
        one = jnp.ones((), jnp.float32)
        new_values = {f"{CLS_NORM}/{name}": WeightedSum(value, one) for name, value in statistics.items()}
        return self.logit_sums(logits, batch) | new_values

    def score(self, params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        """The rows with `logits`, [B, K, C] or [B, S, C], and their sums, without dropout; C endings of a choice."""
        logits, _ = self._logits(params, batch, None, None)
        return batch | {"logits": logits}, self.logit_sums(logits, batch)

    def logit_sums(self, logits: Float[Array, "B n C"], batch: Batch) -> dict[str, WeightedSum]:
        """Loss and, for classes, accuracy of logits of the head."""
        labels = batch["labels"]
        weights = has_label(labels).astype(jnp.float32)
        loss_weights = self._label_weights(labels)
        if self.head.kind == "span":
            likelihood, correct = span_log_likelihoods(logits, batch["segment_ids"], batch["cls_positions"], labels)
        elif self.head.kind == "multilabel":
            likelihood, correct = label_set_log_likelihoods(logits, jnp.maximum(labels, 0))
        elif self.is_regression:
            errors = jnp.square(logits[..., 0] - jnp.nan_to_num(labels))
            return {"task_loss": WeightedSum((errors * weights).sum(), weights.sum())}
        else:
            likelihood, correct = label_log_likelihoods(logits, jnp.maximum(labels, 0))
        weighted = likelihood * loss_weights
        smoothing = self._settings.label_smoothing
        if smoothing:
            log_probabilities = jax.nn.log_softmax(logits) * self._class_weights(logits.shape[-1])[None, None]
            weighted = (1 - smoothing) * weighted + smoothing * log_probabilities.mean(-1) * weights
        return {
            "task_loss": WeightedSum(-weighted.sum(), loss_weights.sum()),
            "task_accuracy": WeightedSum((correct * weights).sum(), weights.sum()),
        }

    @property
    def _settings(self) -> FinetuneConfig:
        assert self.config.finetune is not None
        return self.config.finetune

    def _class_weights(self, classes: int) -> Float[Array, " C"]:
        return jnp.asarray(self._settings.class_weights or [1.0] * classes, jnp.float32)

    def _label_weights(self, labels: Array) -> Float[Array, "B n"]:
        """The weight of each label's class, 0 where there is no label."""
        weights = has_label(labels).astype(jnp.float32)
        if not self._settings.class_weights:
            return weights
        return weights * self._class_weights(0)[jnp.maximum(labels, 0)]

    def _logits(
        self,
        params: Params,
        batch: Batch,
        dropout_key: DropoutKey | None,
        sum_over_devices: SumOverDevices | None,
    ) -> tuple[Float[Array, "B n C"], Statistics]:
        model = bert.model_from_params(self.config.model, self.heads, params)
        inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
        output = model.encode(inputs, dropout_key)
        features, statistics = model.task_features(inputs, output, sum_over_devices)
        rate, key = self.config.model.hidden_dropout, dropout_key and dropout_key.fold_in(HEAD_DROPOUT_SITE)
        return self.logits_by_label(model.task(dropout(features, rate, key)), batch), statistics

    def logits_by_label(self, logits: Float[Array, "B m D"], batch: Batch) -> Float[Array, "B n C"]:
        """The outputs of the head, of which those of a multiple choice are one for every ending, of each label."""
        if self.head.kind != "multiple_choice":
            return logits
        return logits.reshape(*batch["labels"].shape, -1)

    def blank_row(self) -> dict[str, np.ndarray]:
        """One row of padding."""
        return self.train.blank_rows(1)

    def batches(self, cursor: Cursor) -> "Generator[HostBatch, None, None]":
        """The batches from a cursor to the end of the run. Its `rows` are counted in whole batches."""
        from bert_jax.data.batches import HostBatch

        size, (index, processes) = self.config.phases[0].batch_size, self.process
        while cursor.step < self.config.total_steps:
            start = cursor.row_after_skipped()
            rows = self.train.training_rows(start // size, self.batch_examples, self.row_counts)
            count = len(rows["row"])
            share = slice(index * count // processes, (index + 1) * count // processes)
            cursor = dataclasses.replace(cursor, step=cursor.step + 1, rows=start + size)
            yield HostBatch({name: array[share] for name, array in rows.items()}, count, cursor)

    def evaluate(self, score: Score, batch_size: int) -> dict[str, float]:
        """Metrics of all held-out splits, as ``SPLIT/METRIC``."""
        metrics = {}
        for prefix, (rows, metric) in self.evaluated.items():
            metrics |= {f"{prefix}{key}": value for key, value in metric(self.predict(rows, score, batch_size)).items()}
        return metrics

    def predict(self, rows_of_split: "ExampleRows", score: Score, batch_size: int) -> np.ndarray:
        """Logits of a held-out split in the order of its examples: [E, C], or [T, C] of its tokens."""
        index, processes = self.process
        share = slice(index * batch_size // processes, (index + 1) * batch_size // processes)
        examples = rows_of_split.examples
        by_token = self.head.reads == "tokens"
        count = len(examples.input_ids) if by_token else examples.count
        logits = np.zeros((count, len(self.head.labels) * examples.choices), np.float32)
        for rows in rows_of_split.in_order(batch_size):
            scored, _ = score({name: array[share] for name, array in rows.items()})
            for row, slot in np.argwhere(rows["example_id"] >= 0):
                example = rows["example_id"][row, slot]
                if by_token:
                    start, end = examples.starts[example : example + 2]
                    first = rows["cls_positions"][row, slot]
                    logits[start:end] = scored["logits"][row, first : first + end - start]
                else:
                    logits[example] = scored["logits"][row, slot]
        return logits

    def step_flops(self, step: int) -> float:
        """FLOPs of the encoder in a step with the usual number of rows; those of the head are not counted.

        A frozen encoder needs its forward pass only; adapters need gradients of activations, but not of kernels.
        """
        phase = self.config.phases[0]
        passes = 1 if phase.frozen == ENCODER else 2 if phase.frozen else 3
        return pretraining_flops(self.config.model, self.row_counts[0], phase.seq_len, 0) * passes / 3


def label_set_log_likelihoods(
    logits: Float[Array, "B K C"], labels: Int[Array, "B K C"]
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """Mean log-likelihood over the labels, each of which an example has (1) or not (0), and 1.0 where all are right."""
    signs = 2.0 * labels - 1.0
    return jax.nn.log_sigmoid(signs * logits).mean(-1), ((logits > 0) == (labels > 0)).all(-1).astype(jnp.float32)


def span_log_likelihoods(
    logits: Float[Array, "B S 2"],
    segment_ids: Int[Array, "B S"],
    cls_positions: Int[Array, "B K"],
    labels: Int[Array, "B K 2"],
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """Mean log-likelihood of start and end over the tokens of each packed example, and 1.0 where both are the best.

    Args:
      logits: of start and end.
      segment_ids, cls_positions: of the batch.
      labels: positions of start and end in their example; negative where there is no example.
    """
    positions_BK2 = cls_positions[..., None] + jnp.maximum(labels, 0)
    likelihood, correct = label_log_likelihoods(span_logits(logits, segment_ids, labels.shape[1]), positions_BK2)
    return likelihood.mean(-1), correct.prod(-1)


def span_logits(logits: Float[Array, "B S 2"], segment_ids: Int[Array, "B S"], slots: int) -> Float[Array, "B K 2 S"]:
    """Logits of start and end over the tokens of each packed example; the least number at all other tokens."""
    is_inside_BKS = segment_ids[:, None, :] == jnp.arange(1, slots + 1)[None, :, None]
    logits_BKS2 = jnp.where(is_inside_BKS[..., None], logits[:, None], jnp.finfo(logits.dtype).min)
    return jnp.moveaxis(logits_BKS2, -1, 2)


def has_label(labels: Array) -> Array:
    """Whether examples or tokens have a label: NaN and -1 mean that there is none."""
    labels = labels[..., 0] if labels.ndim == 3 else labels
    return ~jnp.isnan(labels) if jnp.issubdtype(labels.dtype, jnp.floating) else labels >= 0
