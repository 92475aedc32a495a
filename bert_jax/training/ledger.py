"""``ledger.jsonl``: what depended on a clock, on memory or on trouble, written before it is used.

A run is a function of (config, corpora, seed) and of this file. A resumed run reads it and decides the same again.
"""

from typing import Any

from bert_jax.storage import StoredPath
from bert_jax.training.json_lines import JsonLines, cut_back


class Ledger:
    """The decisions of a run, in order. Each has an `event` and what belongs to it."""

    def __init__(self, path: StoredPath):
        """Read what is there; the end of a line that a kill cut short is cut off.

        Args:
          path: the file; made when the first decision is written.
        """
        self.path, self.entries = path, cut_back(path)
        self._file = JsonLines(path, durable=True)

    def of(self, event: str) -> list[dict[str, Any]]:
        """The decisions of one kind, oldest first."""
        return [entry for entry in self.entries if entry["event"] == event]

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        """Add a decision; it is on disk, or in the store, when this returns."""
        entry = {"event": event, **values}
        self._file.add(entry)
        self.entries.append(entry)
        return entry
