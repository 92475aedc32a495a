"""Flax models of transformers 4: ``flax_model.msgpack``, whole or in shards, with ``config.json`` beside it.

Their modules bear the names of the torch ones, heads included, so that only the leaves differ: a dense `kernel` is
[inputs, outputs], a LayerNorm has a `scale`, a table an `embedding`. (huggingface/transformers v4.46.3,
src/transformers/models/{bert,roberta,albert,distilbert,electra}/modeling_flax_*.py; sharding: modeling_flax_utils.py.)
Where the output table is the word table, they save the head's bias only.
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
from bert_jax.storage import StoredPath, read_object

WEIGHTS, CONFIG = "flax_model.msgpack", "config.json"
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "albert", "distilbert", "electra")
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def is_flax(directory: StoredPath) -> bool:
    """Whether a directory holds such a model."""
    return any((Path(directory) / name).exists() for name in (WEIGHTS, f"{WEIGHTS}.index.json"))


def read(directory: StoredPath) -> HuggingFaceModel:
    """A model as transformers 4 saved it from Flax.

    Args:
      directory: on disk (storage.fetched).

    Raises:
      UserError: a file is missing or damaged, or the model is of no family whose names are known.
    """
    place = Path(directory)
    config = _config(place / CONFIG)
    if (place / WEIGHTS).exists():
        leaves = _leaves(place / WEIGHTS)
    elif (place / f"{WEIGHTS}.index.json").exists():
        index = place / f"{WEIGHTS}.index.json"
        leaves = {}
        for shard in sorted(set(tensor_files.read_index(index).values())):
            leaves |= _leaves(place / shard)
    else:
        raise UserError(f"{directory}: no Flax model there: looked for {WEIGHTS}, {WEIGHTS}.index.json")
    tensors = dict(_renamed(path, array, directory) for path, array in leaves.items())
    if config["model_type"] == "distilbert" and config.get("sinusoidal_pos_embds"):
        raise UserError(f"{place / CONFIG}: sinusoidal_pos_embds is set: such position tables are not saved by Flax")
    return HuggingFaceModel(config, LazyTensors(tensors), str(directory))


def _config(path: Path) -> dict[str, Any]:
    config = read_object(path, "copy it from where the weights came from")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(f"{path}: model_type '{kind}' is not one of {', '.join(MODEL_TYPES)}")
    return config


def _leaves(path: Path) -> dict[tuple[str, ...], np.ndarray]:
    """Arrays by path. Arrays above 1 GiB lie there in chunks, which flax joins; msgpack can execute nothing."""
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
        raise UserError(f"{path}: truncated, or no msgpack of Flax: fetch it again") from error


def _renamed(path: tuple[str, ...], array: np.ndarray, source: StoredPath) -> tuple[str, LazyTensor]:
    name = ".".join((*path[:-1], LEAVES.get(path[-1], path[-1])))
    if array.dtype.name not in WEIGHT_TYPES:
        raise UserError(weight_dtype_message(source, name, array.dtype.name))
    tensor = lazy_from_array(array)
    return name, lazy_transpose(tensor) if path[-1] == "kernel" else tensor
