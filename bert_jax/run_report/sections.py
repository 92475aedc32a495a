"""The sections of a report on one run, or on several side by side."""

from collections.abc import Sequence
from typing import Any

from bert_jax.provenance import MISSING
from bert_jax.report import Note, ReportBlock, Section, Table
from bert_jax.run_report import cost, metric_blocks, settings
from bert_jax.run_report.group_tokens import group_blocks
from bert_jax.run_report.run_files import RunFiles

TEXTS = (
    "The [MASK] of the house was open.",
    "She went to the [MASK] to buy some bread.",
    "He said that [MASK] would come back tomorrow.",
    "Paris is the capital of [MASK].",
)
"""Filled by the model of a report; [MASK] is replaced by the mask token of the vocabulary."""
CANDIDATES = 5


def run_sections(runs: Sequence[RunFiles], texts: Sequence[str], price: float | None = None) -> list[Section]:
    """All sections of a report.

    Args:
      runs: one, or several to compare.
      texts: whose masks are filled; none: no samples.
      price: of a chip for an hour; None: nothing about the cost.

    Raises:
      UserError: a text has no mask token or is too long.
    """
    several = len(runs) > 1
    title = f"Runs {', '.join(run.name for run in runs)}" if several else f"Run {runs[0].name}"
    sections = [
        Section(title, _summary(runs), level=1),
        Section("Final metrics", _final_metrics(runs)),
        Section("Held-out metrics", tuple(metric_blocks.held_out_curves(runs))),
        Section("Training", tuple(metric_blocks.training_curves(runs))),
        Section("Throughput", tuple(filter(None, [metric_blocks.throughput_table(runs)]))),
        *([] if several else [Section("Tokens by source and language", group_blocks(runs[0]))]),
        Section("Goodput", tuple(metric_blocks.goodput_blocks(runs))),
        Section("Cost", tuple([] if price is None else cost.cost_blocks(runs, price))),
        Section("Filled masks", tuple(filter(None, [filled_masks(runs, texts)] if texts else []))),
        Section("Decisions", tuple(block for run in runs for block in _decisions(run, several))),
        Section("Commands" if several else "Command", tuple(b for run in runs for b in settings.repeat_command(run))),
        *([] if several else [Section("Settings", _settings(runs[0]))]),
        Section("Provenance", tuple(filter(None, [_provenance(runs)]))),
    ]
    return [section for section in sections if section.blocks]


def _summary(runs: Sequence[RunFiles]) -> tuple[ReportBlock, ...]:
    if len(runs) == 1:
        (run,) = runs
        about = [f"Config {run.config.name}, seed {run.config.seed}: {run.state}."]
        if skipped := run.last(metric_blocks.TRAINING).get("skipped_steps"):
            about.append(f"{skipped:,} of {run.last_step:,} steps were skipped: their loss or gradient was not finite.")
        corpora = Note(f"Corpora: {', '.join(run.file['corpus_paths'])}.")
        return tuple(filter(None, [*map(Note, about), _score(run), corpora]))
    states = tuple((run.name, run.config.name, str(run.config.seed), run.state) for run in runs)
    differences = settings.differences_table(runs) or Note("All settings are equal.")
    return (
        *filter(None, map(_score, runs)),
        *settings.comparison_warnings(runs),
        Table(("run", "config", "seed", "state"), states, words=True),
        Note("Settings that differ:"),
        differences,
    )


def _score(run: RunFiles) -> Note | None:
    """The score of a fine-tuning run beside that of the best constant prediction; None: it has none yet."""
    if run.task_score is None:
        return None
    one, baseline = run.task_score
    constant = f"the best constant prediction has {baseline:.4f}"
    if one["score"] is None:
        return Note(f"{run.name} failed: it diverged, so it has no score; {constant}.", warning=True)
    if one["failed"]:
        return Note(f"{run.name} failed: its score is {one['score']:.4f}; {constant}.", warning=True)
    test = f", and {one['test_score']:.4f} on test" if "test_score" in one else ""
    return Note(f"{run.name} has the score {one['score']:.4f}{test}; {constant}.")


