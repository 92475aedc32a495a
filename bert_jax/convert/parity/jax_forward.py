"""The forward pass of bert_jax in float32, for the parity report and for exported programs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Int
from bert_jax.config import ModelConfig
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs, name_states
from bert_jax.convert.translate import NativeModel
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads


def run(native_model: NativeModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All outputs. Values at padded positions have no meaning."""
    _, config, heads, params = native_model
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return name_outputs(native_model, _compiled(config, heads, params, *map(jnp.asarray, inputs), hidden_states=True))


def name_outputs(native_model: NativeModel, outputs: Mapping[str, Array]) -> ForwardOutputs:
    """Outputs of `forward` by their names in the report; `hidden` may have the last layer alone."""
    arrays = {name: np.asarray(values) for name, values in outputs.items()}
    states = arrays["hidden"] if arrays["hidden"].ndim == 4 else arrays["hidden"][None]
    named = name_states(states, native_model.config.num_layers + 1 - len(states))
    task = native_model.heads.task
    if task is not None and task.kind == "replaced":
        arrays["task"] = arrays["task"][..., None]
    named |= {f"{name} logits": arrays[name] for name in ("mlm", "pair", "task") if name in arrays}
    return named | ({"pooled vector": arrays["pooled"]} if "pooled" in arrays else {})


def forward(
    config: ModelConfig,
    heads: Heads,
    params: Any,
    input_ids: Int[Array, "B S"],
    token_type_ids: Int[Array, "B S"],
    attention_mask: Int[Array, "B S"],
    *,
    hidden_states: bool = False,
) -> dict[str, Array]:
    """Outputs by name: `hidden` [B, S, H]; `pooled`, `mlm`, `pair` and `task` as in `ForwardOutputs`, if they exist
    (but `task` is [B, S] for replaced tokens).

    Whatever the config says, this uses float32, the reference attention and full precision of matrix products: by
    default, accelerators round the factors, to three digits on a TPU.

    Args:
      config, heads, params: of the model; float32.
      input_ids, token_type_ids, attention_mask: as in `ForwardInputs`.
      hidden_states: `hidden` is [L + 1, B, S, H]: the embeddings, and the output of every layer.
    """
    plain = {"compute_dtype": "float32", "dense_dtype": "compute", "attention": "reference", "remat": "none"}
    config = dataclasses.replace(config, **plain)
    model, batch = bert.model_from_params(config, heads, params), whole_rows(input_ids, token_type_ids, attention_mask)
    if config.position_offset:
        batch = batch._replace(position_ids=_counted_positions(attention_mask))
    with jax.default_matmul_precision("highest"):
        mixes = heads.task is not None and heads.task.mix
        output = model.encoder(batch, hidden_states=hidden_states or mixes)
        outputs = {"hidden": output.hidden_states if hidden_states else output.hidden}
        if output.pooled is not None:
            outputs["pooled"] = output.pooled[:, 0]
        if model.mlm is not None:
            outputs["mlm"] = model.mlm(output.hidden, model.encoder.embeddings.decoder_table())
        if model.pair is not None:
            outputs["pair"] = model.pair(output.pooled)[:, 0]
        if heads.task is not None:  # in the shape of transformers, for rows with one example each
            # The report encodes again, as in fine-tuning, where the last layer may compute [CLS] only; a program whose
            # length is free cannot tell whether that is less.
            encoded = model.encode(batch) if hidden_states else model.task_view(batch, output)
            logits = model.task_logits(batch, encoded)
            by_token, replaced = heads.task.reads == "tokens", heads.task.kind == "replaced"
            outputs["task"] = logits[..., 0] if replaced else logits if by_token else logits[:, 0]
    return outputs


_compiled = jax.jit(forward, static_argnums=(0, 1), static_argnames="hidden_states")


def whole_rows(
    input_ids: Int[Array, "B S"], token_type_ids: Int[Array, "B S"], attention_mask: Int[Array, "B S"]
) -> EncoderInputs:
    """The encoder's inputs if each row is one example that begins with [CLS]."""
    rows, length = input_ids.shape
    return EncoderInputs(
        input_ids=input_ids,
        token_type_ids=token_type_ids,
        segment_ids=attention_mask,
        position_ids=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (rows, length)),
        cls_positions=jnp.zeros((rows, 1), jnp.int32),
    )


def _counted_positions(attention_mask: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Positions as RoBERTa counts them, so that padding may be on either side: -1 at padding, 0 at the first token.

    transformers takes the mask from the padding ids (create_position_ids_from_input_ids in modeling_roberta.py).
    """
    return jnp.cumsum(attention_mask, 1) * attention_mask - 1
