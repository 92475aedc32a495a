"""Reads and writes checkpoints of Google's BERT and ALBERT (TensorFlow 1) without TensorFlow.

A directory has ``bert_config.json`` or ``albert_config.json``, ``bert_model.ckpt.index``,
``bert_model.ckpt.data-00000-of-00001`` and a vocabulary, which this module does not read. Names: tensorflow1_names.py.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bert_jax.convert.formats import tensor_bundle, tensorflow1_names
from bert_jax.convert.formats.google_config import google_config, read_config
from bert_jax.convert.formats.tensor_bundle import TensorBundle
from bert_jax.convert.formats.tensorflow1_names import GLOBAL_STEP, SLOTS, huggingface_name, tensorflow_name
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.tensors import LazyTensor, LazyTensors
from bert_jax.errors import UserError, require
from bert_jax.storage import StoredPath, make_local_directory, write_atomic

AdamMoments = tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]
"""Number of steps; first and second moments with the names and layout of transformers."""

CHECKPOINT = "bert_model.ckpt"

# transformers stores these copies of tied tensors, and constants.
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


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


class _HuggingFaceTensors(LazyTensors):
    """A model's tensors by their names in transformers, read on access."""

    def __init__(self, bundle: TensorBundle, family: str, source: str):
        self._bundle = bundle
        self._locations: dict[str, tuple[str, bool]] = {}
        for name in bundle.names():
            if not tensorflow1_names.is_optimizer_state(name):
                hf_name, transposed = huggingface_name(name, family, source)
                self._locations[hf_name] = (name, transposed)
        super().__init__({name: self._stored(name) for name in self._locations})

    def _stored(self, name: str) -> LazyTensor:
        stored_name, transposed = self._locations[name]
        shape = self._bundle.shape(stored_name)
        return LazyTensor(
            shape[::-1] if transposed else shape,
            self._bundle.dtype(stored_name),
            functools.partial(self.read_slot, name, ""),
        )

    def tensorflow_name(self, name: str) -> str:
        return self._locations[name][0]

    def read_slot(self, name: str, slot: str) -> np.ndarray:
        """Read an optimizer slot; `slot` is its suffix, "" for the tensor itself."""
        stored_name, transposed = self._locations[name]
        array = self._bundle.read(stored_name + slot)
        return array.T if transposed else array


def read(source: StoredPath) -> HuggingFaceModel:
    """Read a checkpoint without the optimizer's state.

    Args:
      source: as for `find_checkpoint`; the config is in the checkpoint's directory.

    Raises:
      UserError: checkpoint or config are missing, damaged or not supported, or a tensor name is unknown. Missing
        tensors are detected by `from_huggingface`.
    """
    prefix, config, weights, _ = _open(source)
    config["architectures"] = [_architecture(config["model_type"], weights)]
    return HuggingFaceModel(config, weights, str(prefix))


def _open(source: StoredPath) -> tuple[StoredPath, dict[str, Any], _HuggingFaceTensors, TensorBundle]:
    prefix = find_checkpoint(source)
    require(prefix is not None, f"{source} is not a checkpoint of TensorFlow: it needs a file *.ckpt.index")
    bundle = TensorBundle(prefix)
    config = read_config(prefix.parent)
    return prefix, config, _HuggingFaceTensors(bundle, config["model_type"], str(prefix)), bundle


def _architecture(family: str, names: Mapping[str, np.ndarray]) -> str:
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
    prefix, _, weights, bundle = _open(source)
    names = set(bundle.names())
    slots = {name for name in names if name.endswith(SLOTS)}
    if not slots:
        other = next((name for name in sorted(names) if name.endswith(tensorflow1_names.OTHER_SLOTS)), None)
        require(
            other is None,
            f"{prefix}: '{other}' belongs to an optimizer that is not supported: only BERT's Adam and LAMB are",
        )
        return None
    require(GLOBAL_STEP in names, f"{prefix}: has moments, but no {GLOBAL_STEP}: the checkpoint is incomplete")
    is_integer = bundle.shape(GLOBAL_STEP) == () and bundle.dtype(GLOBAL_STEP) in ("int32", "int64")
    require(is_integer, f"{prefix}: {GLOBAL_STEP} is not an integer: the checkpoint is damaged")
    kept = []
    for name in weights:
        missing = [slot for slot in SLOTS if weights.tensorflow_name(name) + slot not in slots]
        if not missing:
            kept.append(name)
        elif len(missing) == 1 or not _may_lack_moments(name):
            what = weights.tensorflow_name(name) + missing[0]
            raise UserError(f"{prefix}: '{what}' is missing, but other moments exist: the checkpoint is incomplete")
    orphans = slots - {weights.tensorflow_name(name) + slot for name in kept for slot in SLOTS}
    require(not orphans, f"{prefix}: '{min(orphans, default='')}' belongs to no tensor: the checkpoint is incomplete")
    first, second = ({name: weights.read_slot(name, slot) for name in kept} for slot in SLOTS)
    return int(bundle.read(GLOBAL_STEP)), first, second


