"""Reads files of `torch.save` without executing code, and detects which program wrote them.

Such a file is a pickle, and a pickle may call any function. torch's unpickler with weights_only calls only functions
that create tensors. Here it may also create placeholders for objects that trainers store with their weights.
"""

import argparse
import contextlib
import io
import pickle
import pickletools
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from bert_jax.convert.tensors import BUFFERS, WEIGHT_TYPES, LazyTensor, LazyTensors, weight_dtype_message
from bert_jax.errors import UserError, install_command

Writer = Literal["state dict", "fairseq", "nvidia"]
LEGACY_PICKLES = 5
"""Number of pickles before the tensors in files of torch before 1.6: magic number, protocol, system, object, keys."""
TRAINER_CLASSES = (
    "__main__.",
    "enum.",
    "fairseq.",
    "hydra.",
    "numpy.",
    "omegaconf.",
    "torch.utils.data.",
    "typing.",
    "builtins.bool",
    "builtins.dict",
    "builtins.float",
    "builtins.int",
    "builtins.list",
    "builtins.str",
    "collections.defaultdict",
    "_codecs.encode",
)
"""Prefixes of class names that checkpoints of trainers may contain: settings (omegaconf, hydra, fairseq), counters
(numpy), data loaders (NVIDIA). None of them is imported or called: each becomes a `Placeholder`."""


class Placeholder:
    """Replaces an object whose class is not imported; keeps its arguments and state."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments
        self.state: Any = None

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


def require_torch(path: object) -> Any:
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
    torch = require_torch(path)
    try:
        names = _globals(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except Exception as error:
        raise UserError(f"{path}: truncated, or not a file of torch.save: fetch it again") from error
    known: list[Any] = [(argparse.Namespace, "argparse.Namespace")] if placeholders else []
    allowed = {name for name in names if placeholders and name.startswith(TRAINER_CLASSES)}
    known += [(_placeholder_class(name), name) for name in sorted(allowed)]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        unsafe = sorted(name for name in names - allowed - {"argparse.Namespace"} if not _of_tensors(name))
        what = ", ".join(unsafe[:5]) or "a function that torch does not allow"
        raise UserError(
            f"{path}: refused, because reading it would execute {what}: if you trust the file, save the plain "
            "state dict again with torch.save(model.state_dict(), ...)"
        ) from error
    except Exception as error:
        raise UserError(f"{path}: truncated, or not a file of torch.save: fetch it again ({_line(error)})") from error


def _placeholder_class(name: str) -> type[Placeholder]:
    # A class for each name: the unpickler looks classes up by identity, and messages show their names.
    return type(name.rpartition(".")[2], (Placeholder,), {})


def _of_tensors(name: str) -> bool:
    """Whether a plain state dict contains this name. Only used for error messages."""
    tensors = ("torch._utils.", "torch._tensor.", "torch.storage.", "torch.nn.parameter.")
    plain_names = ("collections.OrderedDict", "collections.Counter", "builtins.set")
    return name.startswith(tensors) or name in plain_names or re.fullmatch(r"torch\.\w+", name) is not None


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:120]


def _globals(path: Path) -> set[str]:
    """Every class and function that a file refers to, without unpickling; supports both file formats.

    `torch.serialization.get_unsafe_globals_in_checkpoint` supports only the new one, and not protocol 4.
    """
    with contextlib.ExitStack() as stack:
        if zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            (record,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return set(_named(io.BytesIO(archive.read(record))))
        file = stack.enter_context(path.open("rb"))
        return {name for _ in range(LEGACY_PICKLES) for name in _named(file)}


def _named(file: Any) -> Iterator[str]:
    """The globals of one pickle; those of protocol 4 (STACK_GLOBAL) only if their strings directly precede them."""
    strings: list[str] = []
    for operation, argument, _ in pickletools.genops(file):
        if operation.name in ("GLOBAL", "INST"):
            module, _, name = argument.partition(" ")
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            yield f"{module}.{name}"
        elif operation.name == "STACK_GLOBAL":
            yield ".".join(strings[-2:])
        elif isinstance(argument, str):
            strings.append(argument)


def lazy_state_dict(state: object, source: object) -> LazyTensors:
    """The tensors of a state dict.

    Raises:
      UserError: it is not a state dict; on access: a tensor is not strided, or its dtype is not one of weights.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise UserError(f"{source}: holds {type(state).__name__}, not a state dict: save model.state_dict()")
    torch = require_torch(source)
    return LazyTensors(
        {name: _stored(name, value, source) for name, value in state.items() if isinstance(value, torch.Tensor)}
    )


def _stored(name: str, tensor: Any, source: object) -> LazyTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    torch = require_torch(source)

    def read() -> np.ndarray:
        if (dtype not in WEIGHT_TYPES and not name.endswith(BUFFERS)) or tensor.layout != torch.strided:
            raise UserError(weight_dtype_message(source, name, dtype))
        dense = tensor.detach()
        if dtype == "bfloat16":
            # torch cannot convert bfloat16 to numpy: reinterpret the bits.
            return dense.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return dense.numpy()

    return LazyTensor(tuple(tensor.shape), dtype, read)


def detect_writer(path: Path) -> Writer:
    """Which program wrote a file, by its keys: ``model`` with ``args`` or ``cfg`` is fairseq, ``model`` alone NVIDIA.

    Raises:
      UserError: as `load`; or no known program.
    """
    content = load(path, placeholders=True)
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        return "fairseq" if {"args", "cfg"} & set(content) else "nvidia"
    torch = require_torch(path)
    if isinstance(content, Mapping) and any(isinstance(value, torch.Tensor) for value in content.values()):
        return "state dict"
    raise UserError(f"{path}: not a state dict, and not a checkpoint of fairseq or NVIDIA")


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a plain state dict that `torch.load(path, weights_only=True)` reads.

    Raises:
      UserError: torch is missing.
    """
    torch = require_torch(path)
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
