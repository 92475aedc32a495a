"""JSON from outside: read with checks of its form, version and depth."""

import json
from collections.abc import Iterable
from typing import Any, TypedDict

from bert_jax import field_validation
from bert_jax.errors import UserError, short_repr
from bert_jax.storage.paths import StoredPath

MAX_JSON_DEPTH = 50
"""Nesting of a JSON file; deeper nesting would exhaust the stack when it is written again."""


def read_json_object(path: StoredPath, advice: str, *, missing_ok: bool = False) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
      path: the file.
      advice: what the user should do about a bad file; the end of the message.
      missing_ok: whether a missing file counts as an empty object.

    Raises:
      UserError: the file is missing, cannot be read, or `parse_json` refuses its content.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise UserError(f"{path} is missing: {advice}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}): {advice}") from error
    return parse_json(content, path, advice)


class _Versioned(TypedDict):
    format_version: int


def read_json_as(path: StoredPath, kind: Any, advice: str, version: int | None = None) -> Any:
    """Read a file that holds a JSON object, as a dataclass or TypedDict.

    Args:
      path: the file.
      kind: see `field_validation.from_json`.
      advice: what the user should do about a bad file, or one of an earlier format.
      version: the value that its `format_version` must have; None: it has none.

    Raises:
      UserError: the file has another version, or see `read_json_object` and `field_validation.from_json`.
    """
    value = read_json_object(path, advice)
    if version is not None:
        written = field_validation.from_json(_Versioned, value, path, advice)["format_version"]
        if written != version:
            remedy = "update bert_jax" if written > version else advice
            raise UserError(f"{path} has format version {written}, and this bert_jax reads {version}: {remedy}")
    return field_validation.from_json(kind, value, path, advice)


def parse_json(content: bytes | str, origin: object, advice: str, kind: type = dict) -> Any:
    """Parse a JSON object, or with `kind` list an array, from outside; messages begin with `origin`.

    Raises:
      UserError: the content is not JSON, not of this kind, or nested too deeply.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise UserError(f"{origin} is nested too deeply: {advice}") from error
    except ValueError as error:
        raise UserError(f"{origin} is not JSON ({error}): {advice}") from error
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise UserError(f"{origin} is nested too deeply: {advice}")
    if not isinstance(value, kind):
        name = "object" if kind is dict else "array"
        raise UserError(f"{origin} is not a JSON {name}, but {short_repr(value)}: {advice}")
    return value


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
