"""Checks fields of records: missing fields, and values that are not text."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from data_prep.sources.base import Document, Skipped

_MAX_FIELDS = 20


def missing_field_message(field: str, fields: Collection[str]) -> str:
    """A message about a missing field, with the existing fields and the closest name."""
    if not fields:
        return f"no field {field!r}; there are no fields"
    near = difflib.get_close_matches(field, fields, n=1)
    hint = f", did you mean {near[0]!r}" if near else ""
    names = [*sorted(fields)[:_MAX_FIELDS], *(["..."] if len(fields) > _MAX_FIELDS else [])]
    return f"no field {field!r}{hint}; there are: {', '.join(names)}"


def validate_text_field(value: Any, field: str, origin: str, fields: Mapping[str, str]) -> Document | Skipped:
    """The value of a field as a document with `fields`, if it is text and not empty."""
    if value is None:
        return Skipped("null_field", origin, f"the field {field!r} is null")
    if not isinstance(value, str):
        return Skipped("field_not_text", origin, f"the field {field!r} is {json_type_name(value)}, not text")
    if not value or value.isspace():
        return Skipped("empty_document", origin, f"the field {field!r} is empty")
    return Document(origin, value, fields=fields)


def document_or_skipped(
    value: bytes | None, field: str, origin: str, max_bytes: int, fields: Mapping[str, bytes | None]
) -> Document | Skipped:
    """`validate_text_field` of bytes, of which the text must be UTF-8 and at most `max_bytes`."""
    if value is not None and len(value) > max_bytes:
        detail = f"the field {field!r} is longer than {max_bytes} bytes"
        return Skipped("record_too_long", origin, detail, len(value))
    try:
        text = None if value is None else value.decode()
        others = {name: other.decode(errors="replace") for name, other in fields.items() if other is not None}
        return validate_text_field(text, field, origin, others)
    except UnicodeDecodeError as error:
        detail = f"the field {field!r} is not UTF-8 at its byte {error.start}"
        return Skipped("undecodable", origin, detail, len(value))


def json_type_name(value: Any) -> str:
    """The type of a JSON value, for messages."""
    if value is None:
        return "null"
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return kinds.get(type(value), "a number")


def is_text_or_number(value: Any) -> bool:
    """Whether a JSON value can be a language, name or score."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)
