"""Tensors that are read when they are asked for: shape and type are known before, and renaming reads nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes  # noqa: F401 (numpy learns the name bfloat16 from it)
import numpy as np

WEIGHT_TYPES = ("float64", "float32", "float16", "bfloat16")
BUFFERS = (".position_ids", ".token_type_ids")
"""Ends of the names of constants, integers, that older files have beside the weights."""


class LazyTensor(NamedTuple):
    """One tensor in a file, or what becomes of it."""

    shape: tuple[int, ...]
    dtype: str
    """numpy's name of its type; bfloat16 is that of ml_dtypes."""
    read: Callable[[], np.ndarray]
    """Each call reads it anew: nothing is kept."""


# Not Mapping[str, np.ndarray]: where annotations are checked at run time, that would read a tensor each time.
class LazyTensors(Mapping):
    """Name -> array; asked for a tensor, it reads that one."""

    def __init__(self, to_lazy: Mapping[str, LazyTensor]):
        self.lazy_tensors = dict(to_lazy)
        """The same by name, not read."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.lazy_tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.lazy_tensors)

    def __len__(self) -> int:
        return len(self.lazy_tensors)

    def __contains__(self, name: object) -> bool:
        # A Mapping's own would read the tensor.
        return name in self.lazy_tensors


def to_lazy(tensors: Mapping) -> dict[str, LazyTensor]:
    """The tensors of any mapping, not read if they need not be."""
    if isinstance(tensors, LazyTensors):
        return dict(tensors.lazy_tensors)
    return {name: lazy_from_array(array) for name, array in tensors.items()}


def lazy_from_array(array: np.ndarray) -> LazyTensor:
    """An array that is there already."""
    return LazyTensor(array.shape, array.dtype.name, lambda: array)


def weight_dtype_message(source: object, name: str, dtype: str) -> str:
    """The message about a tensor of integers or of 8 bits."""
    return f"{source}: tensor '{name}' has type {dtype}, which is no weight's ({', '.join(WEIGHT_TYPES)}): convert it"


def lazy_transpose(tensor: LazyTensor) -> LazyTensor:
    """[inputs, outputs] as [outputs, inputs]; a view, once it is read."""
    return tensor._replace(shape=tensor.shape[::-1], read=lambda: tensor.read().T)


def lazy_row_slice(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    """Some rows of it, start <= row < stop <= its rows."""
    return tensor._replace(shape=(stop - start, *tensor.shape[1:]), read=lambda: tensor.read()[start:stop])
