"""Find a config by its preset's name or by a file."""

import difflib
import importlib.util
from pathlib import Path

from bert_jax.config import Config
from bert_jax.errors import UserError

# Beside the code in an installed package; in the clone's top level otherwise.
_FOLDERS = (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")


def preset_files() -> dict[str, Path]:
    """The shipped presets by name."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    files = sorted(folder.glob("*.py")) if folder else []
    return {path.stem: path for path in files if not path.stem.startswith("_")}


def load_config(name_or_file: str) -> Config:
    """The config that a preset or a Python file returns from its function ``config()``.

    Raises:
      UserError: no such preset or file, or the file has no such function.
    """
    presets = preset_files()
    path = presets.get(name_or_file, Path(name_or_file))
    if path.suffix != ".py" or not path.is_file():
        near = difflib.get_close_matches(name_or_file, presets, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(
            f"there is no config '{name_or_file}': {hint}Presets are {', '.join(presets)}; a file must end in .py"
        )
    spec = importlib.util.spec_from_file_location(f"bert_jax_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "config", None)):
        raise UserError(f"{path} has no function config() that returns a bert_jax.Config")
    config = module.config()
    if not isinstance(config, Config):
        raise UserError(f"{path}: config() returned a {type(config).__name__}, not a bert_jax.Config")
    return config
