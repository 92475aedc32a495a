"""What a run has cost, and what it costs to its end, from a price per chip and hour."""

import re
from collections.abc import Sequence

from bert_jax.chips import chip_of
from bert_jax.report import Note, Table
from bert_jax.run_report.run_files import RunFiles


def cost_blocks(runs: Sequence[RunFiles], price: float) -> list[Note | Table]:
    """Hours, chip-hours and cost so far and, as an estimate, to the end.

    Chips are those of the last attempt; on TPU v3 two jax devices are one, as in `bert-jax plan`.

    Args:
      runs: whose times were recorded; others have no row.
      price: of a chip for an hour, in any currency.
    """
    rows = []
    for run in runs:
        spent, left, chips = _hours_spent(run), _hours_left(run), _chips(run)
        for title, hours in (("so far", spent), ("to the end, estimated", left)):
            if hours is not None and chips:
                cost = f"{hours * chips * price:,.2f}"
                rows.append((run.name, title, f"{hours:.4g}", f"{hours * chips:.4g}", cost))
    if not rows:
        return []
    note = Note(
        f"At {price:g} per chip and hour, for the devices of the last attempt. Time between attempts is not counted. "
        "The estimate takes the tokens that are left at the speed so far, with evaluations, checkpoints and lost steps."
    )
    return [note, Table(("run", "", "hours", "chip-hours", "cost"), tuple(rows))]


def _chips(run: RunFiles) -> int:
    """Chips of the last attempt, 0: unknown."""
    text = run.environments[-1].get("devices", "") if run.environments else ""
    devices = re.findall(r"([0-9]+) x ([^,]+)", text)
    return sum(int(count) // (chip.devices_per_chip if (chip := chip_of(kind)) else 1) for count, kind in devices)


def _hours_spent(run: RunFiles) -> float:
    return (run.goodput["wall"] - run.goodput["down"]) / 3600 if run.goodput["wall"] else 0.0


def _hours_left(run: RunFiles) -> float | None:
    """None: the run has ended, or no time was recorded."""
    if (run.checkpoint or {}).get("ended") or not run.goodput["wall"]:
        return None
    tokens = [_tokens(run, step) for step in (run.last_step, run.config.total_steps)]
    return _hours_spent(run) * (tokens[1] - tokens[0]) / max(tokens[0], 1)


def _tokens(run: RunFiles, steps: int) -> int:
    """Tokens of the first steps of a run, padding included."""
    total = 0
    for phase in run.config.phases:
        done = min(steps, phase.steps)
        total, steps = total + phase.rows_before(done) * phase.seq_len, steps - done
    return total
