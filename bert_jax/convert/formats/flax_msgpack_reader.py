"""Reads Flax models of transformers 4: ``flax_model.msgpack``, whole or in shards, and ``config.json``.

Module names equal those of the torch models, heads included; only the leaves differ: a dense `kernel` is
[inputs, outputs], a LayerNorm has a `scale`, a table an `embedding`. (huggingface/transformers v4.46.3,
src/transformers/models/{bert,roberta,albert,distilbert,electra}/modeling_flax_*.py; sharding: modeling_flax_utils.py.)
If the output table is the word table, only the head's bias is saved.
"""

from pathlib import Path

import flax.serialization
import flax.traverse_util
import numpy as np

from bert_jax.convert.formats import tensor_files
from bert_jax.convert.formats.format import InputFormat, ReadOptions, to_source_model
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
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
from bert_jax.tokenizers.files import find_tokenizer_file

WEIGHTS, INDEX, CONFIG = "flax_model.msgpack", "flax_model.msgpack.index.json", "config.json"
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "albert", "distilbert", "electra")
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def matches(source: StoredPath) -> bool:
    """Whether a directory has a Flax model."""
    return any((source / name).exists() for name in (WEIGHTS, INDEX))


def read(source: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read a model that transformers 4 saved from Flax.

    Raises:
      UserError: a file is missing or damaged, or the model's family is not supported.
    """
    return to_source_model("flax", read_hf_model(source), find_tokenizer_file(source), options)


def read_hf_model(directory: StoredPath) -> HuggingFaceModel:
    """The model with the names of transformers."""
    directory = Path(directory)
    config = read_json_object(directory / CONFIG, "copy it from the source of the weights")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(f"{directory / CONFIG}: model_type '{kind}' is not one of {', '.join(MODEL_TYPES)}")
    if kind == "distilbert" and config.get("sinusoidal_pos_embds"):
        raise UserError(f"{directory / CONFIG}: sinusoidal_pos_embds is set: Flax does not save such position tables")
    whole = (directory / WEIGHTS).exists()
    files = {WEIGHTS} if whole else set(tensor_files.read_index(directory / INDEX).values())
    leaves = {path: array for file in sorted(files) for path, array in _leaves(directory / file).items()}
    tensors = dict(_renamed(path, array, directory) for path, array in leaves.items())
    return HuggingFaceModel(config, LazyTensors(tensors), str(directory))


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


INPUT = InputFormat(f"{WEIGHTS} with {CONFIG}", matches, read)
