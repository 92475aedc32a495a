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
from bert_jax.convert.tensors import LazyStateDict, LazyTensor, lazy_from_array, lazy_transpose
from bert_jax.errors import UserError
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.readers import find_tokenizer_file

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
    directory = Path(source)
    config = read_json_object(directory / CONFIG, "copy it from the source of the weights")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES or config.get("sinusoidal_pos_embds"):  # Flax does not save sinusoidal tables
        supported = ", ".join(MODEL_TYPES)
        raise UserError(f"{directory / CONFIG}: '{kind}' is not one of {supported} with learned positions")
    whole = (directory / WEIGHTS).exists()
    files = {WEIGHTS} if whole else set(tensor_files.read_index(directory / INDEX).values())
    leaves = {path: array for file in sorted(files) for path, array in _leaves(directory / file).items()}
    tensors = LazyStateDict(dict(_renamed(path, array) for path, array in leaves.items()))
    hf_model = HuggingFaceModel(config, tensors, str(directory))
    return to_source_model("flax", hf_model, find_tokenizer_file(source), options)


def _leaves(path: Path) -> dict[tuple[str, ...], np.ndarray]:
    """Arrays by path. Arrays above 1 GiB are stored in chunks, which flax joins; msgpack cannot execute code."""
    try:
        tree = flax.serialization.msgpack_restore(path.read_bytes())
        tree = tree.get("params", tree)
        leaves = flax.traverse_util.flatten_dict(tree)
        return {tuple(map(str, path)): np.asarray(array) for path, array in leaves.items()}
    except Exception as error:
        raise UserError(f"{path}: missing, truncated, or not a msgpack file of Flax: fetch it again") from error


def _renamed(path: tuple[str, ...], array: np.ndarray) -> tuple[str, LazyTensor]:
    tensor = lazy_from_array(array)
    name = ".".join((*path[:-1], LEAVES.get(path[-1], path[-1])))
    return name, lazy_transpose(tensor) if path[-1] == "kernel" else tensor


INPUT = InputFormat(f"{WEIGHTS} with {CONFIG}", matches, read)
