"""Types and ranges of config fields: an annotation for each field, and one function that checks them all."""

import functools
import reprlib
import types
import typing
from typing import Annotated, Any, Literal, Union

from bert_jax.errors import UserError


class Interval:
    """A range of numbers in mathematical notation: ``[0, 1)`` includes 0 and excludes 1."""

    def __init__(self, text: str):
        self.text = text
        self._low, self._high = map(float, text[1:-1].split(","))

    def __contains__(self, value: float) -> bool:
        above = self._low <= value if self.text[0] == "[" else self._low < value
        return above and (value <= self._high if self.text[-1] == "]" else value < self._high)


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
Rate = Annotated[float, Interval("[0, 1)")]


def check(section: object, path: str, cls: type | None = None) -> None:
    """Check the type and range of every field against its annotation.

    Args:
      section: a dataclass.
      path: prefix of the field's name in the message, such as ``model.``.
      cls: the class whose fields are checked; None: the section's own class.

    Raises:
      UserError: a value that its annotation does not allow.
    """
    for name, kind in _annotations(cls or type(section)).items():
        value = getattr(section, name)
        if not _fits(value, kind):
            shown = f"{value:.6g}" if type(value) is float else reprlib.repr(value)
            raise UserError(f"{path}{name} is {shown}: it must be {describe(kind)}")


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        ranges = [one for one in arguments[1:] if isinstance(one, Interval)]
        return _fits(value, arguments[0]) and all(value in one for one in ranges)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple and arguments[-1] is ...:
        return isinstance(value, tuple) and all(_fits(one, arguments[0]) for one in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def describe(kind: Any) -> str:
    """The values of an annotation in words, as in "a whole number in [1, 1e7]"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        ranges = [f" in {one.text}" for one in arguments[1:] if isinstance(one, Interval)]
        return "".join([describe(arguments[0]), *ranges])
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is tuple:
        inner = [describe(one) for one in arguments if one is not ...]
        return f"a list of {inner[0]}" if arguments[-1] is ... else f"[{', '.join(inner)}]"
    descriptions = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        types.NoneType: "None",
    }
    return descriptions.get(kind) or kind.__name__
