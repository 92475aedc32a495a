"""Models for `bert-jax bench --serve`: one class per runtime, with the same call.

Each computes one output: the logits of the task head, or the last hidden state of a model without one.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import safetensors.numpy
from etils import epath
from jax import export

from bert_jax.convert.families.family import MULTILABEL, HuggingFaceConfig
from bert_jax.convert.formats import huggingface, input_formats, native, onnx_files, openvino_files, stablehlo
from bert_jax.convert.formats.tensor_files import PICKLE, SAFETENSORS
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.translate import find_family
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import load
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath, is_remote
from bert_jax.tokenizers.readers import find_tokenizer_file
from bert_jax.tokenizers.tokenizer import Tokenizer

TEXTS, TOKENS = "texts", "tokens"
"""Kind of the head of a program that has logits of each text, or of each token: it does not say what of."""
UNBOUNDED = 2**31
"""Positions of a model without a position table."""
HIDDEN, SPAN = "last_hidden_state", ("start_logits", "end_logits")
KINDS = {
    "ForSequenceClassification": "classification",
    "ForMultipleChoice": "multiple_choice",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "span",
}
"""By the class of transformers: the kind of the task head."""


class ServedModel(NamedTuple):
    """A model that was opened by its runtime."""

    name: str
    runtime: str
    call: Callable[[ForwardInputs], np.ndarray]
    """Task logits [B, C] or [B, S, C], or the last hidden state [B, S, H], float32."""
    vocab_size: int
    max_positions: int
    head: str | None
    """Kind of the task head, as in `TaskHead`."""
    labels: tuple[str, ...]
    """Names of the logits; empty if the file does not have them."""
    megabytes: float
    """Size on disk of the weights and, of an export, its graph; of a run, the parameters in float32."""
    tokenizer: Tokenizer | None


def open_models(paths: list[StoredPath], threads: int) -> list[ServedModel]:
    """Open models, each in its runtime, with names that differ: a path that is given twice has a number after it.

    Args:
      paths: of runs, models and exports.
      threads: of a call, for the runtimes that can be told; XLA uses the cores of the process.

    Raises:
      UserError: no model at a path, or the package of its runtime is missing.
    """
    names = [path.name for path in paths]
    names = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    names = [name if count == 1 else f"{name} ({count})" for name, count in zip(names, counts, strict=True)]
    return [_open(path, name, threads) for path, name in zip(paths, names, strict=True)]


def _open(path: StoredPath, name: str, threads: int) -> ServedModel:
    readers = {
        onnx_files.MODEL: _open_onnx,
        onnx_files.INT8_MODEL: _open_onnx,
        openvino_files.MODEL: _open_openvino,
        openvino_files.INT8_MODEL: _open_openvino,
        stablehlo.PROGRAM: _open_stablehlo,
    }
    if path.is_file():
        for graph, reader in readers.items():
            if path.as_posix().endswith(graph):
                return reader(path, path.parents[graph.count("/")], name, threads)
    elif not any(known.matches(path) for known in input_formats.FORMATS):
        graphs = [graph for graph in readers if (path / graph).exists()]
        if len(graphs) > 1:
            raise UserError(f"{path} has {len(graphs)} models: give one of the files {' and '.join(graphs)} in it")
        for graph in graphs:
            return readers[graph](path / graph, path, name, threads)
    try:
        return _open_ours(path, name)
    except UserError as error:
        if path.exists() and "is not a run or a model" in str(error):
            known = ", ".join(readers)
            raise UserError(
                f"{path} is no model to serve: it has neither {known} nor a model that convert reads"
            ) from error
        raise


def _open_ours(path: StoredPath, name: str) -> ServedModel:
    model = load(path)
    task, config = model.heads.task, model.config

    def call(inputs: ForwardInputs) -> np.ndarray:
        outputs = np.asarray(model.run_ids(*inputs))
        return outputs[:, 0] if task is not None and task.reads != "tokens" else outputs

    patterns = (native.PARAMS, f"{Path(SAFETENSORS).stem}*.safetensors", f"{Path(PICKLE).stem}*.bin")
    files = [] if is_remote(path) else [file for pattern in patterns for file in path.glob(pattern)]
    float32_megabytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(model.params)) / 1e6
    return ServedModel(
        name,
        "bert_jax int8" if config.dense_dtype == "int8" else "bert_jax",
        call,
        config.vocab_size,
        config.max_positions,
        task and task.kind,
        task.labels if task else (),
        _megabytes(files) or float32_megabytes,
        model.tokenizer,
    )


def _open_onnx(file: StoredPath, directory: StoredPath, name: str, threads: int) -> ServedModel:
    session = onnx_files.open_session(file, threads)
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    inputs, about = [port.name for port in session.get_inputs()], _Export(directory)
    outputs = about.outputs({port.name for port in session.get_outputs()})

    def call(batch: ForwardInputs) -> np.ndarray:
        return _stack(session.run(list(outputs), onnx_files.feeds(inputs, batch), options))

    return about.served(name, "ONNX Runtime", call, file)


def _open_openvino(file: StoredPath, directory: StoredPath, name: str, threads: int) -> ServedModel:
    compiled, about = openvino_files.compile_model(file, threads), _Export(directory)
    names = {one for port in compiled.outputs for one in port.names}
    outputs = about.outputs(names)
    if names - set(outputs):
        compiled = openvino_files.compile_model(file, threads, outputs)
    request, inputs = compiled.create_infer_request(), [port.any_name for port in compiled.inputs]

    def call(batch: ForwardInputs) -> np.ndarray:
        results = request.infer(onnx_files.feeds(inputs, batch))
        return _stack([np.array(results[output]) for output in outputs])

    return about.served(name, "OpenVINO", call, file)


class _Export:
    """What config.json beside a graph says."""

    def __init__(self, path: StoredPath):
        self.path = path
        values = read_json_object(path / huggingface.CONFIG, "convert the model again")
        settings = HuggingFaceConfig(values, str(path / huggingface.CONFIG))
        self.config = find_family(settings).read_config(settings)
        self.head = next((kind for end, kind in KINDS.items() if settings.architecture.endswith(end)), None)
        if self.head == "classification" and settings.get("problem_type") == MULTILABEL:
            self.head = "multilabel"
        labels = settings.get("id2label", {})
        self.labels = tuple(str(labels[i]) for i in sorted(labels, key=int)) if self.head else ()

    def outputs(self, available: set[str]) -> tuple[str, ...]:
        """Names of the outputs to compute."""
        wanted = SPAN if self.head == "span" else ("logits",) if self.head else (HIDDEN,)
        if missing := set(wanted) - available:
            raise UserError(f"{self.path}: its graph has no output '{min(missing)}': convert the model again")
        return wanted

    def served(
        self, name: str, runtime: str, call: Callable[[ForwardInputs], np.ndarray], file: StoredPath
    ) -> ServedModel:
        """The model of this export."""
        size = _megabytes(file.parent.glob(f"{file.stem}.*"))  # of OpenVINO also the weights
        config, found = self.config, find_tokenizer_file(epath.Path(self.path))
        tokenizer = None if found is None else Tokenizer.load(found)
        return ServedModel(
            name, runtime, call, config.vocab_size, config.max_positions, self.head, self.labels, size, tokenizer
        )


def _stack(outputs: list[np.ndarray]) -> np.ndarray:
    return outputs[0] if len(outputs) == 1 else np.stack(outputs, -1)


def _open_stablehlo(file: StoredPath, directory: StoredPath, name: str, threads: int) -> ServedModel:
    """A program, which always computes all of its outputs."""
    program = export.deserialize(file.read_bytes())
    params = safetensors.numpy.load_file(directory / stablehlo.PARAMS)
    weights, outputs = jax.device_put(params), jax.tree.unflatten(program.out_tree, program.out_avals)
    position, found = params.get("encoder/embeddings/position"), find_tokenizer_file(epath.Path(directory))
    head = None
    if "task" in outputs:
        head = TEXTS if outputs["task"].ndim == 2 else TOKENS

    def call(batch: ForwardInputs) -> np.ndarray:
        return np.asarray(program.call(weights, *batch)["task" if head else "hidden"])

    return ServedModel(
        name,
        "StableHLO",
        call,
        len(params["encoder/embeddings/word"]),
        len(position) if position is not None else UNBOUNDED,
        head,
        (),
        _megabytes([file, directory / stablehlo.PARAMS]),
        None if found is None else Tokenizer.load(found),
    )


def _megabytes(files: Iterable[StoredPath]) -> float:
    return sum(Path(file).stat().st_size for file in files) / 1e6
