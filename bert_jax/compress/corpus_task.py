"""Distillation on a corpus, as a Task: pretraining of a student, with a frozen teacher in its parameters."""

from dataclasses import dataclass

from bert_jax.array_types import Array, Float
from bert_jax.compress import distillation_losses
from bert_jax.compress.teacher_task import TEACHER, TeacherTask, student_of
from bert_jax.model import bert
from bert_jax.model.bert import BertModel
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.encoder import EncoderInputs, EncoderOutput
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.layers import gather_positions
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.pretraining_task import Pretraining, heads_of
from bert_jax.training.task import Params


@dataclass(frozen=True)
class CorpusDistillation(TeacherTask):
    """A student that is trained on the objectives of pretraining and on a teacher.

    Soft targets are the teacher's distributions over the vocabulary at the masked positions (Sanh et al. 2019,
    section 2). Both models read the same masked rows.
    """

    student: Pretraining

    @property
    def task_terms(self) -> tuple[str, ...]:
        """Metrics that are the losses of the objectives."""
        return tuple(f"{name}_loss" for name in self.student.objectives)

    def soft_loss_weight(self, batch: Batch) -> Float[Array, ""]:
        """Number of predicted tokens."""
        return batch["target_weights"].sum()

    def sums(self, params: Params, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
        """Loss and accuracy of the objectives, loss of the soft targets and of every match; the terms of the loss."""
        heads, model_config = heads_of(self.config), self.student.model_config
        model = bert.model_from_params(model_config, heads, student_of(params))
        output, predicted = self._encode(model, batch, dropout_key)
        sums: dict[str, WeightedSum] = {}
        for name, objective in self.student.objectives.items():
            sums |= objective.sums(name, model, predicted, batch)
        if self.needs_teacher:
            teacher = bert.model_from_params(self.teacher_model, self.teacher_heads, params[TEACHER])
            target, target_predicted = self._encode(teacher, batch, None)
            if self.recipe.soft_weight:
                logits = _token_logits(model, predicted), _token_logits(teacher, target_predicted)
                weights, temperature = batch["target_weights"], self.recipe.temperature
                sums["soft_loss"] = distillation_losses.soft_targets(*logits, weights, temperature)
            sums |= self.match_sums(params, output, target, batch)
        return self.with_terms(sums)

    def _encode(
        self, model: BertModel, batch: Batch, dropout_key: DropoutKey | None
    ) -> tuple[EncoderOutput, EncoderOutput]:
        """Output of an encoder with what the matches read, and the same at the positions of the predicted tokens."""
        inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
        positions = batch["target_positions"]
        if not self.recipe.matches:
            output = model.encoder(inputs, dropout_key=dropout_key, positions=positions)
            return output, output
        output = model.encoder(inputs, dropout_key=dropout_key, hidden_states=True, activations=self.sites)
        return output, output._replace(hidden=gather_positions(output.hidden, positions))

    def step_flops(self, step: int) -> float:
        """FLOPs of the student's step and, if the loss has a teacher, of its forward pass."""
        flops = self.student.step_flops(step)
        if not self.needs_teacher:
            return flops
        index, done = self.config.locate_step(step)
        phase = self.config.phases[index]
        predictions = 0
        if self.recipe.soft_weight:
            predictions = sum(one.predictions(self.config, index) for one in self.student.objectives.values())
        return flops + pretraining_flops(self.teacher_model, phase.batch_size_at(done), phase.seq_len, predictions) / 3


def _token_logits(model: BertModel, output: EncoderOutput) -> Float[Array, "B M V"]:
    return model.mlm(output.hidden, model.encoder.embeddings.word[...])
