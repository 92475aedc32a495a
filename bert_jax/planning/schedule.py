"""`bert-jax schedule`: batch size, sequence length and learning rate over the steps of a config. Needs no jax.

Token counts include padding; the share of padding depends on the corpus (`bert-jax doctor`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.config import Config
from bert_jax.errors import UserError, install_command
from bert_jax.training.optimizers.schedules import learning_rate_at

TABLE_ROWS = 16
"""Evenly spaced steps in the table, besides those where a phase, its peak rate or its decay begins."""
BAR_WIDTH = 24
"""Characters of the bar of the highest learning rate."""
PLOT_POINTS = 1000
"""Evenly spaced steps in the plot."""
TIMED = "time decides the number of steps, at most {steps:,}; the schedule is scaled to that number"


def to_dict(config: Config) -> dict[str, Any]:
    """The schedule as plain values: `phases`, and a `table` with some steps of the run.

    Steps count from 0; those of a phase are in [`first_step`, `end_step`). `tokens` of a step are the tokens of the run
    up to and including this step.
    """
    starts = _starts(config)
    phases = [_phase_values(config, index, start) for index, start in enumerate(starts)]
    return {
        "name": config.name,
        "steps": config.total_steps,
        "tokens": sum(phase["tokens"] for phase in phases),
        "phases": phases,
        "table": [_step_values(config, starts, step) for step in _table_steps(config, starts)],
    }


def format_lines(schedule: dict[str, Any]) -> Iterator[str]:
    """The schedule as text: a block for each phase, then the table."""
    yield f"{schedule['name']}: {schedule['steps']:,} steps, {schedule['tokens']:,} tokens"
    for phase in schedule["phases"]:
        yield from _block(phase)
    yield ""
    yield f"{'step':>12}  {'phase':>5}  {'seq_len':>7}  {'batch':>7}  {'tokens so far':>19}  learning rate"
    peak = max(phase["learning_rate"] for phase in schedule["phases"]) or 1.0
    for row in schedule["table"]:
        bar = "#" * round(BAR_WIDTH * row["learning_rate"] / peak)
        yield (
            f"{row['step']:>12,}  {row['phase']:>5}  {row['seq_len']:>7}  {row['batch_size']:>7,}  "
            f"{row['tokens']:>19,}  {row['learning_rate']:<9.3g}  {bar}".rstrip()
        )


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
    return {
        "step": step,
        "phase": index,
        "seq_len": phase.seq_len,
        "batch_size": phase.batch_size_at(within),
        "learning_rate": learning_rate_at(config, step),
        "tokens": before + phase.rows_before(within + 1) * phase.seq_len,
    }


def _phase_values(config: Config, index: int, start: int) -> dict[str, Any]:
    phase = config.phases[index]
    names = (
        "seq_len start_batch_size batch_size ramp_steps accumulation learning_rate end_learning_rate warmup_steps "
        "warmup_done decay decay_power decay_start hours max_predictions moments step_count"
    )
    return {
        "phase": index,
        "first_step": start,
        "end_step": start + phase.steps,
        "tokens": phase.rows_before(phase.steps) * phase.seq_len,
        "num_layers": config.model_of(index).num_layers,
        "frozen": list(phase.frozen),
        **{name: getattr(phase, name) for name in names.split()},
    }


def _block(phase: dict[str, Any]) -> Iterator[str]:
    """A phase as text."""
    first, end = phase["first_step"], phase["end_step"]
    yield ""
    yield f"phase {phase['phase']}: steps {first:,} to {end - 1:,}"
    if phase["hours"] is not None:
        yield _line("time", f"{phase['hours']:g} hours; {TIMED.format(steps=end - first)}")
    yield _line("seq_len", f"{phase['seq_len']} tokens")
    batch = f"{phase['batch_size']:,} rows, accumulation {phase['accumulation'] or 'found at the start'}"
    if phase["start_batch_size"] is not None:
        batch += f"; reached after {phase['ramp_steps']:,} steps, in increments of {phase['start_batch_size']:,} rows"
    yield _line("batch", batch)
    yield _line("tokens", f"{phase['tokens']:,}")
    if phase["max_predictions"] is not None:
        yield _line("predicted", f"at most {phase['max_predictions']} tokens of an example")
    yield _line("layers", str(phase["num_layers"]))
    yield _line("frozen", ", ".join(phase["frozen"]) or "nothing")
    yield _line("moments", f"{phase['moments']}, step count {phase['step_count']}")
    yield _line("rate", _rates(phase))


def _rates(phase: dict[str, Any]) -> str:
    warmup, done = phase["warmup_steps"], phase["warmup_done"]
    text = f"peak {phase['learning_rate']:g}" + (f" after {warmup:,} warmup steps" if warmup else ", no warmup")
    text += f" ({done:,} more count as already done)" if warmup and done else ""
    if phase["decay"] == "constant":
        return f"{text}, then constant"
    power = f" of power {phase['decay_power']:g}" if phase["decay"] == "polynomial" else ""
    text += f"; {phase['decay']} decay{power} from its step {phase['decay_start']:,}"
    return f"{text} to {phase['end_learning_rate']:g}"


def _line(name: str, text: str) -> str:
    return f"  {name:<9}  {text}"
