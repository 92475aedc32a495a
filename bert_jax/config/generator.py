"""The generator of replaced-token detection: a model whose shape follows from the discriminator's."""

import dataclasses

from bert_jax.config.sections import KERNEL_ROW_LENGTHS, ModelConfig, ObjectiveConfig
from bert_jax.errors import UserError, require


def generator_model(model: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
    """The generator of a discriminator.

    Width, number of heads and feed-forward width are the given share of the discriminator's, the embeddings as wide as
    its embeddings, with a projection to the width of the layers (google-research/electra, get_generator_config).

    Args:
      model: the discriminator.
      objective: with `generator_width` and `generator_layers`.

    Raises:
      UserError: the discriminator has layers that cannot be scaled, or the share gives a width that the heads do not
        divide.
    """
    require(
        model.bottleneck_size is None and model.embeddings == "tokens",
        "objective.token 'rtd' has no generator for models with bottlenecks or trigram embeddings (MobileBERT): set "
        "objective.token mlm",
    )
    share = objective.generator_width
    width, heads = round(share * model.hidden_size), max(1, round(share * model.num_heads))
    require(
        width > 0 and width % heads == 0 and (model.positions == "learned" or width // heads % 2 == 0),
        f"objective.generator_width {share:g} gives a generator of width {width} with {heads} head(s), which do not "
        f"divide it evenly: use a width for which they do, e.g. {1 / model.num_heads:.4g} or 1",
    )
    shape = {
        "hidden_size": width,
        "num_heads": heads,
        "head_size": None,
        "intermediate_size": max(1, round(share * model.intermediate_size)),
        "num_layers": objective.generator_layers or model.num_layers,
        "embedding_size": None if model.embedding_width == width else model.embedding_width,
    }
    try:
        return dataclasses.replace(model, **shape)
    except UserError:
        if model.attention not in KERNEL_ROW_LENGTHS:
            raise
    # Heads of these sizes have no kernel.
    return dataclasses.replace(model, **shape, attention="reference")
