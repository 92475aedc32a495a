"""``ledger.jsonl``: what depended on a clock, on memory or on trouble, written before it is used.

A run is a function of (config, corpora, seed) and of this file. A resumed run reads it and decides the same again.
"""

import json
import os
from pathlib import Path
from typing import Any


class Ledger:
    """The decisions of a run, in order. Each has an `event` and what belongs to it."""

    def __init__(self, path: Path):
        """Read what is there; the end of a line that a kill cut short is cut off.

        Args:
          path: the file; made when the first decision is written.
        """
        self.path = path
        self.entries: list[dict[str, Any]] = []
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")
            if whole[2]:
                os.truncate(path, len(whole[0]) + len(whole[1]))
            self.entries = [json.loads(line) for line in whole[0].splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The decisions of one kind, oldest first."""
        return [entry for entry in self.entries if entry["event"] == event]

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        """Add a decision; it is on disk when this returns."""
        entry = {"event": event, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)
        return entry
