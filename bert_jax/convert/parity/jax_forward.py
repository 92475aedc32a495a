"""Our side of the parity report: the JAX model that a conversion reads or writes, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.convert.forward_io import ForwardInputs, ForwardOutputs, Task
from bert_jax.convert.translate import NativeModel
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.shapes import Array, Float, Int

TASKS = {
    "classification": Task.SEQUENCE,
    "tagging": Task.TOKENS,
    "span": Task.SPAN,
    "replaced": Task.REPLACED,
}


def run(native_model: NativeModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All hidden states and the logits of the heads that the model has.

    Values at padded positions mean nothing. Whatever the config trains with, this is float32, the plain attention and
    full matrix products: on accelerators the default product rounds its factors, to three digits on a TPU.
    """
    _, config, heads, params = native_model
    plain = dataclasses.replace(config, compute_dtype="float32", attention="reference", remat="none")
    model = bert.bind(plain, heads, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
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
    """A task's logits as transformers shapes them, of rows with one example each."""
    return logits[:, 0] if kind == "classification" else logits[..., 0] if kind == "replaced" else logits


def whole_rows(
    input_ids: Int[Array, "B S"], token_type_ids: Int[Array, "B S"], attention_mask: Int[Array, "B S"]
) -> EncoderInputs:
    """What an encoder reads if each row is one example with [CLS] in front."""
    rows, length = input_ids.shape
    return EncoderInputs(
        input_ids=input_ids,
        token_type_ids=token_type_ids,
        segment_ids=attention_mask,
        position_ids=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (rows, length)),
        cls_positions=jnp.zeros((rows, 1), jnp.int32),
    )
