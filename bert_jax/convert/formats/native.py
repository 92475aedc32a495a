"""The native format of a model outside a run: ``model.json``, ``params.safetensors`` and optional files with the
optimizer's moments and with buffers.

Tensors are float32 and named by their path in the parameter tree. A model with ``dense_dtype int8`` has its kernels and
tables as int8, with float32 scales under their name and ``.scale`` (model/int8.py), where this represents them exactly,
as it does after `bert-jax compress quantise`; reading gives integers x scales. model.json has the SHA-256 of each file;
a directory without it is not a model.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from bert_jax.array_types import Float, Int8
from bert_jax.config import ModelConfig
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.formats.format import InputFormat, OutputFormat, ReadOptions, refuse_drop_and_trim
from bert_jax.convert.formats.tensor_files import open_safetensors
from bert_jax.convert.name_map import Params, check_finite
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import WEIGHT_TYPES
from bert_jax.convert.tokenizer_check import write_native_tokenizer
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError
from bert_jax.model import bert, int8
from bert_jax.model.heads import Heads
from bert_jax.provenance import code
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.readers import find_tokenizer_file
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.state import Moments

INT8_NOTE = (
    "Its dense layers and embedding tables were rounded to 8-bit integers. bert_jax also rounds the inputs of dense "
    "layers; other libraries compute with the rounded parameters in floating point."
)
"""For the model card."""
DESCRIPTION = "model.json"
PARAMS, MOMENTS, BUFFERS = "params.safetensors", "moments.safetensors", "buffers.safetensors"
FORMAT_VERSION = 3
SCALE = ".scale"
Axes = dict[str, tuple[int, ...]]
"""By the path of a parameter: the axes along which elements share a scale (`bert.int8_axes`)."""


class _Optional(TypedDict, total=False):
    step: int
    settings: dict


class Description(_Optional):
    """The content of model.json."""

    family: str
    model: ModelConfig
    heads: Heads
    sha256: dict[str, str]


def write(source_model: SourceModel, directory: Path) -> None:
    """Write the model with its tokenizer, the optimizer's moments, buffers and the config.json of its first source."""
    write_native_tokenizer(source_model, directory)
    model, optimizer_state, buffers = source_model.model, source_model.optimizer_state, source_model.buffers
    axes = bert.int8_axes(model.config, model.heads) if model.config.dense_dtype == "int8" else {}
    _save(directory / PARAMS, name_leaves(model.params), axes)
    about: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "code": code(),
        "family": model.family,
        "model": dataclasses.asdict(model.config),
        "heads": dataclasses.asdict(model.heads),
        "sha256": {PARAMS: _digest(directory / PARAMS)},
    }
    if optimizer_state is not None:
        trees = {"mu": optimizer_state.mu, "nu": optimizer_state.nu}
        _save(directory / MOMENTS, name_leaves(trees))
        about["step"] = optimizer_state.step
        about["sha256"][MOMENTS] = _digest(directory / MOMENTS)
    if buffers:
        safetensors.numpy.save_file(buffers, directory / BUFFERS)
        about["sha256"][BUFFERS] = _digest(directory / BUFFERS)
    if source_model.hf_config:
        about["settings"] = source_model.hf_config
    (directory / DESCRIPTION).write_text(json.dumps(about, indent=1) + "\n")


def matches(source: StoredPath) -> bool:
    """Whether a directory has a model in this format."""
    return (source / DESCRIPTION).exists()


