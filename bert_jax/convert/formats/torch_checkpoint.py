"""Reads and writes files of `torch.save`. Reading them executes no code.

Such a file is a pickle, and a pickle may call any function. `torch.load` with weights_only calls only functions that
create tensors. Here it may also create placeholders for objects that trainers store with their weights.
"""

import argparse
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bert_jax.convert.tensors import BUFFERS, WEIGHT_TYPES, LazyStateDict, LazyTensor, weight_dtype_message
from bert_jax.errors import UserError, install_command

TRAINER_CLASSES = (
    *("__main__.", "enum.", "fairseq.", "hydra.", "numpy.", "omegaconf.", "torch.utils.data.", "typing."),
    *("builtins.bool", "builtins.dict", "builtins.float", "builtins.int", "builtins.list", "builtins.str"),
    *("collections.defaultdict", "_codecs.encode"),
)
"""Prefixes of class names that checkpoints of trainers may contain: settings (omegaconf, hydra, fairseq), counters
(numpy), data loaders (NVIDIA). None of them is imported or called: each becomes a `Placeholder`."""


class Placeholder:
    """Replaces an object whose class is not imported; keeps its arguments and state."""

    def __new__(cls, *arguments: Any):
        """Set the attributes, because the unpickler may skip __init__."""
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any):
        self.state = state


def to_plain(value: Any) -> Any:
    """Settings as dicts and lists, from a Namespace, a dict or a pickled DictConfig of omegaconf.

    Other placeholders become None. (omegaconf 2.0.6 dictconfig.py, listconfig.py and nodes.py: containers keep their
    nodes in `_content`, leaves their value in `_val`; enums are pickled as a call with their value.)
    """
    if isinstance(value, argparse.Namespace):
        return to_plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(child) for child in value]
    if isinstance(value, Placeholder):
        state = value.state if isinstance(value.state, dict) else {}
        inside = next((state[key] for key in ("_content", "_val") if key in state), None)
        if inside is None and len(value.arguments) == 1:
            inside = value.arguments[0]
        return to_plain(inside)
    return value


def _require_torch(path: object) -> Any:
    """Import torch.

    Raises:
      UserError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{path}: pickles need the package torch: {install_command('torch')}") from error
    return torch


def load(path: Path, *, placeholders: bool = False) -> Any:
    """Load a file of `torch.save` to the CPU; tensors of torch 1.6 and later stay on disk until they are used.

    Args:
      path: a local file.
      placeholders: whether to accept objects of trainers, as `Placeholder`.

    Raises:
      UserError: torch is missing; the file is missing, damaged or not a checkpoint; it would execute code.
    """
    torch = _require_torch(path)
    known: dict[str, type] = {"argparse.Namespace": argparse.Namespace} if placeholders else {}
    while True:
        try:
            with torch.serialization.safe_globals([(kind, name) for name, kind in known.items()]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except FileNotFoundError as error:
            raise UserError(f"{path} does not exist") from error
        except pickle.UnpicklingError as error:
            name = _refused_global(error)
            if name is None:
                raise _damaged(path, error) from error
            if not placeholders or not name.startswith(TRAINER_CLASSES) or name in known:
                raise UserError(
                    f"{path}: refused, because reading it would execute {name}: if you trust the file, save the plain "
                    "state dict again with torch.save(model.state_dict(), ...)"
                ) from error
            # A class for each name: the unpickler looks classes up by identity, and messages show their names.
            known[name] = type(name.rpartition(".")[2], (Placeholder,), {})
        except Exception as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    line = (" ".join(str(error).split()) or type(error).__name__)[:120]
    return UserError(f"{path}: truncated, or not a file of torch.save: fetch it again ({line})")


def _refused_global(error: pickle.UnpicklingError) -> str | None:
    """The class or function that torch's unpickler does not call; None if it refused the file for another reason."""
    match = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", str(error))
    if match is None:
        return None
    return match[1] if "." in match[1] else f"builtins.{match[1]}"


def as_lazy_state_dict(state: object, source: object) -> LazyStateDict:
    """The tensors of a state dict.

    Raises:
      UserError: it is not a state dict; on access: a tensor is not strided, or its dtype is not one of weights.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise UserError(f"{source}: holds {type(state).__name__}, not a state dict: save model.state_dict()")
    torch = _require_torch(source)
    return LazyStateDict(
        {name: _lazy(name, value, source) for name, value in state.items() if isinstance(value, torch.Tensor)}
    )


def _lazy(name: str, tensor: Any, source: object) -> LazyTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    torch = _require_torch(source)

    def read() -> np.ndarray:
        if (dtype not in WEIGHT_TYPES and not name.endswith(BUFFERS)) or tensor.layout != torch.strided:
            raise UserError(weight_dtype_message(source, name, dtype))
        dense = tensor.detach()
        if dtype == "bfloat16":
            # torch cannot convert bfloat16 to numpy: reinterpret the bits.
            return dense.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return dense.numpy()

    return LazyTensor(tuple(tensor.shape), dtype, read)


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a plain state dict that `torch.load(path, weights_only=True)` reads.

    Raises:
      UserError: torch is missing.
    """
    torch = _require_torch(path)
    state = {}
    for name, array in tensors.items():
        # A copy, because torch warns about read-only arrays.
        array = np.array(array, order="C")
        if array.dtype.name == "bfloat16":
            state[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            state[name] = torch.from_numpy(array)
    # A Python file object, because torch's writer hides the error of the operating system.
    with path.open("wb") as file:
        torch.save(state, file)
