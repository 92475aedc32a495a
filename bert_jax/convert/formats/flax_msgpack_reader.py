"""Reads Flax models of transformers 4: ``flax_model.msgpack``, whole or in shards, and ``config.json``.

Module names equal those of the torch models, heads included; only the leaves differ: a dense `kernel` is
[inputs, outputs], a LayerNorm has a `scale`, a table an `embedding`. (huggingface/transformers v4.46.3,
src/transformers/models/{bert,roberta,albert,distilbert,electra}/modeling_flax_*.py; sharding: modeling_flax_utils.py.)
If the output table is the word table, only the head's bias is saved.
"""

from pathlib import Path
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np

from bert_jax.convert.formats import tensor_files
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.tensors import (
    WEIGHT_TYPES,
    LazyTensor,
    LazyTensors,
    lazy_from_array,
    lazy_transpose,
    weight_dtype_message,
)
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, read_json_object

WEIGHTS, CONFIG = "flax_model.msgpack", "config.json"
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "albert", "distilbert", "electra")
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def is_flax(directory: StoredPath) -> bool:
    """Whether a directory has a Flax model."""
    return any((Path(directory) / name).exists() for name in (WEIGHTS, f"{WEIGHTS}.index.json"))


def read(directory: StoredPath) -> HuggingFaceModel:
    """Read a model that transformers 4 saved from Flax.

    Args:
      directory: on disk (storage.download_if_needed).

    Raises:
      UserError: a file is missing or damaged, or the model's family is not supported.
    """
    path = Path(directory)
    config = _config(path / CONFIG)
    if (path / WEIGHTS).exists():
        leaves = _leaves(path / WEIGHTS)
    elif (path / f"{WEIGHTS}.index.json").exists():
        index = path / f"{WEIGHTS}.index.json"
        leaves = {}
        for shard in sorted(set(tensor_files.read_index(index).values())):
            leaves |= _leaves(path / shard)
    else:
        raise UserError(f"{directory}: no Flax model: looked for {WEIGHTS}, {WEIGHTS}.index.json")
    tensors = dict(_renamed(keys, array, directory) for keys, array in leaves.items())
    if config["model_type"] == "distilbert" and config.get("sinusoidal_pos_embds"):
        raise UserError(f"{path / CONFIG}: sinusoidal_pos_embds is set: Flax does not save such position tables")
    return HuggingFaceModel(config, LazyTensors(tensors), str(directory))


def _config(path: Path) -> dict[str, Any]:
    config = read_json_object(path, "copy it from the source of the weights")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(f"{path}: model_type '{kind}' is not one of {', '.join(MODEL_TYPES)}")
    return config


def _leaves(path: Path) -> dict[tuple[str, ...], np.ndarray]:
    """Arrays by path. Arrays above 1 GiB are stored in chunks, which flax joins; msgpack cannot execute code."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: this shard is missing: fetch it, too") from error
    try:
        tree = flax.serialization.msgpack_restore(content)
        tree = tree.get("params", tree)
        leaves = flax.traverse_util.flatten_dict(tree)
        return {tuple(map(str, path)): np.asarray(array) for path, array in leaves.items()}
    except Exception as error:
        raise UserError(f"{path}: truncated, or not a msgpack file of Flax: fetch it again") from error


def _renamed(path: tuple[str, ...], array: np.ndarray, source: StoredPath) -> tuple[str, LazyTensor]:
    name = ".".join((*path[:-1], LEAVES.get(path[-1], path[-1])))
    if array.dtype.name not in WEIGHT_TYPES:
        raise UserError(weight_dtype_message(source, name, array.dtype.name))
    tensor = lazy_from_array(array)
    return name, lazy_transpose(tensor) if path[-1] == "kernel" else tensor
