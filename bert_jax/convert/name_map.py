"""Tables of names: where each tensor of theirs lies in ours, and the two ways across.

Shapes: theirs are [outputs, inputs] for dense weights; ours have the inputs first, heads apart, and a leading axis over
layers or parameter groups.
"""

import difflib
import enum
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.convert.hf_model import Form
from bert_jax.convert.tensors import WEIGHT_TYPES, Stored, no_weight, stored
from bert_jax.errors import UserError

Params = dict[str, Any]


class Kind(enum.Enum):
    """How one tensor of ours becomes one of theirs; the value is the number of input axes that a kernel has in ours."""

    VECTOR = None
    """Flattened; tables too, which have the same two axes on both sides."""
    KERNEL = 1
    MERGING = 2
    """The kernel behind the attention heads, whose inputs are [heads, size]."""


class Entry(NamedTuple):
    """One tensor of theirs, or one block of its rows, and where it lies in ours."""

    theirs: str
    ours: str
    kind: Kind
    layer: int | None = None
    """Index on the leading axis of ours."""
    part: int | None = None
    """0, 1, 2 for query, key, value, which we keep in one array."""
    block: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal blocks of their rows."""


def table(theirs: str, ours: str) -> Iterator[Entry]:
    """A tensor that is the same on both sides."""
    yield Entry(theirs, ours, Kind.VECTOR)


def dense(
    theirs: str,
    ours: str,
    layer: int | None = None,
    part: int | None = None,
    *,
    bias: bool = True,
    merging: bool = False,
) -> Iterator[Entry]:
    """A dense layer: weight and, unless the family has none, bias."""
    kind = Kind.MERGING if merging else Kind.KERNEL
    yield Entry(f"{theirs}.weight", f"{ours}/kernel", kind, layer, part)
    if bias:
        yield Entry(f"{theirs}.bias", f"{ours}/bias", Kind.VECTOR, layer, part)


def norm(theirs: str, ours: str, layer: int | None = None, *, bias: bool = True) -> Iterator[Entry]:
    """A LayerNorm: scale and, unless the family has none, bias."""
    yield Entry(f"{theirs}.weight", f"{ours}/scale", Kind.VECTOR, layer)
    if bias:
        yield Entry(f"{theirs}.bias", f"{ours}/bias", Kind.VECTOR, layer)


def _view(params: Params, entry: Entry) -> np.ndarray:
    """The logical tensor of an entry, as a view that can be read and written."""
    node: Any = params
    for name in entry.ours.split("/"):
        node = node[name]
    if entry.layer is not None:
        node = node[entry.layer]
    if entry.part is not None:
        node = node[entry.part] if entry.kind is Kind.VECTOR else node[:, entry.part]
    return node


def _view_shape(shapes: Params, entry: Entry) -> tuple[int, ...]:
    """Shape of `_view`, of a tree with the shape of every parameter."""
    node: Any = shapes
    for name in entry.ours.split("/"):
        node = node[name]
    shape = node.shape if entry.layer is None else node.shape[1:]
    if entry.part is None:
        return shape
    return shape[1:] if entry.kind is Kind.VECTOR else (shape[0], *shape[2:])


def _their_shape(ours: tuple[int, ...], entry: Entry) -> tuple[int, ...]:
    """Shape of their block."""
    if entry.kind is not Kind.VECTOR:
        inputs = entry.kind.value
        return math.prod(ours[inputs:]), math.prod(ours[:inputs])
    return ours if entry.part is None else (math.prod(ours),)


def to_tensors(entries: Iterable[Entry], params: Params) -> dict[str, np.ndarray]:
    """Our parameters (numpy, float32) under their names and in their layout."""
    blocks: dict[str, dict[int, np.ndarray]] = {}
    for entry in entries:
        array = _view(params, entry)
        outputs, *inputs = _their_shape(array.shape, entry)
        if entry.kind is Kind.VECTOR:
            array = array.reshape(outputs, *inputs)
        else:
            array = array.reshape(*inputs, outputs).T
        blocks.setdefault(entry.theirs, {})[entry.block[0]] = array
    return {
        name: np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate([parts[i] for i in sorted(parts)])
        for name, parts in blocks.items()
    }


def from_tensors(entries: Iterable[Entry], form: Form, shapes: Params, unread: Mapping[str, float]) -> Params:
    """Our parameters (numpy, float32) from theirs.

    Args:
      entries: of the model.
      form: theirs.
      shapes: tree with the shape of every parameter of ours.
      unread: by path, what is written into parameters of ours that theirs do not have and no layer reads.

    Raises:
      UserError: a tensor is missing, has another shape than the config says, or a value that is not finite in float32.
    """
    entries = list(entries)
    there = stored(form.tensors)
    for entry in entries:  # before anything is allocated: a config may say anything
        _check_shape(form, there, entry, _their_shape(_view_shape(shapes, entry), entry))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    for path, value in unread.items():
        _view(params, Entry("", path, Kind.VECTOR))[...] = value
    for entry in entries:
        view = _view(params, entry)
        theirs = _read(there[entry.theirs], entry, _their_shape(view.shape, entry)[0], form.source)
        view[...] = (theirs if entry.kind is Kind.VECTOR else theirs.T).reshape(view.shape)
    return params


def _check_shape(form: Form, there: Mapping[str, Stored], entry: Entry, shape: tuple[int, ...]) -> None:
    """See that a tensor of theirs is there, with blocks of this shape, and of a type that weights have."""
    if entry.theirs not in there:
        raise UserError(f"{form.source}: tensor '{entry.theirs}' is missing{_nearest(entry.theirs, there)}")
    found, expected = there[entry.theirs].shape, (shape[0] * entry.block[1], *shape[1:])
    if found != expected:
        hint = ""
        if len(found) == 2 and found[1:] == expected[1:] and "word_embeddings" in entry.theirs:
            hint = ": the vocabulary has another size"
        shapes = f"shape {list(found)}, the config says {list(expected)}"
        raise UserError(f"{form.source}: tensor '{entry.theirs}' has {shapes}{hint}")
    if there[entry.theirs].dtype not in WEIGHT_TYPES:
        raise UserError(no_weight(form.source, entry.theirs, there[entry.theirs].dtype))


def _read(tensor: Stored, entry: Entry, rows: int, source: str) -> np.ndarray:
    """One block of theirs, as float32."""
    first = entry.block[0] * rows
    with np.errstate(over="ignore"):
        block = np.asarray(tensor.read()[first : first + rows], np.float32)
    check_finite(entry.theirs, block, source, first)
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
    return f"; the nearest there is '{near[0]}'" if near else ""


def check_names(entries: Iterable[Entry], form: Form, copies: Mapping[str, str], buffers: Iterable[str]) -> None:
    """See that every tensor of theirs is known.

    Args:
      entries: of the model.
      form: theirs.
      copies: names that may be there beside those that they are tied to.
      buffers: patterns of names that are no parameters.

    Raises:
      UserError: one is not known, named with the nearest that is; or a copy differs from what it is tied to.
    """
    known = {entry.theirs for entry in entries}
    patterns = [re.compile(pattern) for pattern in buffers]
    for name in form.tensors:
        if name in known or any(pattern.fullmatch(name) for pattern in patterns):
            continue
        if name in copies:
            original = copies[name]
            if original in form.tensors and not np.array_equal(
                form.tensors[name], form.tensors[original], equal_nan=True
            ):
                raise UserError(
                    f"{form.source}: tensor '{name}' differs from '{original}': only decoders that are tied to the "
                    "word embeddings can be read"
                )
        else:
            near = _nearest(name, known)
            raise UserError(
                f"{form.source}: tensor '{name}' is not one of this architecture{near}; if it is not wanted, leave it "
                f"out with --drop '{name}'"
            )
