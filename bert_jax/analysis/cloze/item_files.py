"""Files of cloze tests: JSON objects and tab-separated fields with the number of their line."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bert_jax.errors import require, short_repr
from bert_jax.finetune.tables import check_unicode, read_text
from bert_jax.storage.json_files import parse_json
from bert_jax.storage.paths import StoredPath


def read_json_lines(path: StoredPath) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a ``.jsonl`` file, each with ``FILE, line N``; empty lines are skipped.

    Raises:
      UserError: not UTF-8, a line that is not a JSON object, or no line.
    """
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    require(bool(lines), f"{path}: the file is empty: write one JSON object per line")
    for number, line in lines:
        where = f"{path}, line {number}"
        yield where, parse_json(line, where, "write one JSON object per line")


def item_name(where: str) -> str:
    """``FILE, line N`` without the directory, by which an item is found in the results of two models."""
    return where.rsplit("/", 1)[-1]


def text_of(values: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    """The text of a key; with a default, the key may be missing.

    Raises:
      UserError: no such key, or its value is not a text or is empty.
    """
    if default is not None and values.get(key) is None:
        return default
    require(key in values, f"{where}: no key '{key}': there are {', '.join(values) or 'none'}")
    value = values[key]
    is_text = isinstance(value, str) and bool(value.strip())
    require(is_text, f"{where}: '{key}' is {short_repr(value)}: it must be a text that is not empty")
    check_unicode(where, value)
    return value


def first_text(values: Mapping[str, Any], keys: Sequence[str], where: str) -> str | None:
    """The text of the first of some keys that is there, a list of texts joined by spaces; None if none is there.

    Raises:
      UserError: the value is neither a text nor a list of texts, or is empty.
    """
    for key in keys:
        if values.get(key) in (None, []):
            continue
        value = values[key]
        parts = value if isinstance(value, list) else [value]
        is_text = all(isinstance(part, str) for part in parts)
        require(is_text, f"{where}: '{key}' is {short_repr(value)}: it must be a text or a list of texts")
        return text_of({key: " ".join(parts)}, key, where)
    return None


def read_tab_separated(path: StoredPath) -> list[tuple[str, list[str]]]:
    """The fields of each line of a file without quotes, each with ``FILE, line N``; empty lines are skipped.

    Raises:
      UserError: not UTF-8, or no line.
    """
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(read_text(path).split("\n"), 1)]
    rows = [(f"{path}, line {number}", line.split("\t")) for number, line in lines if line.strip()]
    require(bool(rows), f"{path}: the file is empty")
    return rows
