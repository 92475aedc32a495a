"""The settings of runs: against the preset, against each other, and as the command that repeats a run."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from bert_jax.command import flags
from bert_jax.config import Config, Phase, flatten, presets, to_dict
from bert_jax.provenance import MISSING, settings_tables
from bert_jax.report import Command, Note, Table
from bert_jax.run_report.run_files import RunFiles
from bert_jax.training.run_directory.workdir import paths_by_identity

_OTHER_ROWS = "held-out rows of another format, length or number"


def settings_table(config: Config) -> Table:
    """All settings; those that differ from the preset, or from the defaults, are marked."""
    if config.name in presets.preset_files():
        base, title = presets.load_config(config.name), "preset"
    else:
        base, title = Config(config.name, phases=(Phase(),) * len(config.phases)), "default"
    values, expected = flatten(to_dict(config)), flatten(to_dict(base))
    names = [*values, *(name for name in expected if name not in values)]
    rows = [(name, *(str(one.get(name, MISSING)) for one in (values, expected))) for name in names]
    marked = frozenset(i for i, (_, value, default) in enumerate(rows) if value != default)
    return Table(("setting", "value", title), tuple(rows), words=True, marked=marked)


def differences_table(runs: Sequence[RunFiles]) -> Table | None:
    """The settings that differ between runs; None if there are none."""
    different, _ = settings_tables({run.name: to_dict(run.config) for run in runs})
    return different if different.rows else None


def comparison_warnings(runs: Sequence[RunFiles]) -> list[Note]:
    """Why the metrics of runs cannot be compared with those of the first one; none if they can."""
    first, notes = runs[0], []
    for run in runs[1:]:
        reasons = [
            text
            for text, of in (
                ("another tokenizer", lambda one: one.tokenizer_fingerprint),
                ("other corpora or shares of them", lambda one: one.file["corpora"]),
                ("another task or other labelled data", _task),
                (_OTHER_ROWS, _held_out_rows),
            )
            if of(run) != of(first)
        ]
        if reasons:
            text = (
                f"Metrics of {run.name} cannot be compared with those of {first.name}: it has {' and '.join(reasons)}."
            )
            hint = " bert-jax evaluate scores both on the same rows (--format, --seq-len, --rows)."
            notes.append(Note(text + hint * (reasons == [_OTHER_ROWS]), warning=True))
    return notes


def _task(run: RunFiles) -> Any:
    task = run.config.finetune
    return None if task is None else (task.task, task.head.labels, task.data_sha256)


def _held_out_rows(run: RunFiles) -> Any:
    config = run.config
    if config.finetune is not None:
        return None
    rows = config.data.format, config.data.example_end, config.data.short_example_rate, config.data.examples_per_row
    return *rows, config.phases[-1].seq_len, config.evaluation.rows


def repeat_command(run: RunFiles) -> list[Command | Note]:
    """The command that repeats a run in another directory, reconstructed from its config."""
    config = run.config
    if config.finetune is not None:
        return _finetune_command(run)
    base = _closest_preset(config)
    if base is None:
        text = f"No preset has {len(config.phases)} phases: write the config into a Python file (docs/pretrain.md)."
        return [Note(text)]
    name, preset = base
    corpora = [["--corpus", corpus] for corpus in _corpora(run)]
    words, options = ["bert-jax", "pretrain", name], [*corpora, ["--workdir", _other_directory(run)]]
    if config.distil is not None:
        words = ["bert-jax", "compress", "pretrain", name, "--teacher", str(config.start.source)]
        options += map(shlex.split, config.distil.flags)
        config = _without_teacher(config, preset)
    return [Command(_joined(words, [*options, *_differing_flags(preset, config)]))]


def _without_teacher(config: Config, preset: Config) -> Config:
    """The config of a run with a teacher as its command gave it: without what it has from teacher and student."""
    computed = {name: getattr(config.model, name) for name in ("compute_dtype", "hidden_dropout", "attention_dropout")}
    phases = [
        dataclasses.replace(phase, frozen=tuple(one for one in phase.frozen if not one.startswith("teacher/")))
        for phase in config.phases
    ]
    model = dataclasses.replace(preset.model, **computed)
    return dataclasses.replace(config, model=model, phases=tuple(phases), start=preset.start)


def _finetune_command(run: RunFiles) -> list[Command | Note]:
    task = run.config.finetune
    options = [["--task", task.task], *(["--data", path] for path in run.file["corpus_paths"])]
    options += [*map(shlex.split, task.flags), ["--seed", str(run.config.seed)], ["--workdir", _other_directory(run)]]
    return [Command(_joined(["bert-jax", *task.command.split(), str(run.config.start.source)], options))]


def _other_directory(run: RunFiles) -> str:
    """A directory beside that of the run."""
    return f"{run.directory if run.directory.name not in ('', '..') else run.name}-again"


def _joined(words: Sequence[str], options: Sequence[Sequence[str]]) -> str:
    return " \\\n    ".join(shlex.join(part) for part in (words, *options))


def _closest_preset(config: Config) -> tuple[str, Config] | None:
    """The preset with the config's name, else the one with the fewest different values; phases cannot be added."""
    known = {name: presets.load_config(name) for name in presets.preset_files()}
    known = {name: preset for name, preset in known.items() if len(preset.phases) == len(config.phases)}
    if config.name in known:
        return config.name, known[config.name]
    return min(known.items(), key=lambda item: len(_differing_flags(item[1], config)), default=None)


def _differing_flags(base: Config, config: Config) -> list[list[str]]:
    """The words of the flags that change one config into another with as many phases."""
    differing = []
    for before, after in zip(flags.list_flags(Config, base), flags.list_flags(Config, config), strict=True):
        value = after.default
        if value == before.default:
            continue
        if isinstance(value, bool) and len(after.names) == 2:  # --log.layers, --log.no-layers
            differing.append([after.names[0 if value else 1]])
        else:
            differing.append([after.names[0], *_words(value)])
    return differing


def _words(value: Any) -> list[str]:
    return [word for one in value for word in _words(one)] if isinstance(value, tuple) else [str(value)]


def _corpora(run: RunFiles) -> list[str]:
    """The corpora as in the command, with their shares if there are several and their directories still exist."""
    shares, paths = run.file["corpora"], run.file["corpus_paths"]
    if len(shares) == 1:
        return paths[:1]
    by_identity = paths_by_identity(paths)
    return (
        [f"{by_identity[one]}={share:.6g}" for one, share in shares.items()]
        if shares.keys() <= by_identity.keys()
        else paths
    )