def read(directory: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read what `write` wrote.

    Raises:
      UserError: a file is missing, damaged or of an unknown version, or has a value that is not finite.
    """
    refuse_drop_and_trim(directory, options)
    about = _read_description(directory)
    for name, digest in about["sha256"].items():
        if not (directory / name).is_file() or _digest(directory / name) != digest:
            raise UserError(f"{directory / name} is missing or damaged: convert it again")
    config, heads = about["model"], about["heads"]
    shapes = bert.shapes(config, heads)
    axes = bert.int8_axes(config, heads) if config.dense_dtype == "int8" else {}
    model = NativeModel(about["family"], config, heads, _load(directory / PARAMS, shapes, axes))
    moments, buffers = None, {}
    if MOMENTS in about["sha256"] and options.optimizer_state:
        trees = _load(directory / MOMENTS, {"mu": shapes, "nu": shapes})
        moments = Moments(about["step"], trees["mu"], trees["nu"])
    if BUFFERS in about["sha256"]:
        buffers = dict(open_safetensors(Path(directory / BUFFERS)))
    return SourceModel(
        "bert-jax",
        str(directory),
        model,
        find_tokenizer_file(directory),
        optimizer_state=moments,
        buffers=buffers,
        hf_config=about.get("settings", {}),
        notes=(INT8_NOTE,) if axes else (),
    )


def _read_description(directory: StoredPath) -> Description:
    path, advice = directory / DESCRIPTION, "convert the model again"
    about = read_json_as(path, Description, advice, FORMAT_VERSION)
    files = about["sha256"].keys()
    if about["family"] not in FAMILIES or not {PARAMS} <= files <= {PARAMS, MOMENTS, BUFFERS}:
        raise UserError(f"{path} is damaged: {advice}")
    if MOMENTS in files and "step" not in about:
        raise UserError(f"{path} lacks 'step', to which the moments belong: {advice}")
    return about


def _save(path: Path, leaves: dict[str, Any], axes: Axes | None = None) -> None:
    """Write arrays as float32, or as int8 those with `axes` (along which elements share a scale) that it represents."""
    arrays = {}
    for name, leaf in leaves.items():
        array = np.asarray(leaf, np.float32, order="C")
        stored = quantise_exactly(array, axes[name]) if axes and name in axes else None
        arrays |= {name: array} if stored is None else {name: stored[0], f"{name}{SCALE}": stored[1]}
    safetensors.numpy.save_file(arrays, path)


def quantise_exactly(
    array: Float[np.ndarray, "..."], axes: tuple[int, ...]
) -> tuple[Int8[np.ndarray, "..."], Float[np.ndarray, "..."]] | None:
    """Integers and scales whose product is the array bit for bit; None: there are none.

    Args:
      array: float32.
      axes: along which elements share a scale.
    """
    integers, scale = map(np.asarray, int8.quantise(jnp.asarray(array), axes))
    rounded = integers.astype(np.float32) * scale
    return (integers, scale) if np.array_equal(rounded.view(np.uint32), array.view(np.uint32)) else None


def _load(path: StoredPath, shapes: Params, axes: Axes | None = None) -> Params:
    tensors, axes = open_safetensors(Path(path), (*WEIGHT_TYPES, "int8")), axes or {}

    def check(name: str, leaf: jax.ShapeDtypeStruct) -> None:
        stored = (
            _stored_parts(name, leaf.shape, axes) if f"{name}{SCALE}" in tensors else {name: (leaf.shape, "float32")}
        )
        for part, (shape, dtype) in stored.items():
            actual = tensors.lazy_tensors[part][:2] if part in tensors else None
            if actual != (shape, dtype):
                has = "does not have" if actual is None else f"has with shape {list(actual[0])}, {actual[1]}"
                raise UserError(
                    f"{path.parent / DESCRIPTION} needs {part} of shape {list(shape)}, {dtype}, which {path.name} "
                    f"{has}: convert the model again"
                )

    def take(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        array, scale = tensors[name], tensors.get(f"{name}{SCALE}")
        for part in (array, scale):
            if part is not None:
                check_finite(name, part, str(path))
        return array if scale is None else array.astype(np.float32) * scale

    map_with_paths(check, shapes)  # before memory is allocated for any tensor
    return map_with_paths(take, shapes)


def _stored_parts(name: str, shape: tuple[int, ...], axes: Axes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and types of the tensors of a parameter that has scales; as float32, if it cannot have them."""
    if name not in axes:
        return {name: (shape, "float32")}
    scales = tuple(1 if i in axes[name] else size for i, size in enumerate(shape))
    return {name: (shape, "int8"), f"{name}{SCALE}": (scales, "float32")}


def _digest(path: StoredPath) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


INPUT = InputFormat(f"{DESCRIPTION} of bert_jax", matches, read)
OUTPUT = OutputFormat(write, DESCRIPTION, optimizer_state=True, for_sentence_transformers=True)