def _may_lack_moments(name: str) -> bool:
    return ".pooler." in name


def write(hf_model: HuggingFaceModel, directory: StoredPath, moments: AdamMoments | None = None) -> None:
    """Write a directory that Google's code reads: config and ``bert_model.ckpt``, without vocabulary.

    Args:
      hf_model: a BERT or an ALBERT; tied copies of tensors are not written.
      directory: created if it does not exist; must not have a checkpoint of this name.
      moments: also written, with the number of steps, if given.

    Raises:
      UserError: a checkpoint exists already, Google's code does not support the model, or moments are incomplete.
    """
    prefix = directory / CHECKPOINT
    exists = tensor_bundle.index_path(prefix).exists()
    require(not exists, f"{prefix}.index exists already: choose another destination, or remove it")
    config = google_config(hf_model)
    family = hf_model.config["model_type"]
    tensors = _TensorFlowTensors(hf_model, family)
    if moments is not None:
        tensors.add_moments(*moments)
    make_local_directory(directory)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_atomic(directory / f"{family}_config.json", text.encode())
    tensor_bundle.write(prefix, tensors)


class _TensorFlowTensors(Mapping[str, np.ndarray]):
    """A model's tensors by their names in TensorFlow, read on access."""

    def __init__(self, hf_model: HuggingFaceModel, family: str):
        self._hf_model, self._family = hf_model, family
        self._readers: dict[str, Callable[[], np.ndarray]] = {}
        self._names: list[str] = []
        for name in hf_model.tensors:
            if name.endswith(BUFFERS):
                continue
            if name in TIED:
                self._check_tied(name)
                continue
            self._names.append(name)
            self._add(name, hf_model.tensors, "")

    def _check_tied(self, name: str) -> None:
        tensors, twin = self._hf_model.tensors, TIED[name]
        equal = twin in tensors and np.array_equal(tensors[name], tensors[twin])
        require(
            equal,
            f"{self._hf_model.source}: '{name}' is not tied to '{twin}': TensorFlow 1's code has one tensor for both",
        )

    def _add(self, name: str, tensors: Mapping[str, np.ndarray], slot: str) -> None:
        stored_name, transposed = tensorflow_name(name, self._family, self._hf_model.source)
        self._readers[stored_name + slot] = (lambda: tensors[name].T) if transposed else (lambda: tensors[name])

    def add_moments(self, step: int, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
        """Add the slots of every tensor, and the step.

        Raises:
          UserError: a tensor has no moments, or moments belong to no tensor.
        """
        for moments, slot in zip((first, second), SLOTS, strict=True):
            stray = sorted(set(moments) - set(self._names))
            require(
                not stray,
                f"{self._hf_model.source}: moments of '{stray[0] if stray else ''}', which the model does not have",
            )
            for name in self._names:
                both_lack = name not in first and name not in second
                if name in moments:
                    self._add(name, moments, slot)
                elif not (both_lack and _may_lack_moments(name)):
                    raise UserError(f"{self._hf_model.source}: '{name}' has no moments ({slot[1:]}): give all or none")
        self._readers[GLOBAL_STEP] = lambda: np.asarray(step, np.int64)

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._readers[name]()
        # Google's code has float32 variables, and TensorFlow does not convert dtypes on restore.
        return array.astype(np.float32) if array.dtype in (np.float16, ml_dtypes.bfloat16) else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)
