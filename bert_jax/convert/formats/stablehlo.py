"""A model for serving: a StableHLO program, which needs jax but not bert_jax, and its weights.

`jax.export.deserialize` reads ``model.stablehlo``: a function of (weights by name, input_ids, token_type_ids,
attention_mask), the last three int32 [batch, length] of any batch and length. It returns a dict of float32
arrays: `hidden` [batch, length, hidden_size], and `mlm`, `pair`, `task` and `pooled` if the model has them.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from jax import export

from bert_jax.convert.formats.format import OutputFormat
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.parity.jax_forward import select_task, whole_rows
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tokenizer_check import write_native_tokenizer
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError, install_command
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.shapes import Array
from bert_jax.training.param_paths import map_with_paths, name_leaves

PROGRAM, PARAMS = "model.stablehlo", "params.safetensors"
PLATFORMS = ("cpu", "cuda", "tpu")


def write(source_model: SourceModel, directory: Path) -> None:
    """Write program, weights and tokenizer into an existing directory.

    Raises:
      UserError: the package flatbuffers is missing.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError(f"stablehlo needs the package flatbuffers, which is missing: {install_command('serving')}")
    model = source_model.model
    leaves = {name: np.ascontiguousarray(leaf, np.float32) for name, leaf in name_leaves(model.params).items()}
    safetensors.numpy.save_file(leaves, directory / PARAMS)
    weights = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    max_positions = model.config.max_positions
    batch, length = export.symbolic_shape(
        "batch, length", constraints=["batch >= 1", f"length <= {max_positions}", "length >= 1"]
    )
    ids = jax.ShapeDtypeStruct((batch, length), np.int32)
    program = export.export(jax.jit(_function(model)), platforms=PLATFORMS)(weights, ids, ids, ids)
    (directory / PROGRAM).write_bytes(program.serialize())
    write_native_tokenizer(source_model, directory)


def _function(model: NativeModel):
    # As in the parity report, whatever the run was trained with.
    config = dataclasses.replace(model.config, attention="reference", remat="none", compute_dtype="float32")
    heads, shapes = model.heads, model.params

    def apply(weights: Mapping[str, Array], input_ids: Array, token_type_ids: Array, attention_mask: Array):
        bound = bert.merge_params(config, heads, map_with_paths(lambda name, leaf: weights[name], shapes))
        batch = whole_rows(input_ids, token_type_ids, attention_mask)
        with jax.default_matmul_precision("highest"):
            return results(bound, batch)

    def results(bound: bert.BertModel, batch: EncoderInputs) -> dict[str, Array]:
        output = bound.encoder(batch)
        outputs = {"hidden": output.hidden}
        if output.pooled is not None:
            outputs["pooled"] = output.pooled[:, 0]
        if bound.mlm is not None:
            outputs["mlm"] = bound.mlm(output.hidden, bound.encoder.embeddings.attend)
        if bound.pair is not None:
            outputs["pair"] = bound.pair(output.pooled)[:, 0]
        if heads.task is not None:
            logits = bound.task_logits(batch, output)
            outputs["task"] = select_task(heads.task.kind, logits)
        return {name: values.astype(np.float32) for name, values in outputs.items()}

    return apply


def run(directory: Path, inputs: ForwardInputs) -> ForwardOutputs:
    """Run the program as a server would; it returns only the last hidden state."""
    program = export.deserialize((directory / PROGRAM).read_bytes())
    outputs = program.call(safetensors.numpy.load_file(directory / PARAMS), *inputs)
    arrays = {name: np.asarray(values) for name, values in outputs.items()}
    logits = {name: arrays[name] for name in ("mlm", "pair", "task") if name in arrays}
    return ForwardOutputs([arrays["hidden"]], logits, pooled_BH=arrays.get("pooled"))


OUTPUT = OutputFormat(write, PROGRAM)
