"""A directory for ONNX Runtime: ``onnx/model.onnx``, in int8 ``onnx/model_quantized.onnx``, and transformers' files.

These are the places where optimum, sentence-transformers (backend="onnx") and transformers.js look: config.json, the
tokenizer and modules.json in the directory, graphs in its folder ``onnx``. Transformers.js appends "_quantized" to the
name for dtype "q8" (src/utils/dtypes.js).
"""

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_jax.convert import tokenizer_check
from bert_jax.convert.formats import huggingface
from bert_jax.convert.formats.format import GraphFile, OutputFormat
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.parity.parity_report import relative_difference
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel, to_huggingface_config
from bert_jax.errors import UserError, install_command, require
from bert_jax.storage.paths import StoredPath

if TYPE_CHECKING:
    import onnx
    import onnxruntime

MODEL, INT8_MODEL = "onnx/model.onnx", "onnx/model_quantized.onnx"
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


def _write(source_model: SourceModel, directory: Path, files: Sequence[str]) -> None:
    require_packages("ONNX", EXTRA, "onnx", "onnxruntime")
    (directory / MODEL).parent.mkdir()
    for file in files:
        model = build(source_model, "Int8GraphBuilder" if file == INT8_MODEL else "FloatGraphBuilder")
        (directory / file).write_bytes(model.SerializeToString(deterministic=True))
    write_files_beside(source_model, directory)


def open_session(file: StoredPath, threads: int | None = None) -> "onnxruntime.InferenceSession":
    """A graph in ONNX Runtime, on the CPU.

    Args:
      file: of the graph.
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
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base
        raise UserError(f"ONNX Runtime cannot read {file}: {' '.join(str(error).split())[:200]}") from error


def feeds(names: list[str], inputs: ForwardInputs) -> dict[str, np.ndarray]:
    """The inputs of a graph by name, int64."""
    ids, types, mask = (array.astype(np.int64) for array in inputs)
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return {name: arrays[name] for name in names}


def run(file: Path, model: NativeModel, inputs: ForwardInputs) -> ForwardOutputs:
    """Run a batch in ONNX Runtime."""
    from bert_jax.convert.formats import onnx_model

    session = open_session(file)
    outputs: list[Any] = session.run(None, feeds([x.name for x in session.get_inputs()], inputs))
    return onnx_model.name_outputs(model, dict(zip([x.name for x in session.get_outputs()], outputs, strict=True)))


def output_formats(
    runtime: str,
    files: tuple[str, str],
    write: Callable[[SourceModel, Path, Sequence[str]], None],
    run: Callable[[Path, NativeModel, ForwardInputs], ForwardOutputs],
) -> dict[str, OutputFormat]:
    """The formats of a runtime, by name: float32, int8, and both in one directory.

    Args:
      runtime: its name.
      files: of the graph in float32, and of that in int8.
      write: (model, directory, the files to write).
      run: as in `GraphFile`.
    """
    float32, int8 = GraphFile(files[0], run), GraphFile(files[1], run, relative_difference)
    graphs = {runtime: (float32,), f"{runtime}-int8": (int8,), f"{runtime}-both": (float32, int8)}
    return {
        name: OutputFormat(
            functools.partial(write, files=[graph.path for graph in written]),
            huggingface.CONFIG,
            for_transformers=True,
            for_sentence_transformers=True,
            graphs=written,
        )
        for name, written in graphs.items()
    }


OUTPUTS = output_formats("onnx", (MODEL, INT8_MODEL), _write, run)
