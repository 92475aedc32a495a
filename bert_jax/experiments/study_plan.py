"""What a study will run and what it costs, before it starts and while it runs."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import jax

from bert_jax.chips import Sizes, chip_of
from bert_jax.config import Config
from bert_jax.experiments.budget import Cell
from bert_jax.experiments.cell_records import CellRun, RunRecord, read_record, runs_of_part
from bert_jax.experiments.runner import OpenStudy, is_done
from bert_jax.planning.roofline import predict
from bert_jax.planning.run_plan import hours_of
from bert_jax.report import Note, Section
from bert_jax.report.cells import make_table
from bert_jax.training.implementation import choose_implementation
from bert_jax.training.sharding import make_mesh


def plan_study(opened: OpenStudy, part: tuple[int, int], retries: int) -> dict[str, Any]:
    """The grid of a study as plain values: its cells with their costs, states and seconds per run.

    Args:
      opened: the study.
      part: index and number of parts; the remaining time is that of the part.
      retries: of each run.
    """
    records = [(run, read_record(run)) for run in opened.runs]
    finished = [(run, record) for run, record in records if record is not None and not record["error"]]
    rate = None if opened.study.is_of_models else _measured_rate(finished)
    mine = {run.record_path for run in runs_of_part(opened.runs, part)}
    left = [run for run, record in records if run.record_path in mine and not is_done(record, retries)]
    seconds: dict[str, float | None]
    if opened.study.is_of_models:
        mean = fmean(record["timing"]["seconds"] for _, record in finished) if finished else None
        seconds, source = dict.fromkeys((cell.name for cell in opened.cells), mean), f"measured: {len(finished)} runs"
    elif rate:
        seconds = {cell.name: cell.cost.flops / rate for cell in opened.cells}
        source = f"measured: {rate:.3g} model FLOP/s in {len(finished)} runs, evaluation included"
    else:
        seconds = {cell.name: _planned_seconds(cell.config) for cell in opened.cells}
        source = "planned: the roofline of bert-jax plan, without evaluation and checkpoints"
    per_run = list({run.directory: seconds[run.cell.name] for run in left}.values())  # cells can share runs
    known = [one for one in per_run if one is not None]
    return {
        "study": opened.study.name,
        "design": opened.study.design,
        "equal": opened.study.equal,
        "seeds": opened.study.seeds,
        "part": f"{part[0] + 1}/{part[1]}",
        "runs": len(records),
        "left": len(left),
        "seconds_left": sum(known) if len(known) == len(per_run) else None,
        "time_source": source if len(known) == len(per_run) else "unknown before the first run has finished",
        "tasks": list(opened.study.tasks),
        "cells": [_cell_values(cell, records, seconds[cell.name], retries) for cell in opened.cells],
    }


def _measured_rate(finished: Sequence[tuple[CellRun, RunRecord]]) -> float | None:
    """Model FLOP/s over finished runs."""
    seconds = sum(record["timing"]["seconds"] for _, record in finished)
    return sum(run.cell.cost.flops for run, _ in finished) / seconds if seconds else None


def _planned_seconds(config: Config) -> float | None:
    """Seconds of a run by the roofline; None: the devices of this process are of an unknown kind."""
    kind = jax.devices()[0].device_kind
    if (chip := chip_of(kind)) is None:
        return None
    config = choose_implementation(config, kind)
    sizes = Sizes(**make_mesh(config.mesh).shape)
    steps = [
        predict(config, i, sizes, phase.accumulation or phase.fewest_micro_batches, chip).step_seconds
        for i, phase in enumerate(config.phases)
    ]
    return hours_of(config, steps) * 3600


def _cell_values(
    cell: Cell, records: Sequence[tuple[CellRun, RunRecord | None]], seconds: float | None, retries: int
) -> dict[str, Any]:
    own = [record for run, record in records if run.cell is cell]
    return {
        "name": cell.name,
        "levels": cell.levels,
        "runs": len(own),
        "finished": sum(record is not None and not record["error"] for record in own),
        "failed": sum(is_done(record, retries) and bool(record and record["error"]) for record in own),
        "steps": cell.cost.steps,
        "tokens": cell.cost.tokens,
        "parameters": cell.cost.parameters,
        "flops": cell.cost.flops,
        "seconds": seconds,
    }


def to_sections(values: dict[str, Any]) -> list[Section]:
    """The grid for a terminal or a page."""
    left = values["seconds_left"]
    time = f"about {_duration(left)} ({values['time_source']})" if left is not None else values["time_source"]
    columns = {"cell": "{name}", "finished": "{finished} of {runs}", "failed": "{failed}"}
    columns |= {name: f"{{{name}:,}}" for name in ("steps", "tokens", "parameters")}
    columns |= {"FLOPs": "{flops:.3g}", "time per run": lambda cell: _duration(cell["seconds"])}
    pretrained = any(cell["steps"] for cell in values["cells"])
    budget = f"equal {values['equal']}" if pretrained else "nothing is pretrained"
    tasks = ", ".join(values["tasks"])
    tuned = f" FLOPs and planned times are without fine-tuning on {tasks}." if tasks and pretrained else ""
    note = Note(
        f"{values['runs']} runs of {len(values['cells'])} cells (seeds of each: {values['seeds']}), {budget}. "
        f"Part {values['part']} has {values['left']} runs left; time: {time}.{tuned}"
    )
    return [Section(f"study {values['study']}", (make_table(values["cells"], columns), note), level=1)]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds / 3600:,.1f} h" if seconds >= 5400 else f"{seconds / 60:,.1f} min"
