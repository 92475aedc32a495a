"""``ledger.jsonl``: decisions that depend on a clock, on memory or on divergence, written before they take effect.

A run is a function of (config, corpora, seed) and of this file. A resumed run reads it and makes the same decisions.

Every checkpoint has a copy of the decisions that it was trained with. If the file has lost one of them, the run
restores them from the checkpoint that it continues from. Later decisions are made again: no remaining state
depends on them.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, TypedDict

from bert_jax.distributed.agreement import compute_and_broadcast
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.json_lines import JsonLines, read_lines, truncate_lines


class _Decision(TypedDict):
    event: str


class _Rollback(_Decision):
    step: int
    to: int
    skipped_rows: tuple[int, int] | None


class _TimeEstimate(_Decision):
    step: int
    hours: float
    seconds: float
    end: int


class _MicroBatch(_Decision):
    accumulation: int


_KINDS = {"rollback": _Rollback, "time": _TimeEstimate, "micro_batch": _MicroBatch}
"""By event: the fields that a resumed run reads."""


def _kind_of(entry: dict[str, Any]) -> type:
    return _KINDS.get(str(entry.get("event")), _Decision)


def read_ledger(path: StoredPath) -> list[dict[str, Any]]:
    """The decisions in a file, which is not changed; damaged lines are skipped with a warning on stderr."""
    return read_lines(path, _kind_of)


class Ledger:
    """The decisions of a run, in order. Each has an `event` and further fields.

    The first process decides, reads and writes; all processes of a run must make the same calls in the same order.
    """

    def __init__(self, path: StoredPath):
        """Read the file; it is truncated at the first damaged line.

        Args:
          path: the file; created with the first decision.
        """
        self.path: StoredPath = path
        self.entries: list[dict[str, Any]] = compute_and_broadcast(
            "the ledger", lambda: truncate_lines(path, _kind_of, cut_at_damage=True)
        )
        self._file = JsonLines(path, durable=True)

    def restore(self, saved: list[dict[str, Any]], *, are_lost: bool = True) -> None:
        """Take over the decisions of a checkpoint; all processes call this before they continue from it.

        Args:
          saved: the decisions in the checkpoint, which are the first ones of the run.
          are_lost: whether the run has made them, so that a warning says that they were lost.
        """
        if self.entries[: len(saved)] == saved:
            return
        self._file.close()
        compute_and_broadcast("the decisions of a checkpoint", lambda: self._rewrite(saved, are_lost))
        self.entries, self._file = list(saved), JsonLines(self.path, durable=True)

    def _rewrite(self, entries: list[dict[str, Any]], are_lost: bool) -> None:
        write_atomic(self.path, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        if are_lost:
            print(
                f"warning: {self.path} has lost decisions: restored {len(entries)} from the checkpoint; later ones are "
                "made again",
                file=sys.stderr,
            )

    def entries_of(self, event: str) -> list[dict[str, Any]]:
        """The decisions with this event, oldest first."""
        return [entry for entry in self.entries if entry["event"] == event]

    def make_decision(self, event: str, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Make and add a decision; it is on disk, or in the store, when this returns.

        Args:
          event: of the decision.
          make: returns its fields, or None for no decision; called in the first process only.

        Returns:
          the decision, on every process.
        """

        def written() -> dict[str, Any] | None:
            values = make()
            if values is None:
                return None
            self._file.write({"event": event, **values})
            return json.loads(json.dumps({"event": event, **values}))  # the value that a resumed run reads

        entry = compute_and_broadcast(f"a decision on {event}", written)
        if entry is not None:
            self.entries.append(entry)
        return entry
