"""The table of objectives, and the terms of a run's loss."""

from collections.abc import Mapping
from typing import NamedTuple

from bert_jax.config import ModelConfig, ObjectiveConfig
from bert_jax.model.bert import BertModel
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.encoder import EncoderInputs
from bert_jax.objectives import causal_lm, masked_lm, replaced_tokens, sentence_pair
from bert_jax.objectives.losses import Objective, WeightedSum
from bert_jax.objectives.masking import Batch

OBJECTIVES: dict[str, Objective] = {
    "mlm": masked_lm.OBJECTIVE,
    "causal": causal_lm.OBJECTIVE,
    "generator": replaced_tokens.GENERATOR_OBJECTIVE,
    "rtd": replaced_tokens.DISCRIMINATOR_OBJECTIVE,
    "pair": sentence_pair.OBJECTIVE,
}
"""By the prefix of its metrics."""
TOKEN_OBJECTIVES = [name for name, objective in OBJECTIVES.items() if objective.predicts_tokens]
GENERATOR_SITE = 0x6E2
"""Of the generator's dropout."""


class Models(NamedTuple):
    """The models of a run."""

    model: BertModel
    generator: BertModel | None = None
    """Of replaced-token detection, whose discriminator is `model`."""


def active_objectives(model: ModelConfig, objective: ObjectiveConfig) -> dict[str, Objective]:
    """The objectives of a run; the loss is the sum of their mean losses times their weights."""
    return {name: one for name, one in OBJECTIVES.items() if one.is_active(model, objective)}


def pretraining_sums(
    objectives: Mapping[str, Objective], models: Models, batch: Batch, dropout_key: DropoutKey | None
) -> dict[str, WeightedSum]:
    """Sums of all objectives over prepared rows."""
    model, generator = models
    sums: dict[str, WeightedSum] = {}
    positions = batch["target_positions"]
    if generator is not None:
        site = dropout_key and dropout_key.fold_in(GENERATOR_SITE)
        output = generator.encoder(_inputs(batch), dropout_key=site, positions=positions)
        for name, objective in objectives.items():
            if objective.of_generator:
                sums |= objective.sums(name, generator, output, batch)
        batch, positions = replaced_tokens.replace_tokens(generator, output, batch), None
    output = model.encoder(_inputs(batch), dropout_key=dropout_key, positions=positions)
    for name, objective in objectives.items():
        if not objective.of_generator:
            sums |= objective.sums(name, model, output, batch)
    return sums


def _inputs(batch: Batch) -> EncoderInputs:
    return EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
