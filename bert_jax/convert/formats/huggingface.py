"""Directories of transformers: ``config.json`` and weights as safetensors or a pickle."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bert_jax.convert.formats import tensor_files
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.storage import StoredPath, read_json_object

CONFIG = "config.json"


def is_huggingface(directory: StoredPath) -> bool:
    """Whether a directory has a weights file of transformers."""
    files = (tensor_files.SAFETENSORS, tensor_files.PICKLE)
    return any((directory / f"{name}{end}").exists() for name in files for end in ("", ".index.json"))


def read(directory: StoredPath) -> HuggingFaceModel:
    """Read a directory; tensors are read on access.

    Raises:
      UserError: files are missing or damaged.
    """
    config = read_json_object(directory / CONFIG, f"without it, {directory} is not a Hugging Face model")
    return HuggingFaceModel(config, tensor_files.open_tensors(directory), str(directory))


def write(
    directory: Path, hf_model: HuggingFaceModel, save: Callable[[Path, Mapping[str, np.ndarray]], None], name: str
) -> None:
    """Write config and weights into an existing directory.

    Args:
      directory: the destination.
      hf_model: the model.
      save: one of tensor_files' writers.
      name: file name of the weights.
    """
    (directory / CONFIG).write_text(json.dumps(hf_model.config, indent=2) + "\n")
    save(directory / name, hf_model.tensors)
