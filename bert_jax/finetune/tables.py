"""Tables of examples: TSV, CSV and JSON-lines files to texts and labels."""

import csv
import decimal
import io
import math
import numbers
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import UserError, did_you_mean, require
from bert_jax.field_validation import Interval
from bert_jax.storage.json_files import parse_json
from bert_jax.storage.paths import StoredPath

TARGETS = Interval("[-1e18, 1e18]")
"""Labels of a regression whose summed squared errors are finite in float32."""


class Example(NamedTuple):
    """An example of a classification or regression task."""

    texts: tuple[str, ...]
    """One text, or the two of a pair."""
    label: int | float | tuple[int, ...] | None
    """Index of the class, the target of a regression, or 1 or 0 for every class; None in a split without labels."""


class Columns(NamedTuple):
    """Which columns of a table make an example."""

    texts: tuple[str, ...]
    """One or two names from the header, keys of the JSON objects, or numbers from 0 of a file without a header."""
    label: str | None
    """None: the table has no labels."""
    advice: str = ""
    """End of messages about a column that does not exist."""
    label_optional: bool = False
    """Whether a row may lack the label, and a file the column of labels: test splits."""

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that every file has."""
        return (*self.texts, *([self.label] if self.label is not None and not self.label_optional else []))

    @property
    def numbered(self) -> bool:
        """Whether the columns have numbers, so that the file has no header."""
        return all(name.isdecimal() for name in (*self.texts, *filter(None, [self.label])))


class TableRow(NamedTuple):
    """The values of one line that an example needs."""

    where: str
    """``FILE:LINE``, for messages."""
    texts: tuple[str, ...]
    label: str | None
    """None: the table, or this row of a test split, has no label."""


def read_text(path: StoredPath) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
      UserError: no file, or invalid UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory: give a file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): convert it") from None


def read_rows(path: StoredPath, columns: Columns, *, skip_short: bool = False) -> list[TableRow]:
    """The rows of a table: `read_values` and `to_row`."""
    return [to_row(where, values, columns) for where, values in read_values(path, columns, skip_short=skip_short)]


def read_values(path: StoredPath, columns: Columns, *, skip_short: bool = False) -> list[tuple[str, Mapping[str, Any]]]:
    """``FILE:LINE`` and the values of all columns, by name, of each line of a table.

    The name's ending determines the form: ``.tsv`` is split at tabs without quotes, as the files of GLUE are; ``.csv``
    has RFC 4180 quotes; ``.jsonl`` has an object on each line. Empty lines are skipped.

    Args:
      path: the file, UTF-8.
      columns: that must exist.
      skip_short: leave out lines with fewer columns than the header. The published training file of QQP has some.

    Raises:
      UserError: no file, an unknown ending, invalid UTF-8 or JSON, a column that does not exist or exists twice, a line
        with another number of columns than the first one, or no rows.
    """
    text = read_text(path)
    readers = {".tsv": _delimited, ".csv": _delimited, ".jsonl": _json_lines}
    if path.suffix not in readers:
        raise UserError(f"{path} has an unknown ending: it must be {', '.join(readers)}")
    rows = list(readers[path.suffix](path, text, columns, skip_short))
    require(bool(rows), f"{path} has no examples")
    return rows


def _delimited(
    path: StoredPath, text: str, columns: Columns, skip_short: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix == ".tsv":
        # Not csv.reader, whose field limit and line endings inside a field are those of quoted files.
        lines = ((number, line.split("\t")) for number, line in enumerate(text.split("\n"), 1) if line.strip("\r"))
        lines = ((number, [*fields[:-1], fields[-1].rstrip("\r")]) for number, fields in lines)
    else:
        csv.field_size_limit(sys.maxsize)  # of the process; the text is in memory already
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = ((reader.line_num, fields) for fields in _checked(path, reader) if fields)
    names: list[str] | None = None
    for number, fields in lines:
        if names is None:
            names = [str(i) for i in range(len(fields))] if columns.numbered else fields
            check_columns(path, names, columns)
            if not columns.numbered:
                continue
        if len(fields) != len(names):
            if skip_short and len(fields) < len(names):
                continue
            raise UserError(f"{path}:{number} has {len(fields)} columns, the first line {len(names)}")
        yield f"{path}:{number}", dict(zip(names, fields, strict=True))


def check_columns(path: StoredPath, names: Sequence[str], columns: Columns) -> None:
    """Raise UserError if a table lacks a required column, or has a column twice that is read."""
    for name in columns.required:
        require(
            name in names,
            f"{path} has no column '{name}': it has {', '.join(names)}{columns.advice}. "
            f"{did_you_mean(name, names)}".rstrip(),
        )
    for name in (*columns.texts, *filter(None, [columns.label])):
        require(names.count(name) <= 1, f"{path} has two columns '{name}': rename or remove one of them")


def _checked(path: StoredPath, reader: "csv._reader") -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num} is not valid CSV: {error}") from None


def _json_lines(
    path: StoredPath, text: str, columns: Columns, skip_short: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        value = parse_json(line, where, "write one object per line")
        for name in columns.required:
            require(name in value, f"{where} has no key '{name}': it has {', '.join(value)}{columns.advice}")
        yield where, value


def to_row(where: str, values: Mapping[str, Any], columns: Columns) -> TableRow:
    """The row of a line's values; spaces around a label are no part of it.

    Raises:
      UserError: a text is not a string, the label is neither a string nor a finite number, or one is not Unicode.
    """
    texts = tuple(values[name] for name in columns.texts)
    require(all(isinstance(one, str) for one in texts), f"{where}: a text is not a string")
    label = None if columns.label is None else _label_text(where, values.get(columns.label), columns)
    check_unicode(where, *texts, label or "")
    return TableRow(where, texts, label)


def _label_text(where: str, label: Any, columns: Columns) -> str | None:
    if columns.label_optional and (label is None or label == ""):
        return None
    is_number = isinstance(label, numbers.Real | decimal.Decimal | np.bool_)
    is_label = isinstance(label, str | int) or (is_number and math.isfinite(label))
    require(is_label, f"{where}: the label is not a string or finite number")
    return str(label).strip()


def check_unicode(where: str, *texts: str) -> None:
    """Raise UserError if a text cannot be encoded: JSON can hold one half of a surrogate pair."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} has half of a surrogate pair, which is not Unicode: remove it") from None


