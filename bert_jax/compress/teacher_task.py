"""What all tasks with a teacher share: its parameters, the linear maps, the terms of the loss.

The tree of parameters is that of the student, with the teacher's under ``teacher/`` and the linear maps of matches
under ``projections/``. So teacher and maps are sharded and saved by the same tables, and the student is read from a
checkpoint as the model of any run.
"""

import abc
import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Float, Int, Key, UInt32
from bert_jax.compress import distillation_losses
from bert_jax.compress.matches import Match, Recipe
from bert_jax.config import Config, ModelConfig
from bert_jax.data.cursor import Cursor
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderOutput
from bert_jax.model.heads import Heads
from bert_jax.model.layers import gather_positions, truncated_normal
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.task import Params, Score, Task

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch

TEACHER, PROJECTIONS = "teacher", "projections"
"""Parts of the tree of parameters that are not the student's."""
FROZEN = (rf"{TEACHER}/.*",)
"""For `Phase.frozen`."""
SCORES = "attention.scores"
WEIGHTED = "weighted_"
"""Prefix of a term of the loss: a quantity times its weight. Metrics without it are not multiplied."""
LOSSES = {
    "mse": distillation_losses.mse,
    "normalised_mse": distillation_losses.normalised_mse,
    "cosine": distillation_losses.cosine,
    "similarity": distillation_losses.similarity_mse,
    "standardised_mse": distillation_losses.standardised_mse,
    "mse_of_means": distillation_losses.mse_of_means,
    "variance_l1": distillation_losses.variance_l1,
}


