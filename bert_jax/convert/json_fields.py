"""Dataclasses from untrusted JSON: every value is checked against its field's type."""

import dataclasses
from typing import Any, TypeVar

from bert_jax import field_validation
from bert_jax.errors import UserError, short_repr

T = TypeVar("T")


def dataclass_from_json(dataclass_type: type[T], values: Any, where: str) -> T:
    """Build an instance of a dataclass.

    Args:
      dataclass_type: its field types are those that `field_validation.check` knows.
      values: parsed JSON, by field name.
      where: prefix of error messages.

    Raises:
      UserError: an unknown or missing field, a value that its field cannot have, or values that contradict each other.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: {short_repr(values)} must be a JSON object")
    fields = {field.name: field for field in dataclasses.fields(dataclass_type)}
    for name in values:
        if name not in fields:
            raise UserError(f"{where}: unknown field {short_repr(name)}")
    missing = [n for n, f in fields.items() if n not in values and f.default is f.default_factory]
    if missing:
        raise UserError(f"{where}: field '{missing[0]}' is missing")
    try:
        built = dataclass_type(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )
        field_validation.check(built, "")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return built
