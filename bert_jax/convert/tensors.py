"""Tensors that are read on access: shape and dtype are known before, and renaming reads nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes  # noqa: F401 (registers the dtype bfloat16 in numpy)
import numpy as np

WEIGHT_TYPES = ("float64", "float32", "float16", "bfloat16")
BUFFERS = (".position_ids", ".token_type_ids")
"""Name suffixes of the integer constants that older files store with the weights."""


class LazyTensor(NamedTuple):
    """One tensor in a file, or a view of one."""

    shape: tuple[int, ...]
    dtype: str
    """numpy's name of the dtype; bfloat16 is that of ml_dtypes."""
    read: Callable[[], np.ndarray]
    """Each call reads the tensor again: nothing is cached."""


# Not Mapping[str, np.ndarray]: where annotations are checked at run time, that would read a tensor each time.
class LazyStateDict(Mapping):
    """Name -> array; each access reads that tensor."""

    def __init__(self, lazy_tensors: Mapping[str, LazyTensor]):
        self.lazy_tensors = dict(lazy_tensors)
        """By name, not read."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.lazy_tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.lazy_tensors)

    def __len__(self) -> int:
        return len(self.lazy_tensors)

    def __contains__(self, name: object) -> bool:
        # Mapping's default implementation would read the tensor.
        return name in self.lazy_tensors


def to_lazy_tensors(tensors: Mapping) -> dict[str, LazyTensor]:
    """The tensors of any mapping, without reading those that are lazy already."""
    if isinstance(tensors, LazyStateDict):
        return dict(tensors.lazy_tensors)
    return {name: lazy_from_array(array) for name, array in tensors.items()}


def lazy_from_array(array: np.ndarray) -> LazyTensor:
    """An array that is in memory already."""
    return LazyTensor(array.shape, array.dtype.name, lambda: array)


def weight_dtype_message(source: object, name: str, dtype: str) -> str:
    """Error message for a tensor whose dtype is not one of WEIGHT_TYPES."""
    return f"{source}: tensor '{name}' has type {dtype}: weights must be one of {', '.join(WEIGHT_TYPES)}: convert it"


def lazy_transpose(tensor: LazyTensor) -> LazyTensor:
    """The transpose; a view of the array once it is read."""
    return tensor._replace(shape=tensor.shape[::-1], read=lambda: tensor.read().T)


def lazy_row_slice(tensor: LazyTensor, start: int, stop: int) -> LazyTensor:
    """Rows start to stop - 1, or fewer if the tensor ends before; a tensor without axes stays as it is."""
    if not tensor.shape:
        return tensor
    rows = len(range(tensor.shape[0])[start:stop])
    return tensor._replace(shape=(rows, *tensor.shape[1:]), read=lambda: tensor.read()[start:stop])
