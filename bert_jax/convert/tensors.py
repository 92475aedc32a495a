"""Tensors that are read when they are asked for: shape and type are known before, and renaming reads nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes  # noqa: F401 (numpy learns the name bfloat16 from it)
import numpy as np

WEIGHT_TYPES = ("float64", "float32", "float16", "bfloat16")
BUFFERS = (".position_ids", ".token_type_ids")
"""Ends of the names of constants, integers, that older files have beside the weights."""


class Stored(NamedTuple):
    """One tensor in a file, or what becomes of it."""

    shape: tuple[int, ...]
    dtype: str
    """numpy's name of its type; bfloat16 is that of ml_dtypes."""
    read: Callable[[], np.ndarray]
    """Each call reads it anew: nothing is kept."""


# Not Mapping[str, np.ndarray]: where annotations are checked at run time, that would read a tensor each time.
class LazyTensors(Mapping):
    """Name -> array; asked for a tensor, it reads that one."""

    def __init__(self, stored: Mapping[str, Stored]):
        self.stored = dict(stored)
        """The same by name, not read."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        # A Mapping's own would read the tensor.
        return name in self.stored


def stored(tensors: Mapping) -> dict[str, Stored]:
    """The tensors of any mapping, not read if they need not be."""
    if isinstance(tensors, LazyTensors):
        return dict(tensors.stored)
    return {name: in_memory(array) for name, array in tensors.items()}


def in_memory(array: np.ndarray) -> Stored:
    """An array that is there already."""
    return Stored(array.shape, array.dtype.name, lambda: array)


def no_weight(source: object, name: str, dtype: str) -> str:
    """The message about a tensor of integers or of 8 bits."""
    return f"{source}: tensor '{name}' has type {dtype}, which is no weight's ({', '.join(WEIGHT_TYPES)}): convert it"


def transposed(tensor: Stored) -> Stored:
    """[inputs, outputs] as [outputs, inputs]; a view, once it is read."""
    return tensor._replace(shape=tensor.shape[::-1], read=lambda: tensor.read().T)


def rows(tensor: Stored, start: int, stop: int) -> Stored:
    """Some rows of it, start <= row < stop <= its rows."""
    return tensor._replace(shape=(stop - start, *tensor.shape[1:]), read=lambda: tensor.read()[start:stop])
