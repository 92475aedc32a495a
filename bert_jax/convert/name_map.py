"""Maps tensor names of transformers to parameter paths of bert_jax, and converts the tensors in both directions.

Shapes: dense weights are [outputs, inputs] in transformers. In bert_jax the inputs come first, attention heads have an
axis of their own, and a leading axis runs over layers or parameter groups.
"""

import difflib
import enum
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.tensors import WEIGHT_TYPES, LazyTensor, to_lazy_tensors, weight_dtype_message
from bert_jax.errors import UserError

Params = dict[str, Any]


class Layout(enum.Enum):
    """How a parameter becomes a tensor of transformers; the value is the number of the parameter's input axes."""

    VECTOR = None
    """A bias, flattened; also scales, and embedding tables, whose two axes are the same on both sides."""
    KERNEL = 1
    MERGING = 2
    """The kernel that joins the attention heads: its inputs are [heads, head_size]."""


class Entry(NamedTuple):
    """One tensor of transformers, or one block of its rows, and the parameter it belongs to."""

    hf_name: str
    param_path: str
    kind: Layout
    part: int | None = None
    """0, 1, 2 for query, key, value, which bert_jax keeps in one array."""
    block: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal blocks of the tensor's rows."""
    first: int = 0
    """The first layer that has the tensor."""
    layer: int | None = None
    """Index on the leading axis of the parameter; None where it has none, and in the tables of families."""


def same_layout(hf_name: str, param_path: str) -> tuple[Entry, ...]:
    """A tensor that has the same shape on both sides, such as an embedding table or a bias."""
    return (Entry(hf_name, param_path, Layout.VECTOR),)


def dense(
    hf_name: str, param_path: str, part: int | None = None, *, bias: bool = True, merging: bool = False
) -> tuple[Entry, ...]:
    """A dense layer: weight and, unless the family has none, bias."""
    kernel = Entry(f"{hf_name}.weight", f"{param_path}/kernel", Layout.MERGING if merging else Layout.KERNEL, part=part)
    return (kernel, Entry(f"{hf_name}.bias", f"{param_path}/bias", Layout.VECTOR, part=part)) if bias else (kernel,)


def norm(hf_name: str, param_path: str, *, bias: bool = True, first: int = 0) -> tuple[Entry, ...]:
    """A LayerNorm: scale and, unless the family has none, bias."""
    scale = Entry(f"{hf_name}.weight", f"{param_path}/scale", Layout.VECTOR, first=first)
    return (scale, Entry(f"{hf_name}.bias", f"{param_path}/bias", Layout.VECTOR, first=first)) if bias else (scale,)


def _view(params: Params, entry: Entry) -> np.ndarray:
    """The part of `params` that an entry names, as a writable view."""
    node: Any = params
    for name in entry.param_path.split("/"):
        node = node[name]
    if entry.layer is not None:
        node = node[entry.layer]
    if entry.part is not None:
        node = node[entry.part] if entry.kind is Layout.VECTOR else node[:, entry.part]
    return node


def _hf_shape(shape: tuple[int, ...], entry: Entry) -> tuple[int, ...]:
    """Shape of the block in transformers."""
    if entry.kind is not Layout.VECTOR:
        inputs = entry.kind.value
        return math.prod(shape[inputs:]), math.prod(shape[:inputs])
    return (math.prod(shape),) if entry.param_path.endswith("/bias") else shape


def to_hf_tensors(entries: Iterable[Entry], params: Params) -> dict[str, np.ndarray]:
    """Parameters (numpy, float32) with the names and layout of transformers."""
    blocks: dict[str, dict[int, np.ndarray]] = {}
    for entry in entries:
        array = _view(params, entry)
        outputs, *inputs = _hf_shape(array.shape, entry)
        if entry.kind is Layout.VECTOR:
            array = array.reshape(outputs, *inputs)
        else:
            array = array.reshape(*inputs, outputs).T
        blocks.setdefault(entry.hf_name, {})[entry.block[0]] = array
    return {
        name: np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate([parts[i] for i in sorted(parts)])
        for name, parts in blocks.items()
    }


