"""Recovery from divergence and corruption: the checkpoint that a run rolls back to, and the rows that it skips then.

A checkpoint counts as good after `recovery.stable_steps` more steps without divergence: a step can corrupt the state
although its own loss is finite, and only later losses show it. So a run rolls back to the newest checkpoint that is at
least `stable_steps` older than the first bad step, and skips the rows from `stable_steps` before the first bad step to
the last bad step. If replicas differ (replicas.py), it is the newest checkpoint, because they are compared before every
save, and no rows are skipped. The decision is written to the ledger before anything is deleted; if the run dies in
between, it applies the decision when it is continued.
"""

import math
import sys
from typing import Any

from bert_jax.config import Config
from bert_jax.data.cursor import Cursor, rows_before_step
from bert_jax.distributed.agreement import compute_and_broadcast, is_first
from bert_jax.training.divergence import IN_A_ROW, DivergedError, RollbackError
from bert_jax.training.replicas import ReplicaError
from bert_jax.training.run_directory.checkpoint import Checkpoints
from bert_jax.training.run_directory.ledger import Ledger

EVENT = "rollback"


def record_rollback(cause: RollbackError, config: Config, checkpoints: Checkpoints, ledger: Ledger) -> tuple[int, str]:
    """Write the decision for a rollback to the ledger; `apply_rollback` carries it out.

    Returns:
      the step that the run goes back to, and a line about the rollback.

    Raises:
      DivergedError: the run has had recovery.max_rollbacks rollbacks within recovery.rollback_steps steps.
    """
    span = config.recovery.rollback_steps
    done = sum(entry["step"] > cause.first - span for entry in ledger.entries_of(EVENT))
    if done >= config.recovery.max_rollbacks:
        raise DivergedError(
            f"{cause.what}: {cause.reason}. The run was rolled back {done} time(s) within {span} steps "
            f"(recovery.max_rollbacks, recovery.rollback_steps): {cause.advice}"
        )
    is_of_replicas = isinstance(cause, ReplicaError)
    good = math.inf if is_of_replicas else trusted_until_step(cause.first - 1, config, ledger, checkpoints)
    intact = (metadata for step in checkpoints.steps() if step <= good and (metadata := checkpoints.metadata(step)))
    metadata = next(intact, None)
    entry = ledger.make_decision(EVENT, lambda: _rollback_entry(cause, config, metadata, ledger))
    assert entry is not None
    rows = "no rows are skipped"
    if entry["skipped_rows"] is not None:
        rows = "rows {:,} to {:,} are skipped".format(*entry["skipped_rows"])
    limit = config.recovery.max_rollbacks
    line = f"Rolling back to step {entry['to']}, {rows}; rollback {done + 1} of at most {limit}"
    if is_first():
        print(f"warning: {cause.reason}. {line}", file=sys.stderr)
    return entry["to"], line


def _rollback_entry(
    cause: RollbackError, config: Config, metadata: dict[str, Any] | None, ledger: Ledger
) -> dict[str, Any]:
    """The decision to continue from the checkpoint with this metadata, or from the beginning."""
    cursor = with_skipped_rows(Cursor() if metadata is None else Cursor.from_dict(metadata["cursor"]), ledger)
    skipped = None if isinstance(cause, ReplicaError) else _rows_to_skip(cause, config, cursor)
    return {"reason": cause.reason, "step": cause.last, "to": cursor.step, "skipped_rows": skipped}


def _rows_to_skip(cause: RollbackError, config: Config, cursor: Cursor) -> list[int]:
    """The interval of rows of the bad steps and of those before them, after a rollback to a cursor.

    It is within one phase, that of the first bad step; bad rows after this phase are read again.
    """
    before = cause.first - 1
    phase, within = config.locate_step(before)
    begins = max(before - config.recovery.stable_steps, cursor.step, before - within)
    ends = min(cause.last, before - within + config.phases[phase].steps)
    return [rows_before_step(config, cursor, step) for step in (begins, ends)]


def undetected_steps(config: Config) -> int:
    """The most steps that may have been skipped, or have high losses, without being detected as divergence yet."""
    return max(config.recovery.max_skipped, IN_A_ROW) - 1


def trusted_until_step(step: int, config: Config, ledger: Ledger, checkpoints: Checkpoints) -> int:
    """Checkpoints up to this step are good if the run has done `step` steps without divergence.

    The checkpoint of the last rollback after divergence stays good, and so does the initial state. With `start.source`
    that is the oldest checkpoint, of a later step if the run is a fork.
    """
    rollbacks = [entry["to"] for entry in ledger.entries_of(EVENT) if entry["skipped_rows"]]
    initial = min(checkpoints.steps(), default=0) if config.start.source is not None else 0
    return max([initial, step - config.recovery.stable_steps, *rollbacks[-1:]])


def apply_rollback(checkpoints: Checkpoints, ledger: Ledger) -> None:
    """Delete the checkpoints that the last rollback has discarded: none, if it went back to the newest one.

    Whether a damaged checkpoint belongs to them is unknown; it is deleted, too, with a warning on stderr. All processes
    verify them, the first one deletes, and the others wait.
    """
    decisions = ledger.entries_of(EVENT)
    if not decisions or decisions[-1]["skipped_rows"] is None:
        return
    to, interval = decisions[-1]["to"], tuple(decisions[-1]["skipped_rows"])
    newer = {step: checkpoints.metadata(step) for step in checkpoints.steps() if step > to}
    damaged = [step for step, metadata in newer.items() if metadata is None]
    if damaged and is_first():
        print(f"warning: deleting damaged checkpoint(s) of step {', '.join(map(str, damaged))}", file=sys.stderr)
    discarded = [
        step
        for step, metadata in newer.items()
        if metadata and interval not in Cursor.from_dict(metadata["cursor"]).skipped
    ]
    compute_and_broadcast("discarded checkpoints", lambda: checkpoints.delete([*damaged, *discarded]))


def with_skipped_rows(cursor: Cursor, ledger: Ledger) -> Cursor:
    """A checkpoint's cursor with the row intervals of all rollbacks that were decided after it was saved."""
    for entry in ledger.entries_of(EVENT):
        if entry["skipped_rows"] and tuple(entry["skipped_rows"]) not in cursor.skipped:
            cursor = cursor.skipping_rows(*entry["skipped_rows"])
    return cursor
