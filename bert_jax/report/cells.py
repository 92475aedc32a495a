"""Numbers and tables as text: the one writer of cells for all pages."""

import math
import numbers
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bert_jax.report import Table


def cell(value: Any, form: str = "", missing: str = "-") -> str:
    """A value as text.

    Args:
      value: None, or a number that is not finite, is `missing`.
      form: a format specification of Python, or `bytes` for a size in powers of 1,000.
      missing: text in place of a value that does not exist.
    """
    if value is None or (isinstance(value, numbers.Real) and not math.isfinite(value)):
        return missing
    if form != "bytes":
        return format(value, form)
    unit, power = next((one for one in (("GB", 9), ("MB", 6), ("kB", 3)) if value >= 10 ** one[1]), ("B", 0))
    return f"{value / 10**power:,.2f} {unit}" if power else f"{value:,} B"


class _CellFormatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return cell(value, format_spec)


def make_table(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str | Callable[[Any], str]], words: bool = False
) -> Table:
    """A table with one row for each of `rows`.

    Args:
      rows: values by name.
      columns: what is written of a row, by title: a format string such as "{tokens:,}", whose fields are written by
        `cell`, or a function of the row.
      words: see `Table`.
    """
    write = _CellFormatter().vformat
    cells = (tuple(c(row) if callable(c) else write(c, (), row) for c in columns.values()) for row in rows)
    return Table(tuple(columns), tuple(cells), words=words)
