"""Our side of the parity report: the JAX model that a conversion reads or writes, in float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.convert.forward import Inputs, Outputs
from bert_jax.model import pretraining
from bert_jax.model.encoder import EncoderInputs

Params = dict[str, Any]


def run(config: ModelConfig, params: Params, inputs: Inputs) -> Outputs:
    """All hidden states and the logits of the heads that the parameters have.

    Values at padded positions mean nothing. Whatever the config trains with, this is float32, the plain attention and
    full matrix products: on accelerators the default product rounds its factors, to three digits on a TPU.
    """
    plain = {"compute_dtype": "float32", "attention": "reference", "remat": "none"}
    model = pretraining.bind(
        dataclasses.replace(config, **plain), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    )
    with jax.default_matmul_precision("highest"):
        output = model.encoder(_batch(inputs), hidden_states=True)
        logits = {"mlm": model.mlm(output.hidden, model.encoder.embeddings.attend)}
        if model.pair is not None:
            logits["pair"] = model.pair(output.pooled)[:, 0]
    pooled_BH = None if output.pooled is None else np.asarray(output.pooled[:, 0])
    return Outputs(
        list(np.asarray(output.hidden_states)),
        {name: np.asarray(values) for name, values in logits.items()},
        pooled_BH=pooled_BH,
    )


def _batch(inputs: Inputs) -> EncoderInputs:
    """One example per row, with [CLS] in front."""
    rows, length = inputs.input_ids_BS.shape
    return EncoderInputs(
        input_ids=jnp.asarray(inputs.input_ids_BS, jnp.int32),
        token_type_ids=jnp.asarray(inputs.token_type_ids_BS, jnp.int32),
        segment_ids=jnp.asarray(inputs.attention_mask_BS, jnp.int32),
        position_ids=jnp.tile(jnp.arange(length, dtype=jnp.int32), (rows, 1)),
        cls_positions=jnp.zeros((rows, 1), jnp.int32),
    )
