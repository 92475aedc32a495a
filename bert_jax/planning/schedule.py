"""`bert-jax schedule`: batch size, sequence length and learning rate over the steps of a config. Needs no jax.

Token counts include padding; the share of padding depends on the corpus (`bert-jax doctor`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bert_jax import config as config_lib
from bert_jax.config import Config
from bert_jax.errors import UserError, install_command
from bert_jax.report import Note, Section, Table
from bert_jax.report.cells import cell, make_table
from bert_jax.training.optimizers.schedules import learning_rate_at

TABLE_ROWS = 16
"""Evenly spaced steps in the table, besides those where a phase, its peak rate or its decay begins."""
STEP_COUNTS = ("step", "phase", "seq_len", "batch_size", "tokens")
PLOT_POINTS = 1000
"""Evenly spaced steps in the plot."""


def to_dict(config: Config) -> dict[str, Any]:
    """The schedule as plain values: `phases`, and a `table` with some steps of the run, with mask rates if they change
    along a phase.

    Steps count from 0; those of a phase are in [`first_step`, `end_step`). `tokens` of a step are the tokens of the run
    up to and including this step.
    """
    starts, plain = _starts(config), config_lib.to_dict(config)["phases"]
    phases = [
        {
            "phase": i,
            "first_step": start,
            "end_step": start + phase.steps,
            "tokens": phase.rows_before(phase.steps) * phase.seq_len,
            **values,
            "num_layers": config.model_of(i).num_layers,
        }
        for i, (start, phase, values) in enumerate(zip(starts, config.phases, plain, strict=True))
    ]
    return {
        "name": config.name,
        "steps": config.total_steps,
        "tokens": sum(phase["tokens"] for phase in phases),
        "phases": phases,
        "table": [_step_values(config, starts, step) for step in _table_steps(config, starts)],
    }


def to_sections(schedule: dict[str, Any]) -> list[Section]:
    """The schedule as a report: the phases side by side, then the table of steps."""
    blocks: list[Note | Table] = [phase_table(schedule["phases"])]
    if schedule["phases"][-1]["hours"] is not None:
        blocks.append(Note("hours: time decides the number of steps, at most `steps`; the schedule is scaled to it"))
    rates = [name for name in ("learning_rate", "mask_rate") if name in schedule["table"][0]]
    columns = {name: f"{{{name}:,}}" for name in STEP_COUNTS} | {name: f"{{{name}:.3g}}" for name in rates}
    title = f"{schedule['name']}: {schedule['steps']:,} steps, {schedule['tokens']:,} tokens"
    return [Section(title, (*blocks, make_table(schedule["table"], columns)), level=1)]


def phase_table(phases: Iterable[dict[str, Any]]) -> Table:
    """A column for each phase, a row for each name; values that are None or missing are empty."""
    columns = list(phases)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = tuple((name, *(_value(column.get(name)) for column in columns)) for name in names)
    return Table(("", *(f"phase {i}" for i in range(len(columns)))), rows)


def _value(value: Any) -> str:
    return cell(value, "," if isinstance(value, int) else "", missing="")


def plot(config: Config, path: Path) -> None:
    """Draw learning rate, batch size and sequence length over the steps, as PNG.

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import StrMethodFormatter
    except ModuleNotFoundError:
        raise UserError(f"--plot needs matplotlib: {install_command('plot')}") from None
    starts, total = _starts(config), config.total_steps
    ends = {step for start in starts for step in (start - 1, start)}
    steps = sorted({total * i // PLOT_POINTS for i in range(PLOT_POINTS)} | ends - {-1} | {total - 1})
    rows = [_step_values(config, starts, step) for step in steps]
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    panels = (("learning_rate", "learning rate"), ("batch_size", "rows per step"), ("seq_len", "tokens per row"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        axis.plot(steps, [row[name] for row in rows], drawstyle="default" if axis is axes[0] else "steps-post")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        for start in starts[1:]:
            axis.axvline(start, color="gray", linestyle=":")
    axes[0].set_title(config.name)
    axes[-1].set_xlabel("step" if config.phases[-1].hours is None else "step (time decides the last one)")
    for axis in (axes[-1].xaxis, axes[1].yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.align_ylabels()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UserError(f"--plot {path}: it cannot be written: {error.strerror}") from None


def _starts(config: Config) -> list[int]:
    return [sum(phase.steps for phase in config.phases[:i]) for i in range(len(config.phases))]


def _table_steps(config: Config, starts: list[int]) -> list[int]:
    """Steps of the table."""
    total = config.total_steps
    boundaries = [
        start + step
        for start, phase in zip(starts, config.phases, strict=True)
        for step in (0, phase.warmup_steps, phase.decay_start)
        if step < phase.steps
    ]
    return sorted({total * i // TABLE_ROWS for i in range(TABLE_ROWS)} | {*boundaries, total - 1})


def _step_values(config: Config, starts: list[int], step: int) -> dict[str, Any]:
    index, within = config.locate_step(step)
    phase = config.phases[index]
    before = sum(p.rows_before(p.steps) * p.seq_len for p in config.phases[:index])
    values = {
        "step": step,
        "phase": index,
        "seq_len": phase.seq_len,
        "batch_size": phase.batch_size_at(within),
        "learning_rate": learning_rate_at(config, step),
        "tokens": before + phase.rows_before(within + 1) * phase.seq_len,
    }
    if any(one.end_mask_rate is not None for one in config.phases):
        is_masked = config.model_of(index).direction == "bidirectional"
        values["mask_rate"] = config.mask_rate_at(index, within) if is_masked else None
    return values
