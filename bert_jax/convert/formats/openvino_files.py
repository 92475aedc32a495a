"""A directory for OpenVINO: ``openvino/openvino_model.xml`` and ``.bin``, and transformers' files.

These are the places where optimum-intel and sentence-transformers (backend="openvino") look; the int8 file has the name
that sentence-transformers gives it. The graph is that of onnx_model.py, read by OpenVINO.
"""

import functools
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from bert_jax.convert.formats import onnx_files
from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath

if TYPE_CHECKING:
    import openvino

MODEL, INT8_MODEL = "openvino/openvino_model.xml", "openvino/openvino_model_qint8_quantized.xml"
EXTRA = "openvino"
_GROUP_SIZE_PATH = ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]
"""Where optimum-intel writes it, and the CPU plugin reads it."""
INT8_GROUP = 128
"""Consecutive inputs of a product that share a scale. On the published MiniLM, groups of 32 gave 0.047 relative error
and 118 ms, of 128 0.060 and 93 ms, of 384 (whole rows) 0.080 and 89 ms (docs/log/conversion.md, 2026-11-25)."""


def import_without_telemetry() -> ModuleType:
    """The package openvino, which otherwise reports its import to Google Analytics from a forked process.

    A fork can block for ever in a process with jax's threads. Without `openvino_telemetry`, openvino takes a stub.
    """
    if "openvino" not in sys.modules:
        sys.modules.setdefault("openvino_telemetry", None)
    import openvino

    return openvino


@functools.cache
def _core() -> "openvino.Core":
    """The runtime; it exists as long as the process.

    Its CPU plugin gives the thread that loads it another stack for signal handlers. If the plugin is unloaded in
    another thread, it frees that stack, and the next signal ends the process with SIGSEGV (OpenVINO 2026.4).
    """
    return import_without_telemetry().Core()


def _write(source_model: SourceModel, directory: Path, files: Sequence[str]) -> None:
    onnx_files.require_packages("OpenVINO", EXTRA, "openvino", "onnx")
    openvino = import_without_telemetry()
    (directory / MODEL).parent.mkdir()
    for file in files:
        serialised = onnx_files.build(
            source_model, "CompressedGraphBuilder" if file == INT8_MODEL else "FloatGraphBuilder"
        ).SerializeToString()
        model = _core().read_model(serialised)
        if file == INT8_MODEL:
            model.set_rt_info(str(INT8_GROUP), _GROUP_SIZE_PATH)
        try:
            openvino.save_model(model, directory / file, compress_to_fp16=False)
        except RuntimeError:
            # "iostream error", without the system's reason; writing about as many bytes raises an error that has it.
            (directory / file).write_bytes(serialised)
            raise
    onnx_files.write_files_beside(source_model, directory)


def compile_model(
    file: StoredPath, threads: int | None = None, outputs: Collection[str] | None = None
) -> "openvino.CompiledModel":
    """A graph, compiled for the CPU with float32 where it is not int8.

    Args:
      file: of the graph.
      threads: for one call; None: the runtime's choice.
      outputs: names of the outputs to compute; None: all.

    Raises:
      UserError: the package is missing, or the runtime refuses the file.
    """
    onnx_files.require_packages("OpenVINO", EXTRA, "openvino")
    openvino = import_without_telemetry()
    # Without the hint, CPUs that have bfloat16 would use it.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    try:
        model = _core().read_model(str(file))
        if outputs is not None:
            ports = [port for port in model.outputs if port.names & set(outputs)]
            smaller = openvino.Model(ports, model.get_parameters())
            if model.has_rt_info(_GROUP_SIZE_PATH):  # which a new model lacks
                smaller.set_rt_info(model.get_rt_info(_GROUP_SIZE_PATH).value, _GROUP_SIZE_PATH)
            model = smaller
        return _core().compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise UserError(f"OpenVINO cannot read {file}: {' '.join(str(error).split())[:200]}") from error


def run(file: Path, model: NativeModel, inputs: ForwardInputs) -> ForwardOutputs:
    """Run a batch in OpenVINO."""
    from bert_jax.convert.formats import onnx_model

    compiled = compile_model(file)
    try:
        results = compiled(onnx_files.feeds([port.any_name for port in compiled.inputs], inputs))
    except RuntimeError as error:
        raise UserError(f"OpenVINO cannot run {file}: {' '.join(str(error).split())[:200]}") from error
    return onnx_model.name_outputs(model, {port.any_name: results[port] for port in compiled.outputs})


OUTPUTS = onnx_files.output_formats("openvino", (MODEL, INT8_MODEL), _write, run)
