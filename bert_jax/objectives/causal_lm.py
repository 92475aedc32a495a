"""Causal language modelling: every token of an example except the last predicts its successor."""

import jax.numpy as jnp

from bert_jax.objectives.losses import Objective, mlm_head_sums
from bert_jax.objectives.masking import Batch


def add_next_token_targets(batch: Batch) -> Batch:
    """Targets of a causal model: every token of an example except the last predicts its successor.

    [SEP] is predicted like any other token; [CLS] is not predicted, because it is the first token of its example.

    Args:
      batch: input_ids, segment_ids [B, S].

    Returns:
      the batch with target_positions, target_labels [B, S - 1] int32 and target_weights [B, S - 1] float32,
      with the meaning that `mask_tokens` gives them: weight 1 if position and label belong to one example, else 0.
    """
    input_ids, segment_ids = batch["input_ids"], batch["segment_ids"]
    labels = input_ids[:, 1:]
    positions = jnp.arange(labels.shape[1], dtype=jnp.int32)
    same_example = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return {
        **batch,
        "target_positions": jnp.broadcast_to(positions[None], labels.shape),
        "target_labels": labels,
        "target_weights": same_example.astype(jnp.float32),
    }


OBJECTIVE = Objective(
    is_active=lambda model, objective: model.direction == "causal",
    prepare=lambda batch, *rest: add_next_token_targets(batch),
    weight=lambda batch: batch["target_weights"].sum(),
    sums=mlm_head_sums,
    predicts_tokens=True,
    predictions=lambda config, phase: config.phases[phase].seq_len - 1,
)