def class_names(rows: Sequence[TableRow]) -> tuple[str, ...]:
    """The labels of a training split in the order of their class indices: numbers by value, else by text.

    Raises:
      UserError: fewer than two labels, or a row without one.
    """
    for row in rows:
        require(bool(row.label), f"{row.where} has no label")
    names = ordered({row.label for row in rows if row.label})
    require(len(names) >= 2, f"{rows[0].where}: all examples have the label '{names[0]}'")
    return names


def ordered(names: Collection[str]) -> tuple[str, ...]:
    """Names of classes, ascending: numbers by value, else by text."""
    are_numbers = all(map(_is_number, names))
    return tuple(sorted(names, key=lambda name: (float(name) if are_numbers else 0.0, name)))


def to_examples(rows: Sequence[TableRow], labels: Sequence[str]) -> list[Example]:
    """Rows with the labels as class indices, or as floats if `labels` is empty (a regression).

    Raises:
      UserError: a label that is not one of `labels`, or not a number in `TARGETS`; some rows have a label and others
        have none.
    """
    # Datasets of TFDS and Hugging Face have -1 for labels of a test split that are not published.
    unpublished = {"-1", "-1.0"}.difference(labels).issuperset(row.label for row in rows)
    missing = [row.where for row in rows if unpublished or row.label is None]
    require(
        len(missing) in (0, len(rows)),
        f"{missing and missing[0]} has no label, other rows of the split have one: give all labels, or none",
    )
    if missing:
        return [Example(row.texts, None) for row in rows]
    indices = {name: i for i, name in enumerate(labels)}

    def label_of(row: TableRow) -> int | float:
        assert row.label is not None
        if not labels:
            is_target = _is_number(row.label) and float(row.label) in TARGETS
            require(is_target, f"{row.where}: the label '{row.label}' is not a number{TARGETS.text}")
            return float(row.label)
        known = ", ".join(labels[:20])
        require(row.label in indices, f"{row.where}: the label '{row.label}' is not one of {known}")
        return indices[row.label]

    return [Example(row.texts, label_of(row)) for row in rows]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
