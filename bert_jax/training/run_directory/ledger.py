"""``ledger.jsonl``: what depended on a clock, on memory or on trouble, written before it is used.

A run is a function of (config, corpora, seed) and of this file. A resumed run reads it and decides the same again.

Every checkpoint holds a copy of the decisions that it was trained with. If the file has lost one of them, the run takes
them from the checkpoint that it continues from. Later decisions are made again: nothing that stays depends on them.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from bert_jax.distributed.agreement import broadcast_from_first
from bert_jax.storage import StoredPath, write_atomic
from bert_jax.training.run_directory.json_lines import JsonLines, cut_back

NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "rollback": {"to": int, "skipped_rows": list},
    "time": {"update": int, "hours": (int, float), "seconds": (int, float), "end": int},
    "micro_batch": {"accumulation": int},
}
"""By kind of decision: the fields that are read again, and their types."""


def _is_decision(entry: dict[str, Any]) -> bool:
    event = entry.get("event")
    if not isinstance(event, str):
        return False
    fields = all(isinstance(entry.get(name), kind) for name, kind in NEEDED.get(event, {}).items())
    rows = entry.get("skipped_rows", [0, 0])
    return fields and isinstance(rows, list) and len(rows) == 2 and all(isinstance(row, int) for row in rows)


class Ledger:
    """The decisions of a run, in order. Each has an `event` and what belongs to it.

    The first process decides, reads and writes; all processes of a run must ask for the same, in the same order.
    """

    def __init__(self, path: StoredPath):
        """Read what is there; the file is cut before the first line that cannot be read.

        Args:
          path: the file; made when the first decision is written.
        """
        self.path: StoredPath = path
        self.entries: list[dict[str, Any]] = broadcast_from_first(
            "the ledger", lambda: cut_back(path, _is_decision, cut_at_damage=True)
        )
        self._file = JsonLines(path, durable=True)

    def recover(self, saved: list[dict[str, Any]]) -> None:
        """Make sure that the decisions of a checkpoint are there; all processes call it before they continue from one.

        Args:
          saved: the decisions that it was trained with, which are the first ones of the run.
        """
        if self.entries[: len(saved)] == saved:
            return
        self._file.close()
        broadcast_from_first("the decisions of a checkpoint", lambda: self._rewrite(saved))
        self.entries, self._file = list(saved), JsonLines(self.path, durable=True)

    def _rewrite(self, entries: list[dict[str, Any]]) -> None:
        write_atomic(self.path, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        print(
            f"warning: {self.path} has lost decisions: restored {len(entries)} from the checkpoint; later ones are "
            "made again",
            file=sys.stderr,
        )

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
            return json.loads(json.dumps({"event": event, **values}))  # as it is read again

        entry = broadcast_from_first(f"a decision on {event}", written)
        if entry is not None:
            self.entries.append(entry)
        return entry
