"""A directory for ONNX Runtime: ``onnx/model.onnx`` with the files of transformers beside it.

These are the places where optimum and sentence-transformers (backend="onnx") look: config.json, the tokenizer and
modules.json in the directory, the graph in its folder ``onnx``.
"""

import functools
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.convert import tokenizer_check
from bert_jax.convert.formats import huggingface
from bert_jax.convert.formats.format import OutputFormat
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.parity.parity_report import relative_difference
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel, to_huggingface_config
from bert_jax.errors import UserError, install_command, require
from bert_jax.storage import StoredPath

if TYPE_CHECKING:
    import onnx
    import onnxruntime

MODEL = "onnx/model.onnx"
LARGEST_BYTES = 2**31
"""Limit of protocol buffers for one file."""
EXTRA = "onnx"


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise UserError with the command that installs an extra, if one of its packages is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    require(not missing, f"{what} needs the package {' and '.join(missing)}: {install_command(extra)}")


def build(source_model: SourceModel, graph: str) -> "onnx.ModelProto":
    """The model as an ONNX graph.

    Args:
      source_model: the model.
      graph: name of a class in onnx_graph.py.

    Raises:
      UserError: the graph lacks a part of the encoder, or is larger than a file may be.
    """
    from bert_jax.convert.formats import onnx_graph, onnx_model

    model = onnx_model.build(source_model.model, getattr(onnx_graph, graph))
    size = model.ByteSize()
    if size >= LARGEST_BYTES:
        raise UserError(
            f"{source_model.source}: its graph has {size / 2**30:.1f} GiB, an ONNX file at most "
            f"{LARGEST_BYTES / 2**30:g}: use an int8 format"
        )
    return model


def write_files_beside(source_model: SourceModel, directory: Path) -> None:
    """Write config.json and the tokenizer as transformers expects them.

    A model that transformers does not have, e.g. with fewer heads, has a config.json without guarantee: runtimes read
    its labels and ids only.
    """
    try:
        config = huggingface.hf_model_to_write(source_model).config
    except UserError:
        config = to_huggingface_config(source_model.model)
    (directory / huggingface.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tokenizer_check.write_hf_tokenizer(source_model, directory)


def _write(source_model: SourceModel, directory: Path, graph: str) -> None:
    require_packages("ONNX", EXTRA, "onnx", "onnxruntime")
    model = build(source_model, graph)
    (directory / MODEL).parent.mkdir()
    (directory / MODEL).write_bytes(model.SerializeToString(deterministic=True))
    write_files_beside(source_model, directory)


def open_session(directory: StoredPath, threads: int | None = None) -> "onnxruntime.InferenceSession":
    """The graph of a directory in ONNX Runtime, on the CPU.

    Args:
      directory: with MODEL.
      threads: for one call; None: the runtime's choice.

    Raises:
      UserError: a package is missing, or the runtime refuses the file.
    """
    require_packages("ONNX", EXTRA, "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    # Else its threads go on spinning after a call, and take time from whatever runs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return onnxruntime.InferenceSession(str(directory / MODEL), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base
        raise UserError(
            f"ONNX Runtime cannot read {directory / MODEL}: {' '.join(str(error).split())[:200]}"
        ) from error


def feeds(names: list[str], inputs: ForwardInputs) -> dict[str, np.ndarray]:
    """The inputs of a graph by name, int64."""
    ids, types, mask = (array.astype(np.int64) for array in inputs)
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return {name: arrays[name] for name in names}


def run(directory: Path, model: NativeModel, inputs: ForwardInputs) -> ForwardOutputs:
    """Run a batch in ONNX Runtime."""
    from bert_jax.convert.formats import onnx_model

    session = open_session(directory)
    outputs: list[Any] = session.run(None, feeds([x.name for x in session.get_inputs()], inputs))
    return onnx_model.name_outputs(model, dict(zip([x.name for x in session.get_outputs()], outputs, strict=True)))


OUTPUT = OutputFormat(
    functools.partial(_write, graph="FloatGraph"),
    huggingface.CONFIG,
    for_transformers=True,
    for_sentence_transformers=True,
    run=run,
)
INT8_OUTPUT = OUTPUT._replace(write=functools.partial(_write, graph="Int8Graph"), compare=relative_difference)
