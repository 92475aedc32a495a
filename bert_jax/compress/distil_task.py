"""Distillation on the data of a task, as a Task: fine-tuning of a student, with a frozen teacher in its parameters.

The tree of parameters is that of the student, with the teacher's under ``teacher/`` and the linear maps of matches
under ``projections/``. So teacher and maps are sharded and saved by the same tables, and the student is read from a
checkpoint as any fine-tuned model.
"""

import dataclasses
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Bool, Float, Key, UInt32
from bert_jax.compress import losses
from bert_jax.compress.matches import Match, Recipe
from bert_jax.compress.theseus import applied_layers, draw_replaced, mixed_stack
from bert_jax.config import Config, ModelConfig, TaskHead
from bert_jax.data.cursor import Cursor
from bert_jax.finetune.example_rows import ExampleRows
from bert_jax.finetune.finetuning_task import HEAD_DROPOUT_SITE, FineTuning, has_label, span_logits
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs, EncoderOutput
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.layers import DropoutKey, dropout, gather_positions, truncated_normal
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.task import Params, Score

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch

TEACHER, PROJECTIONS = "teacher", "projections"
"""Parts of the tree of parameters that are not the student's."""
FROZEN = (rf"{TEACHER}/.*",)
"""For `Phase.frozen`."""
FROZEN_IN_THESEUS = (*FROZEN, r"encoder/(?!layers/).*", r"task/.*")
"""The same with replaced layers: only the student's layers are trained."""
REPLACED = "replaced"
"""Array of a batch: whether each module is replaced in this step, int32 [B, M], the same in all rows."""
SCORES = "attention.scores"
WEIGHTED = "weighted_"
"""Prefix of a term of the loss: a quantity times its weight. Metrics without it are not multiplied."""
LOSSES = {
    "mse": losses.mse,
    "normalised_mse": losses.normalised_mse,
    "cosine": losses.cosine,
    "similarity": losses.similarity_mse,
}