def _final_metrics(runs: Sequence[RunFiles]) -> tuple[ReportBlock, ...]:
    if len(runs) == 1:
        return metric_blocks.final_metrics(runs[0])
    tables = [metric_blocks.compared_metrics(runs, split) for split in metric_blocks.SPLITS]
    note = Note(f"In parentheses: the difference to {runs[0].name}, of single runs; it includes the noise of seeds.")
    return (*filter(None, tables), note)


def _settings(run: RunFiles) -> tuple[ReportBlock, ...]:
    table = settings.settings_table(run.config)
    base = f"preset {run.config.name}" if table.header[2] == "preset" else "defaults"
    return Note(f"Marked: settings that differ from the {base} ({len(table.marked)})."), table


def _provenance(runs: Sequence[RunFiles]) -> Table | None:
    """Of the last attempt of each run; None if it was not recorded."""
    last = [run.environments[-1] if run.environments else {} for run in runs]
    names = dict.fromkeys(name for one in last for name in one)
    rows = [(name, *(str(one.get(name, MISSING)) for one in last)) for name in names]
    others = {
        "attempts": [str(len(run.environments)) for run in runs],
        "SHA-256 of the data": [", ".join(run.file["corpora"]) for run in runs],
        "SHA-256 of the tokenizer": [run.tokenizer_fingerprint for run in runs],
    }
    rows += [(name, *values) for name, values in others.items()]
    header = ("last attempt", *(run.name for run in runs)) if len(runs) > 1 else ("last attempt", "")
    return Table(header, tuple(rows), words=True) if names else None


def _decisions(run: RunFiles, several: bool) -> list[ReportBlock]:
    """The ledger in words; of the estimates of a time limit, the last one."""
    last_time = next((entry for entry in reversed(run.decisions) if entry["event"] == "time"), None)
    kept = [entry for entry in run.decisions if entry["event"] != "time" or entry is last_time]
    prefix = f"{run.name}: " if several else ""
    return [Note(prefix + _in_words(entry)) for entry in kept]


def _in_words(entry: dict[str, Any]) -> str:
    match entry:
        case {"event": "rollback", "to": to, "skipped_rows": rows}:
            reason = str(entry.get("reason", "training diverged"))
            skipped = "no rows were skipped" if rows is None else "rows {:,} to {:,} were skipped".format(*rows)
            return f"Rollback to step {to:,}, and {skipped}: {reason}."
        case {"event": "micro_batch", "accumulation": count}:
            devices = f"{entry.get('devices', '?')} x {entry.get('device', '?')}"
            text = f"Phase {entry.get('phase', '?')} on {devices}: {count} micro-batches per step"
            if {"bytes", "limit"} <= entry.keys():
                text += f", {entry['bytes'] / 2**30:.2f} of {entry['limit'] / 2**30:.2f} GiB on each device"
            return f"{text}."
        case {"event": "time", "step": step, "hours": hours, "end": end}:
            return f"Time limit of {hours:g} hours: by the estimate at step {step:,}, the run ends after step {end:,}."
    values = ", ".join(f"{name} {value}" for name, value in entry.items() if name != "event")
    return f"{entry['event']}: {values}."


def filled_masks(runs: Sequence[RunFiles], texts: Sequence[str]) -> Table | None:
    """The most probable tokens for the masks in some texts; None if no run has a checkpoint and an MLM head."""
    from bert_jax.inference import loaded_model

    filled: dict[str, list[str]] = {text: [] for text in texts}
    for run in runs:
        config = run.config
        model = loaded_model.load(run.directory) if run.checkpoint is not None and config.finetune is None else None
        can_fill = model is not None and model.heads.mlm and model.config.direction == "bidirectional"
        for text, cells in filled.items():
            cells.append(_candidates(model, text) if can_fill else MISSING)
    if all(cell == MISSING for cells in filled.values() for cell in cells):
        return None
    header = ("text", *(run.name for run in runs)) if len(runs) > 1 else ("text", "most probable tokens")
    return Table(header, tuple((text, *cells) for text, cells in filled.items()), words=True)


def _candidates(model: Any, text: str) -> str:
    text = text.replace("[MASK]", model.tokenizer.id_to_token(model.tokenizer.mask_id))
    filled = model.fill_mask(text, min(CANDIDATES, model.tokenizer.vocab_size))
    return "; ".join(" · ".join(f"{c.token} {c.probability:.0%}" for c in candidates) for candidates in filled)
