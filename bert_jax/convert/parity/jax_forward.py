"""The forward pass of bert_jax for the parity report, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs, TaskKind
from bert_jax.convert.translate import NativeModel
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.shapes import Array, Float, Int

TASKS = {
    "classification": TaskKind.SEQUENCE,
    "tagging": TaskKind.TOKENS,
    "span": TaskKind.SPAN,
    "replaced": TaskKind.REPLACED,
}


def run(native_model: NativeModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All hidden states and the logits of the heads that the model has.

    Values at padded positions have no meaning. Whatever the config says, this uses float32, the reference attention and
    full precision of matrix products: by default, accelerators round the factors, to three digits on a TPU.
    """
    _, config, heads, params = native_model
    reference_config = dataclasses.replace(config, compute_dtype="float32", attention="reference", remat="none")
    model = bert.merge_params(reference_config, heads, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
    batch, logits, task = whole_rows(*map(jnp.asarray, inputs)), {}, None
    with jax.default_matmul_precision("highest"):
        output = model.encoder(batch, hidden_states=True)
        if model.mlm is not None:
            logits["mlm"] = model.mlm(output.hidden, model.encoder.embeddings.attend)
        if model.pair is not None:
            logits["pair"] = model.pair(output.pooled)[:, 0]
        if heads.task is not None:
            task = TASKS[heads.task.kind]
            logits["task"] = select_task(heads.task.kind, model.task_logits(batch, output))
    pooled_BH = None if output.pooled is None else np.asarray(output.pooled[:, 0])
    return ForwardOutputs(
        list(np.asarray(output.hidden_states)),
        {name: np.asarray(values) for name, values in logits.items()},
        task,
        pooled_BH,
    )


def select_task(kind: str, logits: Float[Array, "B n C"]) -> Float[Array, "B ..."]:
    """A task's logits in the shape of transformers, for rows with one example each."""
    return logits[:, 0] if kind == "classification" else logits[..., 0] if kind == "replaced" else logits


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
