"""Pretraining as a Task: masked tokens, sentence pairs, and a held-out split with fixed masks.

Needs no reader and no corpus to be compiled and timed, only to be fed (pretraining.py opens both).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from bert_jax import objectives
from bert_jax.config import Config, ObjectiveConfig
from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from bert_jax.model import pretraining
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.layers import Noise, fold
from bert_jax.objectives import Batch, Sum, Vocabulary
from bert_jax.shapes import Array, Float, Key
from bert_jax.training.task import Params, Score

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch, Stream

MASK_STREAM, EVALUATION_STREAM = 0x3A5, 0xE7A1
EVALUATION_MASKS = ObjectiveConfig(mask_rate=0.15)
"""Held-out figures of runs with other mask rates stay comparable."""


@dataclass(frozen=True)
class Pretraining:
    """MLM with dynamic masking, and next-sentence prediction unless the config switches it off."""

    config: Config
    vocabulary: Vocabulary
    train: "Stream | None" = None
    """None: the task can be compiled but not fed."""
    validation: "Stream | None" = None

    def init_params(self, key: Key[Array, ""]) -> Params:
        """Fresh parameters of encoder and heads."""
        return pretraining.init(self.config.model, key, pair=self.config.objective.pair != "none")

    def prepare(self, batch: Batch, *, evaluating: bool) -> Batch:
        """Mask tokens; when evaluating, always 15 % and always the same, whatever the run's rate and seed."""
        if evaluating:
            key, objective = fold(jnp.uint32(0), EVALUATION_STREAM), EVALUATION_MASKS
        else:
            key, objective = fold(jnp.uint32(self.config.seed), MASK_STREAM), self.config.objective
        return objectives.mask_tokens(batch, key, objective, self.vocabulary)

    def loss_weights(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Predicted tokens, and sentence pairs."""
        return objectives.loss_weights(batch, self.config.objective)

    def sums(self, params: Params, batch: Batch, noise: Noise | None) -> dict[str, Sum]:
        """MLM and pair loss and accuracy, and the number of real tokens."""
        model = pretraining.bind(self.config.model, params)
        return objectives.pretraining_sums(model, batch, noise)

    def batches(self, cursor: Cursor) -> "Iterator[HostBatch]":
        """The training stream."""
        assert self.train is not None
        return self.train.read(cursor)

    def step_flops(self, step: int) -> float:
        """FLOPs of the model in update `step`: forward and backward, MLM head on the gathered positions only."""
        end = 0
        for phase in self.config.phases:
            end += phase.steps
            if step < end:
                break
        predictions = int(objectives.prediction_counts(self.config.objective.mask_rate, phase.seq_len)[-1])
        return pretraining_flops(self.config.model, phase.batch_size, phase.seq_len, predictions)

    def evaluate(self, score: Score) -> dict[str, float]:
        """Held-out MLM and pair metrics, beside a unigram model on the very same masked positions.

        Rows have the length of the last phase. The unigram model knows how often each token occurs in the
        training split, plus one.

        Raises:
          UserError: the validation split has no rows.
        """
        assert self.train is not None and self.validation is not None
        settings, seq_len = self.config.evaluation, self.config.phases[-1].seq_len
        rows = min(settings.rows, len(self.validation.plan(seq_len, 0)))
        if not rows:
            raise UserError(f"corpus {self.validation.corpus.directory}: its validation split has no rows to score")
        counts = np.asarray(self.train.corpus.token_counts, np.float64) + 1.0
        unigram = np.log(counts / counts.sum())
        totals: dict[str, np.ndarray] = {}
        for start in range(0, rows, settings.batch_size):
            batch = self.validation.rows_of_epoch(seq_len, 0, start, start + settings.batch_size, limit=rows)
            masked, sums = score(batch)
            labels, weights = masked["masked_labels"], masked["masked_weights"]
            sums["unigram_loss"] = (-(unigram[labels] * weights).sum(), weights.sum())
            sums["unigram_accuracy"] = (((labels == unigram.argmax()) * weights).sum(), weights.sum())
            for name, pair in sums.items():
                totals[name] = totals.get(name, 0.0) + np.asarray(pair, np.float64)
        return {name: float(total / max(weight, 1.0)) for name, (total, weight) in sorted(totals.items())}