@dataclass(frozen=True)
class TeacherTask(abc.ABC):
    """A student that is trained on its own task and on a teacher. The teacher has no dropout and is not trained."""

    student: Task
    """The task without the teacher. Its phases must freeze `FROZEN`."""
    teacher_model: ModelConfig
    teacher_heads: Heads
    """What the soft targets read of the teacher."""
    recipe: Recipe

    @property
    def config(self) -> Config:
        """Of the student."""
        return self.student.config

    @property
    def phase(self) -> int:
        """Of the student."""
        return self.student.phase

    def in_phase(self, phase: int) -> "TeacherTask":
        """The same task in a phase of the run."""
        return dataclasses.replace(self, student=self.student.in_phase(phase))

    def init_params(self, key: Key[Array, ""]) -> Params:
        """New parameters of student, teacher and maps; `with_teacher` sets those of a trained teacher."""
        student, teacher = self.student.init_params(key), bert.init(self.teacher_model, key, self.teacher_heads)
        return student | {TEACHER: teacher} | init_projections(self.recipe, self.config.model, self.teacher_model, key)

    def with_teacher(self, student: Params, teacher: Params, key: Key[Array, ""]) -> Params:
        """The tree of parameters of given models, with new maps; on the host."""
        maps = init_projections(self.recipe, self.config.model, self.teacher_model, key)
        return student | {TEACHER: teacher} | jax.device_get(maps)

    def prepare(
        self, batch: Batch, seed: UInt32[Array, ""] | None, mask_counts: Int[Array, " n"] | None = None
    ) -> Batch:
        """As the student's task."""
        return self.student.prepare(batch, seed, mask_counts)

    @property
    @abc.abstractmethod
    def task_terms(self) -> tuple[str, ...]:
        """Metrics that are the losses of the student's own task."""

    @property
    def term_weights(self) -> dict[str, float]:
        """Weights of the terms of the loss, by the name of their metric."""
        recipe = self.recipe
        weights = dict.fromkeys(self.task_terms, recipe.task_weight) | {"soft_loss": recipe.soft_weight}
        weights |= {match.name: match.weight for match in recipe.matches}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def needs_teacher(self) -> bool:
        """Whether a term of the loss reads the teacher."""
        return bool(self.term_weights.keys() - set(self.task_terms))

    @property
    def sites(self) -> tuple[str, ...]:
        """Activations that the matches read, besides hidden states."""
        return (SCORES,) if any(match.what == "scores" for match in self.recipe.matches) else ()

    @abc.abstractmethod
    def soft_loss_weight(self, batch: Batch) -> Float[Array, ""]:
        """Number of items that have soft targets."""

    def loss_weight_sums(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Number of labels, and of the items of every match: examples, tokens, or pairs of tokens."""
        items = self.student.loss_weight_sums(batch) | {"soft_loss": self.soft_loss_weight(batch)}
        items |= {match.name: item_weights(match, batch).sum() for match in self.recipe.matches}
        return {f"{WEIGHTED}{name}": items[name] for name in self.term_weights}

    def with_terms(self, sums: dict[str, WeightedSum]) -> dict[str, WeightedSum]:
        """The quantities, and the terms of the loss."""
        terms = {
            f"{WEIGHTED}{name}": WeightedSum(weight * sums[name].sum, sums[name].weight)
            for name, weight in self.term_weights.items()
        }
        return sums | terms

    def match_sums(
        self, params: Params, student: EncoderOutput, teacher: EncoderOutput, batch: Batch
    ) -> dict[str, WeightedSum]:
        """The losses of all matches."""
        maps = params.get(PROJECTIONS, {})
        return {match.name: _match_loss(match, student, teacher, maps, batch) for match in self.recipe.matches}

    def score(self, params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        """As the student's task."""
        return self.student.score(student_of(params), batch)

    def blank_row(self) -> dict[str, np.ndarray]:
        """One row of padding."""
        return self.student.blank_row()

    def batches(self, cursor: Cursor) -> "Generator[HostBatch, None, None]":
        """The batches of the student's task."""
        return self.student.batches(cursor)

    def evaluate(self, score: Score, batch_size: int) -> dict[str, float]:
        """Metrics of the student on the held-out rows."""
        return self.student.evaluate(score, batch_size)


def init_projections(recipe: Recipe, student: ModelConfig, teacher: ModelConfig, key: Key[Array, ""]) -> Params:
    """Linear maps from the student's width to the teacher's, by name; nothing if no match has one."""
    names = sorted({match.project for match in recipe.matches if match.project is not None})
    widths, init = (student.hidden_size, teacher.hidden_size), truncated_normal(student.initializer_range)
    maps = {
        name: {"kernel": init(jax.random.fold_in(key, i), widths), "bias": jnp.zeros(widths[1:], jnp.float32)}
        for i, name in enumerate(names)
    }
    return {PROJECTIONS: maps} if maps else {}


def student_of(params: Params) -> Params:
    """The student's parameters."""
    return {name: part for name, part in params.items() if name not in (TEACHER, PROJECTIONS)}


def item_weights(match: Match, batch: Batch) -> Float[Array, "..."]:
    """1.0 for the items that a match compares: pairs of tokens, examples, or tokens (of `kl`: queries)."""
    if match.loss == "similarity" or (match.what, match.loss) == ("scores", "mse"):
        return distillation_losses.same_example(batch["segment_ids"])
    has_item = batch["example_id"] >= 0 if match.what == "cls" else batch["segment_ids"] > 0
    return has_item.astype(jnp.float32)


def _match_loss(
    match: Match, student: EncoderOutput, teacher: EncoderOutput, maps: dict[str, Any], batch: Batch
) -> WeightedSum:
    weights = item_weights(match, batch)
    if match.what == "scores":
        layers = student.activations[SCORES][match.student_layer], teacher.activations[SCORES][match.teacher_layer]
        if match.loss == "kl":
            return distillation_losses.attention_kl(*layers, distillation_losses.same_example(batch["segment_ids"]))
        return distillation_losses.attention_scores_mse(*layers, weights)
    assert student.hidden_states is not None and teacher.hidden_states is not None
    imitating, target = student.hidden_states[match.student_layer], teacher.hidden_states[match.teacher_layer]
    if match.what == "cls":
        imitating, target = (gather_positions(x, batch["cls_positions"]) for x in (imitating, target))
    if match.project is not None:
        linear = jax.tree.map(lambda x: x.astype(imitating.dtype), maps[match.project])
        imitating = imitating @ linear["kernel"] + linear["bias"][None, None]
    return LOSSES[match.loss](imitating, target, weights)
