"""Files with a JSON value on each line, to which a process that may be killed appends."""

import json
import os
from pathlib import Path
from typing import Any


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """Values of all complete lines; the end of one that a kill cut short is cut off, so that lines can be added."""
    if not path.exists():
        return []
    whole, end, rest = path.read_bytes().rpartition(b"\n")
    if rest:
        os.truncate(path, len(whole) + len(end))
    return [json.loads(line) for line in whole.splitlines()]


def append_line(path: Path, value: dict[str, Any], *, durable: bool) -> None:
    """Add a line. If it is to be durable, it has reached the disk when this returns, and outlives a power cut."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
        file.flush()
        if durable:
            os.fsync(file.fileno())
