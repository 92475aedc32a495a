"""The native format of a model outside a run: ``model.json``, ``params.safetensors`` and optional files with the
optimizer's moments and with buffers.

Tensors are float32 and named by their path in the parameter tree. model.json has the SHA-256 of each file; a directory
without it is not a model.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np
import safetensors.numpy

from bert_jax import __version__
from bert_jax.config import ModelConfig
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.formats.format import InputFormat, OutputFormat, ReadOptions, refuse_drop_and_trim
from bert_jax.convert.formats.tensor_files import open_safetensors
from bert_jax.convert.name_map import Params, check_finite
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tokenizer_check import write_native_tokenizer
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.storage import StoredPath, read_json_as
from bert_jax.tokenizers.files import find_tokenizer_file
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.state import Moments

DESCRIPTION = "model.json"
PARAMS, MOMENTS, BUFFERS = "params.safetensors", "moments.safetensors", "buffers.safetensors"
FORMAT_VERSION = 2


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
    _save(directory / PARAMS, name_leaves(model.params))
    about: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "bert_jax_version": __version__,
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
    model = NativeModel(about["family"], config, heads, _load(directory / PARAMS, shapes))
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


def _save(path: Path, leaves: dict[str, Any]) -> None:
    arrays = {name: np.asarray(array, np.float32, order="C") for name, array in leaves.items()}
    safetensors.numpy.save_file(arrays, path)


def _load(path: StoredPath, shapes: Params) -> Params:
    tensors = open_safetensors(Path(path))

    def check(name: str, leaf: jax.ShapeDtypeStruct) -> None:
        actual = tensors.lazy_tensors[name][:2] if name in tensors else None
        if actual != (leaf.shape, "float32"):
            has = "does not have" if actual is None else f"has with shape {list(actual[0])}, {actual[1]}"
            raise UserError(
                f"{path.parent / DESCRIPTION} needs {name} of shape {list(leaf.shape)}, float32, which {path.name} "
                f"{has}: convert the model again"
            )

    def take(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        array = tensors[name]
        check_finite(name, array, str(path))
        return array

    map_with_paths(check, shapes)  # before memory is allocated for any tensor
    return map_with_paths(take, shapes)


def _digest(path: StoredPath) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


INPUT = InputFormat(f"{DESCRIPTION} of bert_jax", matches, read)
OUTPUT = OutputFormat(write, DESCRIPTION, optimizer_state=True, for_sentence_transformers=True)
