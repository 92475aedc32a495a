"""Distillation on the data of a task, as a Task: fine-tuning of a student, with a frozen teacher in its parameters."""

import dataclasses
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Bool, Float
from bert_jax.compress import distillation_losses
from bert_jax.compress.teacher_task import FROZEN, TEACHER, TeacherTask, student_of
from bert_jax.compress.theseus import applied_layers, draw_replaced, mixed_stack
from bert_jax.config import ModelConfig, TaskHead
from bert_jax.data.cursor import Cursor
from bert_jax.finetune.example_rows import ExampleRows
from bert_jax.finetune.finetuning_task import HEAD_DROPOUT_SITE, FineTuning, has_label, span_logits
from bert_jax.model import bert
from bert_jax.model.dropout import DropoutKey, dropout
from bert_jax.model.encoder import EncoderInputs, EncoderOutput
from bert_jax.model.flops import pretraining_flops
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.task import Params, Score

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch

FROZEN_IN_THESEUS = (*FROZEN, r"encoder/(?!layers/).*", r"task/.*")
"""For `Phase.frozen` with replaced layers: only the student's layers are trained."""
REPLACED = "replaced"
"""Array of a batch: whether each module is replaced in this step, int32 [B, M], the same in all rows."""


@dataclass(frozen=True)
class Distillation(TeacherTask):
    """A student that is trained on labels and on a teacher with the same task head."""

    student: FineTuning

    @property
    def head(self) -> TaskHead:
        """The task head."""
        return self.student.head

    @property
    def task_terms(self) -> tuple[str, ...]:
        """Metrics that are the losses of the student's own task."""
        return ("task_loss",)

    def soft_loss_weight(self, batch: Batch) -> Float[Array, ""]:
        """Number of labels."""
        return has_label(batch["labels"]).sum(dtype=jnp.float32)

    def sums(self, params: Params, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
        """Loss and accuracy of the labels, loss of the soft targets and of every match; and the terms of the loss."""
        if self.recipe.replacement is None:
            output, logits = self._forward(self.config.model, student_of(params), batch, dropout_key)
        else:
            output, logits = self._mixed_forward(params, batch, dropout_key)
        sums = self.student.logit_sums(logits, batch)
        if self.recipe.replacement is not None:
            sums["replaced_share"] = WeightedSum(batch[REPLACED].mean(dtype=jnp.float32), jnp.ones((), jnp.float32))
        if self.needs_teacher:
            teacher, teacher_logits = self._forward(self.teacher_model, params[TEACHER], batch, None)
            sums["soft_loss"] = self._soft_loss(logits, teacher_logits, batch)
            sums |= self.match_sums(params, output, teacher, batch)
        return self.with_terms(sums)

    def _mixed_forward(
        self, params: Params, batch: Batch, dropout_key: DropoutKey | None
    ) -> tuple[EncoderOutput, Float[Array, "B n C"]]:
        """`_forward` of the student with those layers of the teacher that are not replaced in this step."""
        depth = self.teacher_model.num_layers
        model = dataclasses.replace(self.config.model, num_layers=depth + self.config.model.num_layers)
        applied = applied_layers(batch[REPLACED][0] > 0, depth)
        mixed = mixed_stack(params[TEACHER], student_of(params))
        return self._forward(model, mixed, batch, dropout_key, applied)

    def _forward(
        self,
        model_config: ModelConfig,
        params: Params,
        batch: Batch,
        dropout_key: DropoutKey | None,
        applied: Bool[Array, " L"] | None = None,
    ) -> tuple[EncoderOutput, Float[Array, "B n C"]]:
        """Output of an encoder, with what the matches read, and the logits of its head."""
        model = bert.model_from_params(model_config, self.student.heads, params)
        inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
        if self.recipe.matches:
            output = model.encoder(
                inputs, dropout_key=dropout_key, hidden_states=True, activations=self.sites, pool=False
            )
            read = model.task_view(inputs, output)
        elif applied is not None:
            output = model.encoder(inputs, dropout_key=dropout_key, pool=False, applied=applied)
            read = model.task_view(inputs, output)
        else:
            output = read = model.encode(inputs, dropout_key)
        features, _ = model.task_features(inputs, read)
        key = dropout_key and dropout_key.fold_in(HEAD_DROPOUT_SITE)
        logits = model.task(dropout(features, model_config.hidden_dropout, key))
        return output, self.student.logits_by_label(logits, batch)

    def _soft_loss(self, student: Float[Array, "B n C"], teacher: Float[Array, "B n C"], batch: Batch) -> WeightedSum:
        """Loss of the soft targets of all labelled examples or tokens; of spans the mean over start and end."""
        weights = has_label(batch["labels"]).astype(jnp.float32)
        if self.head.kind == "span":
            segments, slots = batch["segment_ids"], weights.shape[1]
            student, teacher = (span_logits(x, segments, slots) for x in (student, teacher))
            weights = jnp.broadcast_to(weights[..., None] / 2, student.shape[:-1])
        elif self.student.is_regression:
            return distillation_losses.mse(student, teacher, weights)
        return distillation_losses.soft_targets(student, teacher, weights, self.recipe.temperature)

    def blank_row(self) -> dict[str, np.ndarray]:
        """One row of padding."""
        return self._with_replaced(self.student.blank_row(), 0)

    def batches(self, cursor: Cursor) -> "Generator[HostBatch, None, None]":
        """The batches of the student's task, with the modules that are replaced."""
        with closing(self.student.batches(cursor)) as batches:
            for step, batch in enumerate(batches, cursor.step):
                yield batch._replace(rows=self._with_replaced(batch.rows, step))

    def _with_replaced(self, rows: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
        """The rows of a step, with the draw of its modules if the recipe has replacement."""
        if self.recipe.replacement is None:
            return rows
        rate = self.recipe.replacement.rate_at(step, self.config.total_steps)
        replaced = draw_replaced(self.config.seed, step, rate, self.config.model.num_layers)
        return rows | {REPLACED: np.tile(replaced.astype(np.int32), (len(rows["row"]), 1))}

    def predict(self, rows_of_split: ExampleRows, score: Score, batch_size: int) -> np.ndarray:
        """Logits of the student, as `FineTuning.predict`."""
        return self.student.predict(rows_of_split, score, batch_size)

    def step_flops(self, step: int) -> float:
        """FLOPs of the student's step and, if the loss has a teacher, of its forward pass; with replacement of the
        expected step of the mixed model.
        """
        flops = self.student.step_flops(step)
        if self.recipe.replacement is not None:
            rate = self.recipe.replacement.rate_at(step, self.config.total_steps)
            flops *= rate + (1 - rate) * self.teacher_model.num_layers / self.config.model.num_layers
        if not self.needs_teacher:
            return flops
        rows, seq_len = self.student.row_counts[0], self.config.phases[0].seq_len
        return flops + pretraining_flops(self.teacher_model, rows, seq_len, 0) / 3
