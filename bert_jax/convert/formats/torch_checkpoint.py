"""Files that `torch.save` wrote: read without executing anything, and told apart by their keys.

Such a file is a pickle, and a pickle may call any function. torch's own unpickler (weights_only) calls none but those
that make tensors; we let it make empty objects besides, in place of what trainers left beside their weights.
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

Kind = Literal["state dict", "fairseq", "nvidia"]
LEGACY_PICKLES = 5
"""A file of torch before 1.6 is so many pickles and then the tensors: magic number, protocol, system, object, keys."""
LEFT_BY_TRAINERS = (
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
"""Beginnings of names that may stand in a checkpoint of a trainer: settings (omegaconf, hydra, fairseq), counters
(numpy), data loaders (NVIDIA). None of them is imported or called: each is `Inert`."""


class Inert:
    """Stands where the file wants an object of a class that we do not import; keeps what it was given."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments
        self.state: Any = None

    def __new__(cls, *arguments: Any):
        """The unpickler may leave __init__ out."""
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any):
        self.state = state


def plain(value: Any) -> Any:
    """Settings as dicts and lists, whether they were a Namespace, a dict or a pickled DictConfig of omegaconf.

    What else is Inert becomes None. (omegaconf 2.0.6 dictconfig.py, listconfig.py and nodes.py: containers keep their
    nodes in `_content`, leaves their value in `_val`; enums are pickled as a call with their value.)
    """
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    if isinstance(value, Inert):
        state = value.state if isinstance(value.state, dict) else {}
        inside = next((state[key] for key in ("_content", "_val") if key in state), None)
        if inside is None and len(value.arguments) == 1:
            inside = value.arguments[0]
        return plain(inside)
    return value


def require_torch(path: object) -> Any:
    """The package torch, which is imported nowhere else here.

    Raises:
      UserError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{path}: pickles need the package torch: {install_command('torch')}") from error
    return torch


def load(path: Path, *, stand_ins: bool = False) -> Any:
    """What `torch.save` was given, on the CPU; the tensors of a file since torch 1.6 stay on disk until they are used.

    Args:
      path: a local file.
      stand_ins: whether things that trainers leave in their checkpoints may stand in it, as Inert.

    Raises:
      UserError: torch is missing; there is no such file, it is damaged or no checkpoint; it wants to execute code.
    """
    torch = require_torch(path)
    try:
        names = _globals(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except Exception as error:
        raise UserError(f"{path}: truncated, or no file of torch.save: fetch it again") from error
    known: list[Any] = [(argparse.Namespace, "argparse.Namespace")] if stand_ins else []
    allowed = {name for name in names if stand_ins and name.startswith(LEFT_BY_TRAINERS)}
    known += [(_inert(name), name) for name in sorted(allowed)]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        asked = sorted(name for name in names - allowed - {"argparse.Namespace"} if not _of_tensors(name))
        what = ", ".join(asked[:5]) or "something that torch does not allow"
        raise UserError(
            f"{path}: refused, because to read it would execute {what}: save the plain state dict again where you "
            "trust it, torch.save(model.state_dict(), ...)"
        ) from error
    except Exception as error:
        raise UserError(f"{path}: truncated, or no file of torch.save: fetch it again ({_line(error)})") from error


def _inert(name: str) -> type[Inert]:
    # Of each name a class of its own: the unpickler looks classes up by identity, and messages name them.
    return type(name.rpartition(".")[2], (Inert,), {})


def _of_tensors(name: str) -> bool:
    """Whether a plain state dict names it; what torch allows besides never is the culprit. For messages only."""
    tensors = ("torch._utils.", "torch._tensor.", "torch.storage.", "torch.nn.parameter.")
    plain_names = ("collections.OrderedDict", "collections.Counter", "builtins.set")
    return name.startswith(tensors) or name in plain_names or re.fullmatch(r"torch\.\w+", name) is not None


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:120]


def _globals(path: Path) -> set[str]:
    """Every class and function that a file names, found without unpickling; of both formats.

    `torch.serialization.get_unsafe_globals_in_checkpoint` knows the new one only, and stops at a pickle of protocol 4.
    """
    with contextlib.ExitStack() as stack:
        if zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            (record,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return set(_named(io.BytesIO(archive.read(record))))
        file = stack.enter_context(path.open("rb"))
        return {name for _ in range(LEGACY_PICKLES) for name in _named(file)}


def _named(file: Any) -> Iterator[str]:
    """The globals of one pickle; those of protocol 4 (STACK_GLOBAL) as far as their strings stand right before."""
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


def open_state(state: object, source: object) -> LazyTensors:
    """The tensors of a state dict.

    Raises:
      UserError: it is none; asked for a tensor that is no weight, or not in memory's plain order.
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
            # torch gives numpy no bfloat16: the bits go over as integers.
            return dense.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return dense.numpy()

    return LazyTensor(tuple(tensor.shape), dtype, read)


def kind_of(path: Path) -> Kind:
    """What wrote a file, by its keys: ``args`` or ``cfg`` beside ``model`` is fairseq, ``model`` alone NVIDIA.

    Raises:
      UserError: as `load`; or it is none of them.
    """
    content = load(path, stand_ins=True)
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        return "fairseq" if {"args", "cfg"} & set(content) else "nvidia"
    torch = require_torch(path)
    if isinstance(content, Mapping) and any(isinstance(value, torch.Tensor) for value in content.values()):
        return "state dict"
    raise UserError(f"{path}: neither a state dict nor a checkpoint of fairseq or NVIDIA: its keys are not theirs")


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A plain state dict, as `torch.load(path, weights_only=True)` reads it.

    Raises:
      UserError: torch is missing.
    """
    torch = require_torch(path)
    state = {}
    for name, array in tensors.items():
        # A copy: torch warns of arrays that cannot be written to.
        array = np.array(array, order="C")
        if array.dtype.name == "bfloat16":
            state[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            state[name] = torch.from_numpy(array)
    # Into a file of Python's: torch's own raises errors that do not say what the system said.
    with path.open("wb") as file:
        torch.save(state, file)
