"""Reads and writes checkpoints of Google's BERT and ALBERT (TensorFlow 1) without TensorFlow.

A directory has ``bert_config.json`` or ``albert_config.json``, ``bert_model.ckpt.index``,
``bert_model.ckpt.data-00000-of-00001`` and a vocabulary, which this module does not read. Names: tensorflow1_names.py.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert_jax.convert.formats import tensor_bundle
from bert_jax.convert.formats.format import InputFormat, OutputFormat, ReadOptions, to_source_model
from bert_jax.convert.formats.google_config import google_config, read_config
from bert_jax.convert.formats.tensorflow1_names import GLOBAL_STEP, SLOTS, huggingface_name, slot_of, tensorflow_name
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import LazyStateDict, lazy_transpose
from bert_jax.convert.tokenizer_check import write_hf_tokenizer
from bert_jax.convert.translate import moments_from_huggingface, moments_to_huggingface, to_huggingface
from bert_jax.errors import UserError, require
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.readers import find_tokenizer_file
from bert_jax.training.state import Moments

CHECKPOINT = "bert_model.ckpt"
CLASSIFIER, TAGGER = "ForSequenceClassification", "ForTokenClassification"
HEADS = {
    "cls.seq_relationship.weight": "ForPreTraining",
    "sop_classifier.classifier.weight": "ForPreTraining",
    "cls.predictions.bias": "ForMaskedLM",
    "predictions.bias": "ForMaskedLM",
    "classifier.weight": CLASSIFIER,
    "qa_outputs.weight": "ForQuestionAnswering",
}
"""Tensor -> suffix of the class in transformers, the largest class first."""


def find_checkpoint(source: StoredPath) -> StoredPath | None:
    """The prefix of the checkpoint at a path, or None.

    Args:
      source: a directory with a checkpoint, or a checkpoint's prefix or ``.index`` file.

    Raises:
      UserError: the directory has several, and no file `checkpoint` that names one of them as the newest.
    """
    if not source.is_dir():
        prefix = source.parent / source.name.removesuffix(".index")
        return prefix if tensor_bundle.index_path(prefix).is_file() else None
    names = sorted(entry.name for entry in source.iterdir())
    prefixes = [name.removesuffix(".index") for name in names if ".ckpt" in name and name.endswith(".index")]
    if len(prefixes) > 1:
        return source / _newest(source, prefixes)
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
    prefix = find_checkpoint(source)
    bundle, config = tensor_bundle.open_bundle(prefix), read_config(prefix.parent)
    family = config["model_type"]
    tensors = _renamed(bundle, "", family, str(prefix))
    suffix = next((suffix for name, suffix in HEADS.items() if name in tensors), "Model")
    # Programs for tagging name their head as run_classifier.py does: only a config of bert_jax tells them apart.
    if suffix == CLASSIFIER and config.get("architectures") == [family.capitalize() + TAGGER]:
        suffix = TAGGER
    config["architectures"] = [family.capitalize() + suffix]
    hf_model = HuggingFaceModel(config, tensors, str(prefix))
    source_model = to_source_model("tensorflow1", hf_model, find_tokenizer_file(prefix.parent), options)
    trees = [_renamed(bundle, slot, family, str(prefix)) for slot in SLOTS]
    dropped = tensors.keys() - source_model.hf_model.tensors.keys()
    trees = [LazyStateDict({name: x for name, x in tree.lazy_tensors.items() if name not in dropped}) for tree in trees]
    if not options.optimizer_state or not any(trees):
        return source_model
    step = bundle.lazy_tensors.get(GLOBAL_STEP)
    whole = trees[0].keys() == trees[1].keys() and step is not None and step.shape == ()
    require(whole, f"{prefix}: some moments or {GLOBAL_STEP} are missing: the checkpoint is incomplete")
    moments = (moments_from_huggingface(source_model.model, source_model.hf_model, tree) for tree in trees)
    return dataclasses.replace(source_model, optimizer_state=Moments(int(step.read()), *moments))


def _renamed(bundle: LazyStateDict, slot: str, family: str, source: str) -> LazyStateDict:
    """The parameters, or with a slot one of their moments, by the names of transformers."""
    tensors = {}
    for stored_name, tensor in bundle.lazy_tensors.items():
        if slot_of(stored_name) == slot:
            name, transposed = huggingface_name(stored_name.removesuffix(slot), family, source)
            tensors[name] = lazy_transpose(tensor) if transposed else tensor
    return LazyStateDict(tensors)


def write(source_model: SourceModel, directory: Path) -> None:
    """Write a directory that Google's code reads: config, ``bert_model.ckpt`` and tokenizer.

    Raises:
      UserError: Google's code does not support the model.
    """
    model, moments = source_model.model, source_model.optimizer_state
    hf_model = to_huggingface(model, source_model.source)
    family, config = model.family, google_config(hf_model)
    (directory / f"{family}_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    stored = {}

    def add(tensors: Mapping[str, np.ndarray], slot: str = "") -> None:
        for name, array in tensors.items():
            stored_name, transposed = tensorflow_name(name, family, hf_model.source)
            stored[stored_name + slot] = array.T if transposed else array

    add(hf_model.tensors)
    if moments is not None:
        for slot, tree in zip(SLOTS, (moments.mu, moments.nu), strict=True):
            add(moments_to_huggingface(model, tree), slot)
        stored[GLOBAL_STEP] = np.asarray(moments.step, np.int64)
    tensor_bundle.write(directory / CHECKPOINT, stored)
    write_hf_tokenizer(source_model, directory)


INPUT = InputFormat("*.ckpt.index with bert_config.json", matches, read)
OUTPUT = OutputFormat(write, f"{CHECKPOINT}.index", optimizer_state=True)
