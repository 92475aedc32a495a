"""Reads and writes checkpoints of Google's BERT and ALBERT (TensorFlow 1) without TensorFlow.

A directory has ``bert_config.json`` or ``albert_config.json``, ``bert_model.ckpt.index``,
``bert_model.ckpt.data-00000-of-00001`` and a vocabulary, which this module does not read. Names: tensorflow1_names.py.
"""

import dataclasses
import json
import re
from collections.abc import Container, Iterable
from pathlib import Path

import numpy as np

from bert_jax.convert.families import FAMILIES
from bert_jax.convert.formats import tensor_bundle
from bert_jax.convert.formats.format import InputFormat, OutputFormat, ReadOptions, to_source_model
from bert_jax.convert.formats.google_config import google_config, read_config
from bert_jax.convert.formats.tensorflow1_names import (
    GLOBAL_STEP,
    OTHER_SLOTS,
    SLOTS,
    TranslatedTensorName,
    huggingface_name,
    is_optimizer_state,
    tensorflow_name,
)
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import BUFFERS, LazyTensor, LazyTensors, lazy_from_array, lazy_transpose, to_lazy
from bert_jax.convert.tokenizer_check import write_hf_tokenizer
from bert_jax.convert.translate import moments_from_huggingface, moments_to_huggingface, to_huggingface
from bert_jax.errors import UserError, require
from bert_jax.storage import StoredPath, make_local_directory, write_atomic
from bert_jax.tokenizers.files import find_tokenizer_file
from bert_jax.training.state import Moments

AdamMoments = tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]
"""Number of steps; first and second moments with the names and layout of transformers."""

CHECKPOINT = "bert_model.ckpt"


def find_checkpoint(source: StoredPath) -> StoredPath | None:
    """The prefix of the checkpoint at a path, or None.

    Args:
      source: a directory with a checkpoint, or a checkpoint's prefix or ``.index`` file.

    Raises:
      UserError: the directory has several, and no file `checkpoint` that names one of them as the newest.
    """
    if source.name.endswith(".index") and source.is_file():
        return source.parent / source.name.removesuffix(".index")
    if not source.is_dir():
        exists = tensor_bundle.index_path(source).exists() or tensor_bundle.is_table(source)
        return source if exists else None
    names = sorted(entry.name for entry in source.iterdir() if ".ckpt" in entry.name)
    prefixes = [name.removesuffix(".index") for name in names if name.endswith(".index")]
    if len(prefixes) > 1:
        return source / _newest(source, prefixes)
    if not prefixes:
        # A checkpoint of the format V1 is one file; opening it raises an error that explains this.
        prefixes = [
            name for name in names if re.search(r"\.ckpt(-\w+)?$", name) and tensor_bundle.is_table(source / name)
        ]
    return source / prefixes[0] if prefixes else None


def _newest(directory: StoredPath, prefixes: list[str]) -> str:
    """The checkpoint that TensorFlow's file `checkpoint` names; its directory may be of another machine."""
    state = directory / "checkpoint"
    text = state.read_bytes().decode(errors="replace") if state.exists() else ""
    match = re.search(r'^model_checkpoint_path: "(?:.*/)?([^/"]+)"', text, re.MULTILINE)
    if match and match[1] in prefixes:
        return match[1]
    raise UserError(f"{directory} holds several checkpoints: name one of {', '.join(prefixes)}")


def matches(source: StoredPath) -> bool:
    """Whether there is a checkpoint of TensorFlow."""
    return find_checkpoint(source) is not None


