"""Reads and writes weights of `transformers`, whole or in shards: safetensors or pickles.

Names of the files: huggingface/transformers src/transformers/utils/__init__.py (v4.46.3 and v5.23.0 alike).
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

import ml_dtypes  # noqa: F401 (registers the dtype bfloat16 in numpy)
import numpy as np
import safetensors
import safetensors.numpy

from bert_jax.convert.formats import torch_checkpoint
from bert_jax.convert.tensors import BUFFERS, WEIGHT_TYPES, LazyStateDict, LazyTensor, weight_dtype_message
from bert_jax.errors import UserError
from bert_jax.field_validation import FileName
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}
"""Safetensors' name of a dtype -> numpy's."""
NESTED = ("state_dict", "model_state_dict", "model")
"""Keys of the state dict in a trainer's file, beside its optimizer and counters."""
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def open_tensors(directory: StoredPath) -> LazyStateDict:
    """Every tensor of a model's directory by name, read on access.

    Args:
      directory: on disk (`storage.files.download_if_needed`).

    Raises:
      UserError: the checkpoint or a shard is missing or damaged; a pickle would execute code, or torch is missing; on
        access: a tensor's dtype is not one of weights.
    """
    place = Path(directory)
    openers = {SAFETENSORS: open_safetensors, PICKLE: _open_pickle}
    for name, opener in openers.items():
        if (place / name).exists():
            return _weights(opener(place / name))
        if (place / f"{name}.index.json").exists():
            return _weights(_shards(place / f"{name}.index.json", opener))
    raise UserError(f"{directory}: has no weights of transformers")


def _weights(tensors: LazyStateDict) -> LazyStateDict:
    """The tensors, with old names replaced."""
    renamed = {}
    for name, tensor in tensors.lazy_tensors.items():
        old = next((old for old in OLD_NAMES if name.endswith(old)), None)
        renamed[name.removesuffix(old) + OLD_NAMES[old] if old else name] = tensor
    return LazyStateDict(renamed)


def _shards(index: Path, opener: Callable[[Path], LazyStateDict]) -> LazyStateDict:
    """The tensors that an index names, each from its shard."""
    weight_map = read_index(index)
    shards = {}
    for name in sorted(set(weight_map.values())):
        if not os.path.isfile(index.parent / name):  # noqa: PTH113 (pathlib raises if a name is too long)
            raise UserError(f"{index}: names the shard {name}, which is missing: fetch it, too")
        shards[name] = opener(index.parent / name).lazy_tensors
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(f"{index}: tensor '{name}' is not in {shard}: they belong to different checkpoints")
    return LazyStateDict({name: shards[shard][name] for name, shard in weight_map.items()})


class _Index(TypedDict):
    weight_map: dict[str, FileName]


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name in the index's directory.

    Raises:
      UserError: the file is not an index, or names a file in another directory.
    """
    advice = "fetch the index again, and put all shards into its directory"
    return read_json_as(index, _Index, advice)["weight_map"]


def open_safetensors(path: Path, types: tuple[str, ...] = WEIGHT_TYPES) -> LazyStateDict:
    """The tensors of one file.

    Args:
      path: of the file.
      types: that a tensor may have, by numpy's names.

    Raises:
      UserError: the file is damaged; on access: a tensor has another type.
    """
    try:
        # The file stays open as long as a reader of one of its tensors exists.
        file = safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: truncated or damaged: fetch it again ({' '.join(str(error).split())})") from error
    return LazyStateDict({name: _stored(file, name, path, types) for name in file.keys()})  # noqa: SIM118 (not a dict)


def _stored(file: safetensors.safe_open, name: str, path: Path, types: tuple[str, ...]) -> LazyTensor:
    header = file.get_slice(name)
    dtype = TYPES.get(header.get_dtype(), header.get_dtype())

    def read() -> np.ndarray:
        if dtype not in types and not name.endswith(BUFFERS):
            raise UserError(weight_dtype_message(path, name, dtype))
        return file.get_tensor(name)

    return LazyTensor(tuple(header.get_shape()), dtype, read)


def _open_pickle(path: Path) -> LazyStateDict:
    """The tensors of a file of torch.save with a state dict, or one in a trainer's dict; see torch_checkpoint.load."""
    content = torch_checkpoint.load(path)
    if isinstance(content, Mapping):
        content = next((content[key] for key in NESTED if isinstance(content.get(key), Mapping)), content)
    return torch_checkpoint.as_lazy_state_dict(content, path)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a file that `transformers` reads."""
    # The library writes an array's memory without regard to its strides.
    whole = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    safetensors.numpy.save_file(whole, path, metadata={"format": "pt"})