def from_hf_tensors(
    entries: Iterable[Entry], hf_model: HuggingFaceModel, shapes: Params, unused_params: Mapping[str, float]
) -> Params:
    """Parameters (numpy, float32) from tensors of transformers.

    Args:
      entries: of the model.
      hf_model: the source.
      shapes: tree with the shape of every parameter.
      unused_params: by path, values for parameters that no layer reads and transformers does not have.

    Raises:
      UserError: a tensor is missing, has another shape than the config says, or a value that is not finite in float32.
    """
    entries = list(entries)
    source_tensors = to_lazy_tensors(hf_model.tensors)
    # Views of one number: sizes in a config are not trusted, so nothing is allocated before they are checked.
    unallocated = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), shapes)
    for entry in entries:
        _check_shape(hf_model, source_tensors, entry, _hf_shape(_view(unallocated, entry).shape, entry))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    for path, value in unused_params.items():
        _view(params, Entry("", path, Layout.VECTOR))[...] = value
    for entry in entries:
        view = _view(params, entry)
        hf_block = _read(source_tensors[entry.hf_name], entry, _hf_shape(view.shape, entry)[0], hf_model.source)
        view[...] = (hf_block if entry.kind is Layout.VECTOR else hf_block.T).reshape(view.shape)
    return params


def _check_shape(
    hf_model: HuggingFaceModel, source_tensors: Mapping[str, LazyTensor], entry: Entry, shape: tuple[int, ...]
) -> None:
    """Raise UserError if a tensor is missing, has blocks of another shape, or a dtype that weights do not have."""
    if entry.hf_name not in source_tensors:
        raise UserError(
            f"{hf_model.source}: tensor '{entry.hf_name}' is missing{_nearest(entry.hf_name, source_tensors)}"
        )
    actual, expected = source_tensors[entry.hf_name].shape, (shape[0] * entry.block[1], *shape[1:])
    if actual != expected:
        hint = ""
        if len(actual) == 2 and actual[1:] == expected[1:] and "word_embeddings" in entry.hf_name:
            hint = ": the vocabulary has another size"
        shapes = f"shape {list(actual)}, the config says {list(expected)}"
        raise UserError(f"{hf_model.source}: tensor '{entry.hf_name}' has {shapes}{hint}")
    if source_tensors[entry.hf_name].dtype not in WEIGHT_TYPES:
        raise UserError(weight_dtype_message(hf_model.source, entry.hf_name, source_tensors[entry.hf_name].dtype))


def _read(tensor: LazyTensor, entry: Entry, rows: int, source: str) -> np.ndarray:
    """One block of a tensor, as float32."""
    first = entry.block[0] * rows
    with np.errstate(over="ignore"):
        block = np.asarray(tensor.read()[first : first + rows], np.float32)
    check_finite(entry.hf_name, block, source, first)
    return block


def check_finite(name: str, array: np.ndarray, source: str, first: int = 0) -> None:
    """Raise UserError for a value that is not finite, named with its tensor and index.

    Args:
      name: of the tensor.
      array: the tensor, or its rows from `first` on.
      source: where it was read.
      first: number of the first row.
    """
    finite = np.isfinite(array)
    if finite.all():
        return
    index = np.unravel_index(int(np.argmin(finite)), array.shape)
    place = [int(i) + (first if axis == 0 else 0) for axis, i in enumerate(index)]
    raise UserError(
        f"{source}: tensor '{name}' has the value {array[index]} at {place}: every parameter must be finite in "
        "float32; use an earlier checkpoint, or fetch the file again"
    )


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; the nearest name is '{near[0]}'" if near else ""


def refuse_unknown_tensors(
    entries: Iterable[Entry], hf_model: HuggingFaceModel, copies: Mapping[str, str], buffers: Iterable[str]
) -> None:
    """Check that every tensor of the source is known.

    Args:
      entries: of the model.
      hf_model: the source.
      copies: name of a tied copy -> name of the tensor that it is tied to.
      buffers: patterns of names that are not parameters.

    Raises:
      UserError: a name is unknown (with the nearest known one); or a copy differs from the tensor it is tied to.
    """
    known = {entry.hf_name for entry in entries}
    patterns = [re.compile(pattern) for pattern in buffers]
    for name in hf_model.tensors:
        if name in known or any(pattern.fullmatch(name) for pattern in patterns):
            continue
        if name in copies:
            original = copies[name]
            if original in hf_model.tensors and not np.array_equal(
                hf_model.tensors[name], hf_model.tensors[original], equal_nan=True
            ):
                raise UserError(
                    f"{hf_model.source}: tensor '{name}' differs from '{original}': only decoders that are tied to the "
                    "word embeddings can be read"
                )
        else:
            near = _nearest(name, known)
            raise UserError(
                f"{hf_model.source}: tensor '{name}' is not part of this architecture{near}; to "
                f"leave it out, use bert-jax convert --drop '{name}'"
            )
