"""Going back: which checkpoint a run continues from after trouble, and which rows it passes over then.

A checkpoint counts as good once `rescue.calm_steps` more updates were done without trouble: an update can spoil the
state although its own loss was finite, and the next ones show it. So a run goes back to the newest checkpoint that
is at least so much older than the first bad update, and passes over the rows from there to the last bad one. The
decision is in the ledger before anything is deleted; a run that dies in between carries it out when it is continued.
"""

import sys
from typing import Any

from bert_jax.config import Config
from bert_jax.data.cursor import Cursor, count_rows
from bert_jax.distributed.agreement import broadcast_from_first, is_first
from bert_jax.errors import UserError
from bert_jax.training.divergence import TroubleError
from bert_jax.training.run_directory.checkpoint import Checkpoints
from bert_jax.training.run_directory.ledger import Ledger

EVENT = "rollback"


def decide(trouble: TroubleError, config: Config, checkpoints: Checkpoints, ledger: Ledger) -> None:
    """Write down where to go back to; `carry_out` does it.

    Raises:
      UserError: the run went back as often as it may.
    """
    done = len(ledger.of(EVENT))
    if done >= config.rescue.max_rollbacks:
        raise UserError(
            f"training diverged: {trouble.reason}. It went back {done} time(s) already (rescue.max_rollbacks): lower "
            "the learning rate or lengthen the warmup, in another --workdir"
        )
    checkpoints.wait()
    entry = ledger.decide(EVENT, lambda: _way_back(trouble, config, checkpoints, ledger))
    assert entry is not None
    if is_first():
        first, last = entry["skipped_rows"]
        print(
            f"warning: {trouble.reason}. Going back to update {entry['to']}, and passing over rows {first:,} to "
            f"{last:,}; rollback {done + 1} of at most {config.rescue.max_rollbacks}",
            file=sys.stderr,
        )


def _way_back(trouble: TroubleError, config: Config, checkpoints: Checkpoints, ledger: Ledger) -> dict[str, Any]:
    before = trouble.first - 1
    good = trusted(before, config, ledger)
    intact = (about for step in checkpoints.steps() if step <= good and (about := checkpoints.about(step)))
    about = next(intact, None)
    place = with_skipped(Cursor() if about is None else Cursor.from_dict(about["cursor"]), ledger)
    # An interval of rows lies within one phase, that of the first bad update; bad rows behind it come again.
    phase, within = config.place_of(before)
    begins = max(before - config.rescue.calm_steps, place.step, before - within)
    ends = min(trouble.last, before - within + config.phases[phase].steps)
    skipped = [count_rows(config, place, step) for step in (begins, ends)]
    return {"reason": trouble.reason, "update": trouble.last, "to": place.step, "skipped_rows": skipped}


def trusted(step: int, config: Config, ledger: Ledger) -> int:
    """Checkpoints of so many updates or fewer are good once `step` updates were done without trouble.

    What a run went back to was found to be good then, and is still; so is what it started from.
    """
    gone_back = [entry["to"] for entry in ledger.of(EVENT)]
    return max([0, step - config.rescue.calm_steps, *gone_back[-1:]])


def carry_out(checkpoints: Checkpoints, ledger: Ledger) -> None:
    """Delete the checkpoints that the last decision to go back has overtaken.

    A damaged one does not tell whether it was; it is deleted, too, and named on stderr. The first process does it,
    and the others wait.
    """
    checkpoints.wait()
    broadcast_from_first("what is overtaken", lambda: _delete_overtaken(checkpoints, ledger))


def _delete_overtaken(checkpoints: Checkpoints, ledger: Ledger) -> None:
    for entry in ledger.of(EVENT)[-1:]:
        interval = tuple(entry["skipped_rows"])
        newer = {step: checkpoints.about(step) for step in checkpoints.steps() if step > entry["to"]}
        damaged = [step for step, about in newer.items() if about is None]
        if damaged:
            print(f"warning: deleting damaged checkpoint(s) of update {', '.join(map(str, damaged))}", file=sys.stderr)
        overtaken = [
            s for s, about in newer.items() if about and interval not in Cursor.from_dict(about["cursor"]).skipped
        ]
        checkpoints.delete([*damaged, *overtaken])


def with_skipped(cursor: Cursor, ledger: Ledger) -> Cursor:
    """The cursor of a checkpoint with the intervals that were decided on after it was saved."""
    for entry in ledger.of(EVENT):
        if tuple(entry["skipped_rows"]) not in cursor.skipped:
            cursor = cursor.skipping_rows(*entry["skipped_rows"])
    return cursor
