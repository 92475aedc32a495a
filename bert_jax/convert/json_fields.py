"""JSON that anybody may have edited: every value is of its field's type, or one line says so."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from bert_jax.errors import UserError
from bert_jax.storage import StoredPath

T = TypeVar("T")
DEEPEST = 50
"""Brackets inside brackets of a file; more would exhaust the stack when it is written again."""


def read_object(path: StoredPath, advice: str) -> dict[str, Any]:
    """The object that a file of JSON holds.

    Args:
      path: the file.
      advice: what the user is to do about a bad one; the end of the message.

    Raises:
      UserError: the file is missing, not JSON, not an object, or nested too deeply.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {advice}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}): {advice}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply: {advice}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): {advice}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object, but {brief(values)}: {advice}")
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        level = [child for value in level for child in _children(value)]
    if level:
        raise UserError(f"{path} is nested too deeply: {advice}")
    return values


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def brief(value: Any) -> str:
    """A value for a message, cut."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def build(kind: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass.

    Args:
      kind: with fields of numbers, strings, Literals, tuples of strings, or None.
      values: by field, as JSON has them.
      where: what messages begin with.

    Raises:
      UserError: an unknown or missing field, a value of another type, or values that do not go together.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: {brief(values)} must be a JSON object")
    fields, hints = {f.name: f for f in dataclasses.fields(kind)}, typing.get_type_hints(kind)
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"{where}: unknown field {brief(name)}")
        if not _fits(value, hints[name]):
            raise UserError(f"{where}: {name} is {brief(value)}, which is no {_described(hints[name])}")
    missing = [n for n, f in fields.items() if n not in values and f.default is f.default_factory]
    if missing:
        raise UserError(f"{where}: field '{missing[0]}' is missing")
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(each, arguments[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _described(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
