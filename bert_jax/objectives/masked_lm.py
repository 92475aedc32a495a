"""Masked language modelling (Devlin et al. 2019, section 3.1): masked tokens are predicted."""

import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Int, UInt32
from bert_jax.config import Config, ObjectiveConfig
from bert_jax.model.dropout import hash_combine
from bert_jax.objectives.losses import Objective, mlm_head_sums
from bert_jax.objectives.masking import Batch, Vocabulary, mask_tokens, prediction_counts_by_length

MASK_STREAM, EVALUATION_STREAM = 0x3A5, 0xE7A1
EVALUATION_MASKS = ObjectiveConfig(mask_rate=0.15)
"""The same for all runs, so that held-out metrics of runs with different mask rates are comparable."""


def prepare(
    batch: Batch,
    config: Config,
    phase: int,
    vocabulary: Vocabulary,
    seed: UInt32[Array, ""] | None,
    mask_counts: Int[Array, " n"] | None,
    evaluation_masks: ObjectiveConfig = EVALUATION_MASKS,
) -> Batch:
    """Mask tokens; in evaluation (seed None) always 15 % and the same masks, whatever the run's rate and seed."""
    if seed is None:
        return mask_tokens(batch, mask_key(seed), evaluation_masks, vocabulary)
    objective, max_predictions = config.objective_of(phase), config.phases[phase].max_predictions
    return mask_tokens(batch, mask_key(seed), objective, vocabulary, max_predictions, mask_counts)


def mask_key(seed: UInt32[Array, ""] | None) -> UInt32[Array, ""]:
    """The key of a run's masks; in evaluation (seed None) that of all runs."""
    return hash_combine(jnp.uint32(0), EVALUATION_STREAM) if seed is None else hash_combine(seed, MASK_STREAM)


def mask_counts_at(config: Config, step: int) -> Int[np.ndarray, " n"] | None:
    """`prediction_counts_by_length` in step `step` of a run, counted from 0; None in a phase of constant mask rate."""
    phase, within = config.locate_step(step)
    settings = config.phases[phase]
    if settings.end_mask_rate is None:
        return None
    return prediction_counts_by_length(config.mask_rate_at(phase, within), settings.seq_len, settings.max_predictions)


def predictions_per_example(config: Config, phase: int) -> int:
    """Predicted positions of a row that is one example, at the phase's largest mask rate."""
    settings, rate = config.phases[phase], config.objective_of(phase).mask_rate
    return int(prediction_counts_by_length(rate, settings.seq_len, settings.max_predictions)[-1])


OBJECTIVE = Objective(
    is_active=lambda model, objective: model.direction == "bidirectional" and objective.token == "mlm",
    prepare=prepare,
    weight=lambda batch: batch["target_weights"].sum(),
    sums=mlm_head_sums,
    predicts_tokens=True,
    predictions=predictions_per_example,
)
