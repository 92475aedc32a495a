"""Types, ranges and forms of fields: an annotation for each field, one checker, and one reader of JSON.

The reader is our own: msgspec ignores unknown keys of dataclasses and does not name the keys of a dict in its messages;
cattrs turns 1 into True and "3" into 3 unless each type gets a hook; pydantic's messages lack the range and the
suggestion, and its schemas add 0.15 s to each start.
"""

import dataclasses
import functools
import re
import reprlib
import types
import typing
from typing import Annotated, Any, Literal, Union

from bert_jax.errors import UserError, did_you_mean


class Interval:
    """A range of numbers in mathematical notation: ``[0, 1)`` includes 0 and excludes 1."""

    def __init__(self, text: str):
        self.text, self._includes_low, self._includes_high = f" in {text}", text[0] == "[", text[-1] == "]"
        self._low, self._high = map(float, text[1:-1].split(","))

    def __contains__(self, value: float) -> bool:
        above = self._low <= value if self._includes_low else self._low < value
        return above and (value <= self._high if self._includes_high else value < self._high)


class Form:
    """The form of a string: a regular expression, which must match all of it."""

    def __init__(self, text: str, pattern: str):
        self.text, self._pattern = f" that is {text}", re.compile(pattern)

    def __contains__(self, value: str) -> bool:
        return self._pattern.fullmatch(value) is not None


# A name in a file from elsewhere that becomes a part of a path has one of these types. Backslashes separate on Windows;
# control characters would reach terminals; surrogates are not UTF-8; 240 characters leave room for an appended suffix.
FILE_NAME = Form("the name of a file, without a directory", r"(?!\.\.?\Z)[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,240}")
FileName = Annotated[str, FILE_NAME]
Sha256 = Annotated[str, Form("a SHA-256 of 64 lower-case hex digits", "[0-9a-f]{64}")]

# The upper bounds keep counts within 32 bits and rates within float32, and reject sizes beyond any memory.
Count = Annotated[int, Interval("[1, 2e9]")]
CountOrZero = Annotated[int, Interval("[0, 2e9]")]
Size = Annotated[int, Interval("[1, 1e7]")]
SizeOrZero = Annotated[int, Interval("[0, 1e7]")]
Layers = Annotated[int, Interval("[1, 1e4]")]
Rows = Annotated[int, Interval("[1, 1e6]")]
Positive = Annotated[float, Interval("(0, 1e30]")]
NonNegative = Annotated[float, Interval("[0, 1e30]")]
Share = Annotated[float, Interval("[0, 1]")]
Seed = Annotated[int, Interval("[0, 2147483647]")]
Rate = Annotated[float, Interval("[0, 1)")]


def check(section: object, path: str, cls: type | None = None) -> None:
    """Check the type and range of every field against its annotation.

    Args:
      section: a dataclass.
      path: prefix of the field's name in the message, such as ``model.``; with ``--``, the name is that of a flag.
      cls: the class whose fields are checked; None: the section's own class.

    Raises:
      UserError: a value that its annotation does not allow.
    """
    for name, kind in _annotations(cls or type(section)).items():
        value, shown = getattr(section, name), f"{path}{name}"
        if path == "--":
            shown = shown.replace("_", "-")
        if _convert(value, kind, shown) != value:  # a JSON value: a list, or the dict of a section
            raise _mismatch(value, kind, shown)


def from_json(kind: Any, value: Any, where: object, advice: str = "") -> Any:
    """Build a value from parsed JSON; nothing is coerced, but an int is accepted for a float.

    Args:
      kind: a dataclass, all of whose keys must be known; a TypedDict, which may have further keys; or another type, as
        in the annotations of a config.
      value: parsed JSON.
      where: the file, at the start of messages.
      advice: what the user should do, at the end of messages.

    Returns:
      an instance of `kind`: arrays of tuple fields are tuples, objects of dataclass fields are dataclasses.

    Raises:
      UserError: an unknown or missing key, a value that its annotation does not allow, or values that contradict each
        other. The message has the key's path and what the value must be.
    """
    try:
        return _convert(value, kind, "")
    except UserError as error:
        raise UserError(f"{where}: {error}{advice and f': {advice}'}") from error


