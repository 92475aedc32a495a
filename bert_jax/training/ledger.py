"""``ledger.jsonl``: what depended on a clock, on memory or on trouble, written before it is used.

A run is a function of (config, corpora, seed) and of this file. A resumed run reads it and decides the same again.
"""

from collections.abc import Callable
from typing import Any

from bert_jax.runtime.together import tell
from bert_jax.storage import StoredPath
from bert_jax.training.json_lines import JsonLines, cut_back


class Ledger:
    """The decisions of a run, in order. Each has an `event` and what belongs to it.

    The first process decides, reads and writes; all processes of a run must ask for the same, in the same order.
    """

    def __init__(self, path: StoredPath):
        """Read what is there; the end of a line that a kill cut short is cut off.

        Args:
          path: the file; made when the first decision is written.
        """
        self.path: StoredPath = path
        self.entries: list[dict[str, Any]] = tell("the ledger", lambda: cut_back(path))
        self._file = JsonLines(path, durable=True)

    def of(self, event: str) -> list[dict[str, Any]]:
        """The decisions of one kind, oldest first."""
        return [entry for entry in self.entries if entry["event"] == event]

    def decide(self, event: str, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Add a decision; it is on disk, or in the store, when this returns.

        Args:
          event: its kind.
          make: called in the first process only: what belongs to it, or None if nothing is to be decided now.

        Returns:
          the decision, in every process.
        """

        def written() -> dict[str, Any] | None:
            values = make()
            if values is None:
                return None
            self._file.add({"event": event, **values})
            return {"event": event, **values}

        entry = tell(f"a decision on {event}", written)
        if entry is not None:
            self.entries.append(entry)
        return entry
