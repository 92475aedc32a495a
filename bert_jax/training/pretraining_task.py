"""Pretraining as a Task: masked tokens, sentence pairs, and a held-out split with fixed masks.

Compiling and timing the step needs no corpus; training does (pretraining.py opens it).
"""

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.array_types import Array, Float, Int, Key, UInt32
from bert_jax.config import Config, ModelConfig
from bert_jax.data.batch import empty_rows
from bert_jax.data.cursor import Cursor
from bert_jax.model import bert
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.generator import ModelSpec, discriminator_params, generator_heads, generator_params
from bert_jax.model.heads import Heads
from bert_jax.objectives.losses import Z_LOSS, Objective, WeightedSum
from bert_jax.objectives.masking import Batch, Vocabulary
from bert_jax.objectives.objectives import Models, active_objectives, pretraining_sums
from bert_jax.training.eval_metrics import EvaluationSums
from bert_jax.training.task import Params, Score

if TYPE_CHECKING:
    from bert_jax.data.batches import HeldOutRows, HostBatch, TrainingStream


@dataclass(frozen=True)
class Pretraining:
    """The objectives of a config (`objectives.OBJECTIVES`) on a mixture of corpora."""

    config: Config
    vocabulary: Vocabulary
    train: "TrainingStream | None" = None
    """None: the task can be compiled but has no training data."""
    validation: "HeldOutRows | None" = None
    phase: int = -1

    def in_phase(self, phase: int) -> "Pretraining":
        """The same task in a phase of the run."""
        return dataclasses.replace(self, phase=phase)

    @property
    def model_config(self) -> ModelConfig:
        """The model in the phase (`Config.model_of`)."""
        return self.config.model_of(self.phase)

    def init_params(self, key: Key[Array, ""]) -> Params:
        """New parameters of encoder and heads, and of a generator."""
        return model_spec(self.config, self.phase).init(key)

    @property
    def objectives(self) -> dict[str, Objective]:
        """The terms of the loss, by name."""
        return active_objectives(self.model_config, self.config.objective)

    def prepare(
        self, batch: Batch, seed: UInt32[Array, ""] | None, mask_counts: Int[Array, " n"] | None = None
    ) -> Batch:
        """Add the targets of all objectives, e.g. mask tokens."""
        for objective in self.objectives.values():
            batch = objective.prepare(batch, self.config, self.phase, self.vocabulary, seed, mask_counts)
        return batch

    def loss_weight_sums(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Weight of each loss term, e.g. the number of predicted tokens, divided by the term's factor in the loss."""
        settings, terms = self.config.objective, {}
        for name, one in self.objectives.items():
            terms[f"{name}_loss"] = one.weight(batch) / one.loss_weight(settings)
            if settings.z_loss and one.predicts_tokens:
                terms[f"{name}_{Z_LOSS}"] = terms[f"{name}_loss"] / settings.z_loss
        return terms

    def sums(self, params: Params, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
        """Loss and accuracy of all objectives."""
        sums = pretraining_sums(self.objectives, self.models(params), batch, dropout_key)
        return {name: one for name, one in sums.items() if self.config.objective.z_loss or not name.endswith(Z_LOSS)}

    def models(self, params: Params) -> Models:
        """The model and, for replaced-token detection, its generator."""
        model, heads, generator, embeddings = model_spec(self.config, self.phase)
        if generator is None:
            return Models(bert.model_from_params(model, heads, params))
        of_both = discriminator_params(params, embeddings), generator_params(params, embeddings)
        return Models(
            bert.model_from_params(model, heads, of_both[0]),
            bert.model_from_params(generator, generator_heads(generator), of_both[1]),
        )

    def score(self, params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        """The rows with their targets, and their sums."""
        return batch, self.sums(params, batch, None)

    def blank_row(self) -> dict[str, np.ndarray]:
        """One row of padding, with all arrays of the stream."""
        seq_len = self.config.phases[self.phase].seq_len
        return empty_rows(1, seq_len, self.config.data.max_examples_per_row(seq_len), 0)

    def batches(self, cursor: Cursor) -> "Generator[HostBatch, None, None]":
        """The training stream."""
        assert self.train is not None
        return self.train.batches(cursor)

    def step_flops(self, step: int) -> float:
        """FLOPs of the model in step `step`."""
        i, done = self.config.locate_step(step)
        return train_step_flops(self.config, i, self.config.phases[i].batch_size_at(done))

    def evaluate(self, score: Score, batch_size: int) -> dict[str, float]:
        """Held-out token and pair metrics, with those of a unigram model on the same targets.

        Rows have the length of the last phase. With several corpora, every metric is also reported for each, as
        ``mlm_loss/NAME``, from `evaluation.rows` rows of each.
        """
        assert self.train is not None and self.validation is not None
        settings, seq_len = self.config.evaluation, self.config.phases[-1].seq_len
        counts = sum(np.asarray(rows.corpus.token_counts, np.float64) for rows in self.train.corpora)
        totals: dict[str, EvaluationSums] = {}
        for name, batch in self.validation.batches(seq_len, settings.rows, batch_size):
            prepared, sums = score(batch)
            totals.setdefault(name, EvaluationSums(counts, self.train.special_ids.sep_id)).add(prepared, sums)
        metrics = EvaluationSums.merge(totals.values()).means()
        if len(totals) > 1:
            for name, one in totals.items():
                metrics |= {f"{metric}/{name}": value for metric, value in one.means().items()}
        return metrics


def heads_of(config: Config) -> Heads:
    """The heads of the model in pretraining, or in fine-tuning if the config has a section for it."""
    if config.finetune is not None:
        return Heads(mlm=False, task=config.finetune.head)
    heads: dict[str, Any] = {}
    for objective in active_objectives(config.model, config.objective).values():
        heads |= objective.heads(config.model)
    return Heads(**heads)


def model_spec(config: Config, phase: int) -> ModelSpec:
    """What a run's parameters in a phase depend on."""
    generator = config.generator_of(phase)
    return ModelSpec(config.model_of(phase), heads_of(config), generator, config.objective.generator_embeddings)


def train_step_flops(config: Config, phase: int, rows: int) -> float:
    """FLOPs of the model, and of its generator, in a step of a phase: forward and backward, MLM head at the predicted
    positions only.
    """
    main, generator = config.model_of(phase), config.generator_of(phase)
    objectives = active_objectives(main, config.objective).values()
    seq_len, flops = config.phases[phase].seq_len, 0.0
    for model, of_generator in ((main, False), (generator, True)):
        if model is not None:
            terms = (one for one in objectives if one.of_generator == of_generator)
            predictions = sum(objective.predictions(config, phase) for objective in terms)
            flops += pretraining_flops(model, rows, seq_len, predictions)
    return flops
