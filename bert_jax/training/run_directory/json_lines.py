"""JSON Lines files that survive a killed writer: append, read, and repair."""

import errno
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from bert_jax.errors import UserError
from bert_jax.field_validation import from_json
from bert_jax.storage.files import BackgroundUpload, write_atomic
from bert_jax.storage.paths import StoredPath, is_remote

NO_FSYNC_OF_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS, errno.EACCES)
"""Errors of file systems that cannot put a directory on the disk."""
Value = dict[str, Any]
Kind = type | Callable[[Value], type]
"""TypedDict of a line, which may have further keys; or a function of the line that returns it."""


def _fsync(path: StoredPath) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: StoredPath, kind: Kind) -> list[Value]:
    """Values of all complete lines, in order. The file is not changed.

    Damaged lines are skipped with a warning on stderr. A last line without a newline is skipped silently: a process may
    be writing it.

    Args:
      path: the file; it need not exist.
      kind: of its lines.
    """
    parsed = _parse(path, kind)
    damaged = [i for i, (line, value) in enumerate(parsed, 1) if value is None and line.endswith(b"\n")]
    _warn(path, damaged, "skipped")
    return [value for _, value in parsed if value is not None]


def truncate_lines(
    path: StoredPath,
    kind: Kind,
    wanted: Callable[[Value], bool] = lambda value: True,
    *,
    cut_at_damage: bool = False,
) -> list[Value]:
    """Remove damaged lines from a file, and all lines from the first unwanted value on.

    A line can be damaged or incomplete after a kill or a power failure; the warning on stderr has its number.

    Args:
      path: the file; it need not exist.
      kind: of its lines.
      wanted: whether to keep a value; the first one that is not wanted is removed with all lines after it.
      cut_at_damage: also remove all lines after a damaged line.

    Returns:
      the remaining values.
    """
    parsed, kept, damaged = _parse(path, kind), [], []
    for number, (line, value) in enumerate(parsed, 1):
        if value is None:
            damaged.append(number)
            if cut_at_damage:
                break
        elif wanted(value):
            kept.append((line, value))
        else:
            break
    if len(kept) < len(parsed):
        write_atomic(path, b"".join(line for line, _ in kept))
        _warn(path, damaged, "removed, with the lines after it" if cut_at_damage else "removed")
    return [value for _, value in kept]


def _parse(path: StoredPath, kind: Kind) -> list[tuple[bytes, Value | None]]:
    """Every line and its value; None if the line is damaged or incomplete."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [(line, _value(line, kind)) for line in lines]


def _value(line: bytes, kind: Kind) -> Value | None:
    try:
        value = json.loads(line)
        from_json(kind if isinstance(kind, type) else kind(value), value, "a line")
    except (ValueError, AttributeError, RecursionError, UserError):
        return None
    return value if line.endswith(b"\n") else None


def _warn(path: StoredPath, damaged: list[int], action: str) -> None:
    if damaged:
        numbers = ", ".join(map(str, damaged[:4])) + (", ..." if len(damaged) > 4 else "")
        print(f"warning: {path}: line {numbers} is incomplete or damaged; {action}", file=sys.stderr)


class JsonLines:
    """A file to append lines to; its last line must be complete (`truncate_lines`).

    On disk a line is appended. Objects cannot be appended to: in a store all lines are written again, at most every
    half minute unless they are durable; until then they are in memory only.
    """

    def __init__(self, path: StoredPath, *, durable: bool):
        """Open the file.

        Args:
          path: the file; created with the first line.
          durable: a line is on the disk or in the store when `write` returns, and survives a power failure.
        """
        self._path, self._durable, self._uploads = path, durable, None
        if is_remote(path):
            self._lines = [path.read_bytes()] if path.exists() else []
            self._uploads = BackgroundUpload(lambda: write_atomic(path, b"".join(self._lines)))

    def write(self, value: Value) -> None:
        """Append a line."""
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
        """Put all lines on the disk or into the store, so that they survive a power failure."""
        if self._uploads is not None:
            self._uploads.flush()
        elif self._path.exists():
            _fsync(self._path)
            try:
                _fsync(self._path.parent)  # the name of the file
            except OSError as error:
                if error.errno not in NO_FSYNC_OF_DIRECTORIES:
                    raise

    def close(self) -> None:
        """Flush, and stop the upload thread."""
        if self._uploads is not None:
            self._uploads.close()
