"""Dataclasses from JSON that anybody may have edited: every value is of its field's type, or one line says so."""

import dataclasses
from typing import Any, TypeVar

from bert_jax.config import field_validation
from bert_jax.errors import UserError, brief

T = TypeVar("T")


def dataclass_from_json(kind: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass.

    Args:
      kind: with fields that `config_fields.check` knows.
      values: by field, as JSON has them.
      where: what messages begin with.

    Raises:
      UserError: an unknown or missing field, a value that its field cannot have, or values that do not go together.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where}: {brief(values)} must be a JSON object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise UserError(f"{where}: unknown field {brief(name)}")
    missing = [n for n, f in fields.items() if n not in values and f.default is f.default_factory]
    if missing:
        raise UserError(f"{where}: field '{missing[0]}' is missing")
    try:
        built = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
        field_validation.check(built, "")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return built
