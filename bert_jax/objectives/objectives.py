"""The table of objectives, and the terms of a run's loss."""

from collections.abc import Mapping

from bert_jax.config import ModelConfig, ObjectiveConfig
from bert_jax.model.bert import BertModel
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.encoder import EncoderInputs
from bert_jax.objectives import causal_lm, masked_lm, sentence_pair
from bert_jax.objectives.losses import Objective, WeightedSum
from bert_jax.objectives.masking import Batch

OBJECTIVES: dict[str, Objective] = {
    "mlm": masked_lm.OBJECTIVE,
    "causal": causal_lm.OBJECTIVE,
    "pair": sentence_pair.OBJECTIVE,
}
"""By the prefix of its metrics."""
TOKEN_OBJECTIVES = [name for name, objective in OBJECTIVES.items() if objective.predicts_tokens]


def active_objectives(model: ModelConfig, objective: ObjectiveConfig) -> dict[str, Objective]:
    """The objectives of a run; the loss is the sum of their mean losses."""
    return {name: one for name, one in OBJECTIVES.items() if one.is_active(model, objective)}


def pretraining_sums(
    objectives: Mapping[str, Objective], model: BertModel, batch: Batch, dropout_key: DropoutKey | None
) -> dict[str, WeightedSum]:
    """Sums of all objectives over prepared rows."""
    inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
    output = model.encoder(inputs, dropout_key=dropout_key, positions=batch["target_positions"])
    sums: dict[str, WeightedSum] = {}
    for name, objective in objectives.items():
        sums |= objective.sums(name, model, output, batch)
    return sums