@dataclass(frozen=True)
class Distillation:
    """A student that is trained on labels and on a teacher. The teacher has no dropout and is not trained."""

    student: FineTuning
    """The task without the teacher. Its phase must freeze `FROZEN`."""
    teacher_model: ModelConfig
    """With the same task head as the student."""
    recipe: Recipe

    @property
    def config(self) -> Config:
        """Of the student."""
        return self.student.config

    @property
    def phase(self) -> int:
        """Of the student."""
        return self.student.phase

    @property
    def head(self) -> TaskHead:
        """The task head."""
        return self.student.head

    def in_phase(self, phase: int) -> "Distillation":
        """The same task in a phase of the run."""
        return dataclasses.replace(self, student=self.student.in_phase(phase))

    def init_params(self, key: Key[Array, ""]) -> Params:
        """New parameters of student, teacher and maps; `with_teacher` sets those of a trained teacher."""
        student, teacher = self.student.init_params(key), bert.init(self.teacher_model, key, self.student.heads)
        return student | {TEACHER: teacher} | self._init_projections(key)

    def with_teacher(self, student: Params, teacher: Params, key: Key[Array, ""]) -> Params:
        """The tree of parameters of given models, with new maps; on the host."""
        return student | {TEACHER: teacher} | jax.device_get(self._init_projections(key))

    def _init_projections(self, key: Key[Array, ""]) -> Params:
        """Linear maps from the student's width to the teacher's, by name; nothing if no match has one."""
        names = sorted({match.project for match in self.recipe.matches if match.project is not None})
        widths = self.config.model.hidden_size, self.teacher_model.hidden_size
        init = truncated_normal(self.config.model.initializer_range)
        maps = {
            name: {"kernel": init(jax.random.fold_in(key, i), widths), "bias": jnp.zeros(widths[1:], jnp.float32)}
            for i, name in enumerate(names)
        }
        return {PROJECTIONS: maps} if maps else {}

    def prepare(self, batch: Batch, seed: UInt32[Array, ""] | None) -> Batch:
        """The same rows."""
        return self.student.prepare(batch, seed)

    @property
    def _term_weights(self) -> dict[str, float]:
        """Weights of the terms of the loss, by the name of their metric."""
        recipe = self.recipe
        weights = {"task_loss": recipe.task_weight, "soft_loss": recipe.soft_weight}
        weights |= {match.name: match.weight for match in recipe.matches}
        return {name: weight for name, weight in weights.items() if weight}

    def loss_weight_sums(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Number of labels, and of the items of every match: examples, tokens, or pairs of tokens."""
        labels = has_label(batch["labels"]).sum(dtype=jnp.float32)
        items = {match.name: _item_weights(match, batch).sum() for match in self.recipe.matches}
        return {f"{WEIGHTED}{name}": items.get(name, labels) for name in self._term_weights}

    def sums(self, params: Params, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
        """Loss and accuracy of the labels, loss of the soft targets and of every match; and the terms of the loss."""
        weights = self._term_weights
        if self.recipe.replacement is None:
            output, logits = self._forward(self.config.model, student_of(params), batch, dropout_key)
        else:
            output, logits = self._mixed_forward(params, batch, dropout_key)
        sums = self.student.logit_sums(logits, batch)
        if self.recipe.replacement is not None:
            sums["replaced_share"] = WeightedSum(batch[REPLACED].mean(dtype=jnp.float32), jnp.ones((), jnp.float32))
        if weights.keys() - {"task_loss"}:
            teacher, teacher_logits = self._forward(self.teacher_model, params[TEACHER], batch, None)
            sums["soft_loss"] = self._soft_loss(logits, teacher_logits, batch)
            maps = params.get(PROJECTIONS, {})
            sums |= {match.name: _match_loss(match, output, teacher, maps, batch) for match in self.recipe.matches}
        terms = {
            f"{WEIGHTED}{name}": WeightedSum(weight * sums[name].sum, sums[name].weight)
            for name, weight in weights.items()
        }
        return sums | terms

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
            sites = (SCORES,) if any(match.what == "scores" for match in self.recipe.matches) else ()
            output = model.encoder(inputs, dropout_key=dropout_key, hidden_states=True, activations=sites, pool=False)
            read = model.task_view(inputs, output)
        elif applied is not None:
            output = model.encoder(inputs, dropout_key=dropout_key, pool=False, applied=applied)
            read = model.task_view(inputs, output)
        else:
            output = read = model.encode(inputs, dropout_key)
        features, _ = model.task_features(inputs, read)
        key = dropout_key and dropout_key.fold_in(HEAD_DROPOUT_SITE)
        return output, model.task(dropout(features, model_config.hidden_dropout, key))

    def _soft_loss(self, student: Float[Array, "B n C"], teacher: Float[Array, "B n C"], batch: Batch) -> WeightedSum:
        """Loss of the soft targets of all labelled examples or tokens; of spans the mean over start and end."""
        weights = has_label(batch["labels"]).astype(jnp.float32)
        if self.head.kind == "span":
            segments, slots = batch["segment_ids"], weights.shape[1]
            student, teacher = (span_logits(x, segments, slots) for x in (student, teacher))
            weights = jnp.broadcast_to(weights[..., None] / 2, student.shape[:-1])
        elif len(self.head.labels) == 1:
            return losses.mse(student, teacher, weights)
        return losses.soft_targets(student, teacher, weights, self.recipe.temperature)

    def score(self, params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        """As `FineTuning.score`, of the student."""
        return self.student.score(student_of(params), batch)

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

    def evaluate(self, score: Score, batch_size: int) -> dict[str, float]:
        """Metrics of the student on all held-out splits."""
        return self.student.evaluate(score, batch_size)

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
        if not self._term_weights.keys() - {"task_loss"}:
            return flops
        rows, seq_len = self.student.row_counts[0], self.config.phases[0].seq_len
        return flops + pretraining_flops(self.teacher_model, rows, seq_len, 0) / 3


def student_of(params: Params) -> Params:
    """The student's parameters."""
    return {name: part for name, part in params.items() if name not in (TEACHER, PROJECTIONS)}


def _item_weights(match: Match, batch: Batch) -> Float[Array, "..."]:
    """1.0 for the items that a match compares: pairs of tokens, examples, or tokens."""
    if match.what == "scores" or match.loss == "similarity":
        return losses.same_example(batch["segment_ids"])
    has_item = batch["example_id"] >= 0 if match.what == "cls" else batch["segment_ids"] > 0
    return has_item.astype(jnp.float32)


def _match_loss(
    match: Match, student: EncoderOutput, teacher: EncoderOutput, maps: dict[str, Any], batch: Batch
) -> WeightedSum:
    weights = _item_weights(match, batch)
    if match.what == "scores":
        layers = student.activations[SCORES][match.student_layer], teacher.activations[SCORES][match.teacher_layer]
        return losses.attention_scores_mse(*layers, weights)
    assert student.hidden_states is not None and teacher.hidden_states is not None
    imitating, target = student.hidden_states[match.student_layer], teacher.hidden_states[match.teacher_layer]
    if match.what == "cls":
        imitating, target = (gather_positions(x, batch["cls_positions"]) for x in (imitating, target))
    if match.project is not None:
        linear = jax.tree.map(lambda x: x.astype(imitating.dtype), maps[match.project])
        imitating = imitating @ linear["kernel"] + linear["bias"][None, None]
    return LOSSES[match.loss](imitating, target, weights)
