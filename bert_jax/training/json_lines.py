"""Files with a JSON value on each line, to which a process that may be killed adds lines."""

import json
import os
from collections.abc import Callable
from typing import Any

from bert_jax.storage import StoredPath, Uploads, is_remote, write_whole

Value = dict[str, Any]


def read_lines(path: StoredPath) -> list[Value]:
    """Values of all complete lines; one that a kill cut short is not one. The file stays as it is."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def cut_back(path: StoredPath, wanted: Callable[[Value], bool] = lambda value: True) -> list[Value]:
    """Cut a file before the first line that a kill cut short, or whose value is not wanted; the values that stay."""
    content = path.read_bytes() if path.exists() else b""
    values, size = [], 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n") or not wanted(value := json.loads(line)):
            break
        values.append(value)
        size += len(line)
    if size < len(content):
        if is_remote(path):
            write_whole(path, content[:size])
        else:
            os.truncate(path, size)
    return values


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
            self._uploads = Uploads(lambda: write_whole(path, b"".join(self._lines)))

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
        self._uploads.grown()
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