def read(source: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read a checkpoint; `source` is as for `find_checkpoint`.

    Raises:
      UserError: checkpoint or config are missing, damaged or not supported, or a tensor name is unknown.
    """
    directory = source if source.is_dir() else source.parent
    source_model = to_source_model("tensorflow1", read_hf_model(source), find_tokenizer_file(directory), options)
    moments = read_moments(source) if options.optimizer_state else None
    if moments is None:
        return source_model
    step, *trees = moments
    trees = (moments_from_huggingface(source_model.model, source_model.hf_model, tree) for tree in trees)
    return dataclasses.replace(source_model, optimizer_state=Moments(step, *trees))


def read_hf_model(source: StoredPath) -> HuggingFaceModel:
    """A checkpoint without the optimizer's state, with the names of transformers; its config is in its directory."""
    prefix = _prefix(source)
    bundle, config = tensor_bundle.open_bundle(prefix), read_config(prefix.parent)
    family = config["model_type"]
    names = _huggingface_names(bundle, family, str(prefix))
    tensors = {name.name: _lazy(bundle, stored, name.transposed) for stored, name in names.items()}
    return HuggingFaceModel(
        config | {"architectures": [_architecture(family, tensors)]}, LazyTensors(tensors), str(prefix)
    )


def _prefix(source: StoredPath) -> StoredPath:
    prefix = find_checkpoint(source)
    require(prefix is not None, f"{source} is not a checkpoint of TensorFlow: it needs a file *.ckpt.index")
    return prefix


def _huggingface_names(names: Iterable[str], family: str, source: str) -> dict[str, TranslatedTensorName]:
    """By the stored name of every parameter."""
    return {name: huggingface_name(name, family, source) for name in names if not is_optimizer_state(name)}


def _lazy(bundle: LazyTensors, stored_name: str, transposed: bool) -> LazyTensor:
    tensor = bundle.lazy_tensors[stored_name]
    return lazy_transpose(tensor) if transposed else tensor


def _architecture(family: str, names: Container[str]) -> str:
    """The class of transformers that has exactly these heads."""
    suffixes = {
        "cls.seq_relationship.weight": "ForPreTraining",
        "sop_classifier.classifier.weight": "ForPreTraining",
        "cls.predictions.bias": "ForMaskedLM",
        "predictions.bias": "ForMaskedLM",
        "classifier.weight": "ForSequenceClassification",
        "qa_outputs.weight": "ForQuestionAnswering",
    }
    return family.capitalize() + next((suffix for name, suffix in suffixes.items() if name in names), "Model")


def read_moments(source: StoredPath) -> AdamMoments | None:
    """The number of steps and the optimizer's moments; None if the checkpoint has no moments.

    A pooler may lack them: TensorFlow makes no slots for variables that the loss does not depend on (SQuAD, or
    pretraining without pairs).

    Args:
      source: as for `find_checkpoint`.

    Raises:
      UserError: as `read`; or some moments are missing, or belong to another optimizer.
    """
    prefix = _prefix(source)
    bundle = tensor_bundle.open_bundle(prefix)
    slots = {name for name in bundle if name.endswith(SLOTS)}
    if not slots:
        other = next((name for name in sorted(bundle) if name.endswith(OTHER_SLOTS)), None)
        require(
            other is None,
            f"{prefix}: '{other}' belongs to an optimizer that is not supported: only BERT's Adam and LAMB are",
        )
        return None
    require(GLOBAL_STEP in bundle, f"{prefix}: has moments, but no {GLOBAL_STEP}: the checkpoint is incomplete")
    is_integer = bundle.lazy_tensors[GLOBAL_STEP][:2] in (((), "int32"), ((), "int64"))
    require(is_integer, f"{prefix}: {GLOBAL_STEP} is not an integer: the checkpoint is damaged")
    kept = {}
    for stored, name in _huggingface_names(bundle, read_config(prefix.parent)["model_type"], str(prefix)).items():
        missing = [slot for slot in SLOTS if stored + slot not in slots]
        if not missing:
            kept[stored] = name
        elif len(missing) == 1 or not _may_lack_moments(name.name):
            what = stored + missing[0]
            raise UserError(f"{prefix}: '{what}' is missing, but other moments exist: the checkpoint is incomplete")
    orphans = slots - {stored + slot for stored in kept for slot in SLOTS}
    require(not orphans, f"{prefix}: '{min(orphans, default='')}' belongs to no tensor: the checkpoint is incomplete")
    first, second = (
        {name.name: _lazy(bundle, stored + slot, name.transposed).read() for stored, name in kept.items()}
        for slot in SLOTS
    )
    return int(bundle[GLOBAL_STEP]), first, second


def _may_lack_moments(name: str) -> bool:
    return ".pooler." in name


def write(source_model: SourceModel, directory: Path) -> None:
    """Write a directory that Google's code reads: config, ``bert_model.ckpt`` and tokenizer.

    Raises:
      UserError: Google's code does not support the model.
    """
    hf_model, moments = to_huggingface(source_model.model, source_model.source), None
    if source_model.optimizer_state is not None:
        first, second = (moments_to_huggingface(source_model.model, tree) for tree in source_model.optimizer_state[1:])
        moments = source_model.optimizer_state.step, first, second
    write_hf_model(hf_model, directory, moments)
    write_hf_tokenizer(source_model, directory)


def write_hf_model(hf_model: HuggingFaceModel, directory: StoredPath, moments: AdamMoments | None = None) -> None:
    """Write config and ``bert_model.ckpt``.

    Args:
      hf_model: a BERT or an ALBERT; tied copies of tensors are not written.
      directory: created if it does not exist.
      moments: also written, with the number of steps, if given.

    Raises:
      UserError: Google's code does not support the model, or moments are incomplete.
    """
    config = google_config(hf_model)
    tensors = _tensorflow_tensors(hf_model, moments)
    make_local_directory(directory)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_atomic(directory / f"{hf_model.config['model_type']}_config.json", text.encode())
    tensor_bundle.write(directory / CHECKPOINT, tensors)


def _tensorflow_tensors(hf_model: HuggingFaceModel, moments: AdamMoments | None) -> LazyTensors:
    """A model's tensors, and its moments, by their names in TensorFlow."""
    family, source, tensors = hf_model.config["model_type"], hf_model.source, to_lazy(hf_model.tensors)
    copies = FAMILIES[family].copies
    names = [name for name in tensors if name not in copies and not name.endswith(BUFFERS)]
    for copy in copies.keys() & tensors.keys():
        original = copies[copy]
        equal = original in tensors and np.array_equal(tensors[copy].read(), tensors[original].read())
        require(equal, f"{source}: '{copy}' is not tied to '{original}': TensorFlow 1's code has one tensor for both")
    written = {}

    def add(name: str, tensor: LazyTensor, slot: str = "") -> None:
        stored_name, transposed = tensorflow_name(name, family, source)
        written[stored_name + slot] = _float32(lazy_transpose(tensor) if transposed else tensor)

    for name in names:
        add(name, tensors[name])
    if moments is None:
        return LazyTensors(written)
    step, first, second = moments
    for slot, slot_moments in zip(SLOTS, (first, second), strict=True):
        stray = sorted(set(slot_moments) - set(names))
        require(not stray, f"{source}: moments of '{''.join(stray[:1])}', which the model does not have")
        for name in names:
            if name in slot_moments:
                add(name, lazy_from_array(slot_moments[name]), slot)
            elif name in first or name in second or not _may_lack_moments(name):
                raise UserError(f"{source}: '{name}' has no moments ({slot[1:]}): give all or none")
    return LazyTensors(written | {GLOBAL_STEP: lazy_from_array(np.asarray(step, np.int64))})


def _float32(tensor: LazyTensor) -> LazyTensor:
    """Google's code has float32 variables, and TensorFlow does not convert dtypes on restore."""
    if tensor.dtype not in ("float16", "bfloat16"):
        return tensor
    return tensor._replace(dtype="float32", read=lambda: tensor.read().astype(np.float32))


INPUT = InputFormat("*.ckpt.index with bert_config.json", matches, read)
OUTPUT = OutputFormat(write, f"{CHECKPOINT}.index", optimizer_state=True)
