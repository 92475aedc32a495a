"""Load a config by the name of a preset or from a Python file."""

import contextlib
import os
import re
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from bert_jax.config import Config
from bert_jax.errors import UserError, did_you_mean

T = TypeVar("T")

# In an installed package they are part of bert_jax; in a clone they are at the top level.
_PRESET_DIRECTORIES = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")


def preset_files() -> dict[str, Path]:
    """The shipped presets by name."""
    return shipped_files("")


def shipped_files(folder: str) -> dict[str, Path]:
    """The Python files of a folder of ``configs/`` by name."""
    shipped = next((directory for directory in _PRESET_DIRECTORIES if directory.is_dir()), None)
    files = sorted((shipped / folder).glob("*.py")) if shipped else []
    return {path.stem: path for path in files if not path.stem.startswith("_")}


def load_config(name_or_file: str) -> Config:
    """The config that a preset or a Python file returns from its function ``config()``.

    Raises:
      UserError: there is no such preset or file, or see `call_in_file`.
    """
    presets = preset_files()
    path = presets.get(name_or_file, Path(name_or_file))
    # Not Path.is_file(), which raises for names that are too long.
    if path.suffix != ".py" or not os.path.isfile(path):  # noqa: PTH113
        raise UserError(_unknown_config(name_or_file, list(presets)))
    return call_in_file(path, "config", Config)


def call_in_file(path: Path, function: str, kind: type[T]) -> T:
    """The value that a function without arguments of a Python file returns.

    The standard output of the file goes to stderr.

    Raises:
      UserError: the file has no such function or raises, or the value is of another type.
    """
    module = types.ModuleType(f"bert_jax_{function}_{path.stem}")
    module.__file__ = os.fspath(path)
    with _one_line_errors(path), contextlib.redirect_stdout(sys.stderr):
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
        if not callable(getattr(module, function, None)):
            raise UserError(f"there is no function {function}() that returns a bert_jax.{kind.__name__}")
        value = getattr(module, function)()
    if not isinstance(value, kind):
        raise UserError(f"{path}: {function}() returned a {type(value).__name__}, not a bert_jax.{kind.__name__}")
    return value


def _unknown_config(name: str, presets: list[str]) -> str:
    if os.path.isdir(name):  # noqa: PTH112
        return f"config {name} is a directory: give a Python file in it"
    if os.path.exists(name):  # noqa: PTH110
        return f"config {name} does not end in .py: a config is a Python file with a function config()"
    # Names of published models: google-bert/bert-base-uncased, roberta-base, albert-base-v2.
    shown = name if len(name) <= 80 else f"{name[:80]}..."
    if name.endswith(".py"):
        return f"there is no config '{shown}': give a file that exists, or one of {', '.join(presets)}"
    plain = re.sub(r"^.*/|[-_](un)?cased.*|[-_]v[0-9].*|[.]py$", "", name.lower()).replace("-", "_")
    hint = did_you_mean(plain, presets)
    return (
        f"there is no config '{shown}': {hint and f'{hint} '}Presets are {', '.join(presets)}; a file must end in .py"
    )


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn an exception into one line with the file, the line number and the error."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines = [error.lineno]
        where = f"{path}, line {lines[-1]}" if lines else f"{path}"
        what = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{where}: {what}{error.msg if isinstance(error, SyntaxError) else error}") from error
