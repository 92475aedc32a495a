"""Files with a JSON value on each line, to which a process that may be killed adds lines."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from bert_jax.storage import BackgroundUpload, StoredPath, is_remote, write_atomic

Value = dict[str, Any]


def is_number(value: Any) -> bool:
    """Whether a value of a line is a number; bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_lines(path: StoredPath, valid: Callable[[Value], bool]) -> list[Value]:
    """Values of all complete lines, in order. The file stays as it is.

    Damaged lines are left out, and named on stderr. So is a last line without its end, but silently: a process may be
    writing it.

    Args:
      path: the file; it need not exist.
      valid: whether a value has the fields that a line of this file has.
    """
    lines = _lines(path)
    values = [_value(line, valid) for line in lines]
    complete = len(lines) - bool(lines and not lines[-1].endswith(b"\n"))
    _warn(path, [i for i in range(complete) if values[i] is None], "left out")
    return [value for value in values if value is not None]


def cut_back(
    path: StoredPath,
    valid: Callable[[Value], bool],
    wanted: Callable[[Value], bool] = lambda value: True,
    *,
    cut_at_damage: bool = False,
) -> list[Value]:
    """Remove from a file what cannot be read, and everything from the first value on that is not wanted.

    Lines that cannot be read are damaged, or were cut short by a kill or a power cut. They are named on stderr.

    Args:
      path: the file; it need not exist.
      valid: whether a value has the fields that a line of this file has.
      wanted: whether a value, and so the ones before it, may stay.
      cut_at_damage: also remove what follows a line that cannot be read.

    Returns:
      the values that stay.
    """
    lines, kept, values, damaged = _lines(path), [], [], []
    for i, line in enumerate(lines):
        value = _value(line, valid)
        if value is None:
            damaged.append(i)
            if cut_at_damage:
                break
        elif not wanted(value):
            break
        else:
            kept.append(line)
            values.append(value)
    if kept == lines:
        return values
    if kept == lines[: len(kept)] and not is_remote(path):
        os.truncate(path, sum(map(len, kept)))
    else:
        write_atomic(path, b"".join(kept))
    _warn(path, damaged, "removed, with the lines after it" if cut_at_damage else "removed")
    return values


def _lines(path: StoredPath) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _value(line: bytes, valid: Callable[[Value], bool]) -> Value | None:
    """None: the line is damaged, or incomplete."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if line.endswith(b"\n") and isinstance(value, dict) and valid(value) else None


def _warn(path: StoredPath, damaged: list[int], what: str) -> None:
    if damaged:
        numbers = ", ".join(str(i + 1) for i in damaged[:4]) + (", ..." if len(damaged) > 4 else "")
        print(f"warning: {path}: line {numbers} is incomplete or damaged; {what}", file=sys.stderr)


class JsonLines:
    """A file to which lines are added; its last line has to be whole (`cut_back`).

    On disk a line is appended. An object cannot grow: in a store all lines are written anew, every half minute at most
    if they need not be durable; until then they are in memory only.
    """

    def __init__(self, path: StoredPath, *, durable: bool):
        """Opens it.

        Args:
          path: the file; made when the first line is added.
          durable: a line has reached the disk or the store when `add` returns, and outlives a power cut.
        """
        self._path, self._durable, self._uploads = path, durable, None
        if is_remote(path):
            self._lines = [path.read_bytes()] if path.exists() else []
            self._uploads = BackgroundUpload(lambda: write_atomic(path, b"".join(self._lines)))

    def add(self, value: Value) -> None:
        """Add a line."""
        line = json.dumps(value).encode() + b"\n"
        if self._uploads is None:
            with self._path.open("ab") as file:
                file.write(line)
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
            return
        self._lines.append(line)
        self._uploads.content_changed()
        if self._durable:
            self._uploads.flush()

    def flush(self) -> None:
        """All lines are in the file when this returns."""
        if self._uploads is not None:
            self._uploads.flush()

    def close(self) -> None:
        """Flush, and end the thread."""
        if self._uploads is not None:
            self._uploads.close()