def describe(kind: Any) -> str:
    """The values of an annotation in words, as in "a whole number in [1, 1e7]"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        ranges = [one.text for one in arguments[1:] if isinstance(one, Interval | Form)]
        return "".join([describe(arguments[0]), *ranges])
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin in (tuple, list):
        inner = [describe(one) for one in arguments if one is not ...]
        is_fixed = origin is tuple and arguments[-1] is not ...
        return f"[{', '.join(inner)}]" if is_fixed else f"a list, each item {inner[0]}"
    descriptions = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        types.NoneType: "None",
        list: "a list",
    }
    return descriptions.get(kind) or ("an object" if _is_object(kind) else kind.__name__)


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _is_object(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or dict in (kind, typing.get_origin(kind)) or typing.is_typeddict(kind)


def _convert(value: Any, kind: Any, path: str) -> Any:
    """The value with its arrays and objects converted; UserError if `kind` does not allow it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Annotated, Union, types.UnionType) and isinstance(value, list | tuple | dict):
        return _convert(value, arguments[0], path)  # a union is X | None
    if isinstance(value, dict):
        if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
            return _convert_object(value, kind, f"{path}." if path else "")
        if origin is dict:
            for key in value:
                if not _fits(key, arguments[0]):
                    raise UserError(
                        f"{path or 'the whole'} has the key {reprlib.repr(key)}: it must be {describe(arguments[0])}"
                    )
            return {key: _convert(item, arguments[1], f"{path}.{_printable(key)}") for key, item in value.items()}
    if origin in (tuple, list) and isinstance(value, list | tuple):
        is_fixed = origin is tuple and arguments[-1] is not ...
        kinds = arguments if is_fixed else arguments[:1] * len(value)
        if len(kinds) == len(value):
            # The items of a flag are given by the flag itself, again and again.
            paths = [path if path.startswith("--") else f"{path}.{i}" for i in range(len(value))]
            return origin(map(_convert, value, kinds, paths))
    if not _fits(value, kind):
        raise _mismatch(value, kind, path)
    return value


def _convert_object(values: dict[str, Any], kind: Any, path: str) -> Any:
    kinds = _annotations(kind)
    if typing.is_typeddict(kind):
        required, build = kind.__required_keys__, lambda **known: values | known
    else:
        required = {field.name for field in dataclasses.fields(kind) if field.default is field.default_factory}
        build = kind
        for name in values:
            if name not in kinds:
                hint = did_you_mean(name, kinds)
                raise UserError(f"unknown field '{path}{_printable(name)}'{hint and f': {hint}'}")
    for name in kinds:
        if name in required and name not in values:
            raise UserError(f"field '{path}{name}' is missing")
    return build(**{name: _convert(values[name], kinds[name], f"{path}{name}") for name in kinds if name in values})


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is allowed; lists and objects that are, were converted before."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        ranges = [one for one in arguments[1:] if isinstance(one, Interval | Form)]
        return _fits(value, arguments[0]) and all(value in one for one in ranges)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if kind is Any:
        return True
    if origin is not None or typing.is_typeddict(kind):
        return False
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _printable(key: str) -> str:
    return key if key.isprintable() else reprlib.repr(key)


def _mismatch(value: Any, kind: Any, path: str) -> UserError:
    expected = describe(kind)
    is_rounded = type(value) is float and not expected.startswith("a whole number")  # there, 3.0 is not 3
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to print it
        shown = "a number of more than 3,000 digits"
    else:
        shown = f"{value:.6g}" if is_rounded else reprlib.repr(value)
    return UserError(f"{path or 'the whole'} is {shown}: it must be {expected}")
