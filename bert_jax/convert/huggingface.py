"""Directories as transformers saves and opens them: ``config.json`` and ``model.safetensors``."""

import json
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from bert_jax.convert.form import Form
from bert_jax.errors import UserError

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def read(directory: epath.Path) -> Form:
    """What a directory holds.

    Raises:
      UserError: files are missing or damaged.
    """
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is missing or not JSON: {directory} is no Hugging Face model") from error
    try:
        with safetensors.safe_open(directory / WEIGHTS, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{directory / WEIGHTS} is missing or damaged: {error}") from error
    return Form(config, tensors, str(directory))


def write(directory: Path, form: Form) -> None:
    """Write config and weights into a directory that is there."""
    (directory / CONFIG).write_text(json.dumps(form.config, indent=2) + "\n")
    tensors = {name: np.ascontiguousarray(array) for name, array in form.tensors.items()}
    safetensors.numpy.save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
