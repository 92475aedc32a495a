"""A model for serving: a StableHLO program, which needs jax but not bert_jax, and its weights.

`jax.export.deserialize` reads ``model.stablehlo``: a function of (weights by name, input_ids, token_type_ids,
attention_mask), the last three int32 [batch, length] of any batch and length. It returns a dict of float32
arrays: `hidden` [batch, length, hidden_size], and `mlm`, `pair`, `task` and `pooled` if the model has them.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from jax import export

from bert_jax.array_types import Array
from bert_jax.convert.formats.format import GraphFile, OutputFormat
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.parity import jax_forward
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tokenizer_check import write_native_tokenizer
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError, install_command
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
    def apply(weights: Mapping[str, Array], input_ids: Array, token_type_ids: Array, attention_mask: Array):
        params = map_with_paths(lambda name, leaf: weights[name], model.params)
        outputs = jax_forward.forward(model.config, model.heads, params, input_ids, token_type_ids, attention_mask)
        return {name: values.astype(np.float32) for name, values in outputs.items()}

    return apply


def run(file: Path, model: NativeModel, inputs: ForwardInputs) -> ForwardOutputs:
    """Run the program as a server would; it returns only the last hidden state.

    Args:
      file: the program of `model`, with its weights beside it.
      model: names the outputs.
      inputs: a batch.
    """
    program = export.deserialize(file.read_bytes())
    return jax_forward.name_outputs(model, program.call(safetensors.numpy.load_file(file.with_name(PARAMS)), *inputs))


OUTPUT = OutputFormat(write, PROGRAM, graphs=(GraphFile(PROGRAM, run),))
