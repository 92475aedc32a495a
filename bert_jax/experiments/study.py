"""A study: a base config, factors with levels, and what is compared. A file of a study has a function ``study()``."""

import dataclasses
import itertools
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from bert_jax import config as config_lib
from bert_jax.config import Config, Phase, presets
from bert_jax.config.sections import PAIR_FORMATS, Format
from bert_jax.config.training import MIN_SEQ_LEN
from bert_jax.errors import UserError, did_you_mean, require, short_repr
from bert_jax.field_validation import Count, Interval, Positive, Share, check
from bert_jax.finetune.options import FinetuneOptions

Changes = dict[str, Any]
"""Changes of a config: as for `config.replace`, a dict for a section. ``phases`` is a tuple of phases, or a dict of
fields that change in every phase."""
Levels = dict[str, str]
"""The level of each factor."""
AREA, TOKENS_TO_LOSS = CURVE_METRICS = ("mlm_loss_area", "mlm_tokens_to_loss")
"""Metrics of the curve of `mlm_loss` by tokens (positions of all rows) at the checkpoints that a run has kept: its mean
over the interval that all runs of the study have; and the tokens after which it reaches `Study.target_loss`, at most
those of the last checkpoint."""
METRICS = ("mlm_loss", "mlm_accuracy", *CURVE_METRICS, *(f"{pair}_accuracy" for pair in PAIR_FORMATS))
"""Metrics of pretraining: of the MLM head on `Study.rows`, and of each pair objective on rows of its first format
(`PAIR_FORMATS`) with the same length and number."""
MAX_CELLS = 1000
"""Of a study; each is compared with all others when they are made."""
MAX_CELL_NAME = 240
"""Characters of the name of a cell, which is that of a directory."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class HeldOutRows:
    """The held-out rows that all runs of a study are scored on, with 15 % of their tokens masked, always the same."""

    format: Format = "full_sentences"
    """Format of the examples, which end at a sentence."""
    seq_len: Annotated[int, Interval(f"[{MIN_SEQ_LEN}, 1e6]")] = 128
    """Tokens per row."""
    count: Count = 512
    """Rows of each validation split; all if it has fewer."""

    def __post_init__(self) -> None:
        check(self, "rows.")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs that differ in the levels of factors, and the comparisons of their metrics.

    model.vocab_size is that of the corpora. The seed of a run is its config's seed plus its index. A study of models
    (`models`) pretrains nothing: its levels have other models or other options of tasks.
    """

    name: str
    """Name of the study."""
    base: Config = field(default_factory=lambda: Config(name="models"))
    """What the levels change; not read by a study of models."""
    factors: dict[str, dict[str, Changes]]
    """Changes of the base by factor and level; those named ``tasks`` are of the options of all tasks, and ``models``
    replaces those of the study."""
    models: tuple[str, ...] = ()
    """Runs, checkpoints of runs (``RUN/checkpoints/STEP``) or exported models that the cells begin with, instead of
    pretraining: a different one for each seed, or one, which is fixed, so that seeds are those of fine-tuning."""
    margins: dict[str, Positive]
    """By metric (`METRICS`, and the score of a task by its name): the largest difference that does not matter. Only
    these metrics are compared."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tasks of `bert-jax finetune` that every run is fine-tuned on, with options that differ from the defaults
    (`FinetuneOptions`). A run's score is the mean over its fine-tuning seeds. Of several learning rates, a tuple, one
    is chosen for each fine-tuning seed and each half of dev by the other half (`finetuned.choose_by_halves`)."""
    rows: HeldOutRows = HeldOutRows()
    """Held-out rows that all runs are scored on."""
    target_loss: Positive | None = None
    """Loss of `mlm_tokens_to_loss`. None: the highest final loss of the baseline's runs, so that all of these reach
    it; a stated one is independent of the runs."""
    baseline: Levels = field(default_factory=dict)
    """Baseline of each factor; default: its first level."""
    design: Literal["one_at_a_time", "grid"] = "one_at_a_time"
    """Change one factor at a time against the baseline, or combine all levels of all factors."""
    seeds: Annotated[int, Interval("[1, 1000]")] = 3
    """Runs of each combination of levels."""
    equal: Literal["tokens", "steps", "flops", "parameters"] = "tokens"
    """What the runs have in common with the baseline: positions of all rows, steps, or FLOPs of the model, to which the
    steps are adjusted; or parameters, with an equal number of steps."""
    tolerance: Share = 0.01
    """Largest relative deviation from the baseline's budget."""
    alpha: Annotated[float, Interval("(0, 1)")] = 0.05
    """Level of the tests."""

    def __post_init__(self) -> None:
        check(self, "study.")
        for name in (self.name, *self.factors, *itertools.chain.from_iterable(self.factors.values())):
            require(bool(_NAME.fullmatch(name)), f"study: the name '{name}' may only have letters, digits, . _ and -")
        for factor, levels in self.factors.items():
            require(len(levels) >= 2, f"study.factors.{factor}: a factor needs at least two levels")
        require(bool(self.factors), "study.factors: a study needs at least one factor")
        counts = [len(levels) for levels in self.factors.values()]
        cells = math.prod(counts) if self.design == "grid" else 1 + sum(counts) - len(counts)
        require(
            cells <= MAX_CELLS,
            f"study.factors: {cells:,} combinations of levels, and a study has at most {MAX_CELLS:,}: leave some out",
        )
        for factor, level in self.baseline.items():
            _require_known(factor, self.factors, "study.baseline", "factor")
            _require_known(level, self.factors[factor], f"study.baseline.{factor}", "level")
        require(bool(self.margins), f"study.margins: name at least one of {', '.join(METRICS)} and its margin")
        for metric in self.margins:
            _require_known(metric, (*METRICS, *self.tasks), "study.margins", "metric")

    @property
    def is_of_models(self) -> bool:
        """Whether nothing is pretrained."""
        return any(self.models_of(levels) for levels in self.combinations())

    def models_of(self, levels: Levels) -> tuple[str, ...]:
        """The models of a cell: one for all seeds, or one for each; empty: they are pretrained."""
        models: Any = self.models
        for factor, level in levels.items():
            models = self.factors[factor][level].get("models", models)
        known = isinstance(models, tuple | list) and all(isinstance(path, str) for path in models)
        require(known, f"study {self.name}: models is {short_repr(models)}: it must be a tuple of paths")
        return tuple(models)

    def finetune_options(self, levels: Levels) -> dict[str, tuple[FinetuneOptions, ...]]:
        """The options of each task in a cell, by learning rate.

        Raises:
          UserError: an unknown option, or one that is not valid.
        """
        changes: dict[str, Any] = {}
        for factor, level in levels.items():
            changes |= self.factors[factor][level].get("tasks", {})
        known = [one.name for one in dataclasses.fields(FinetuneOptions)]
        options: dict[str, tuple[FinetuneOptions, ...]] = {}
        for task, values in self.tasks.items():
            where = f"study {self.name}, {self.cell_name(levels)}, tasks.{task}"
            for name in values | changes:
                _require_known(name, known, where, "option")
            rates = (values | changes).get("learning_rate")
            rates = tuple(rates) if isinstance(rates, tuple | list) else (rates,)
            require(0 < len(rates) == len({*rates}), f"{where}: learning_rate: give different rates to choose from")
            try:
                options[task] = tuple(FinetuneOptions(**(values | changes | {"learning_rate": one})) for one in rates)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        return options

    @property
    def baseline_levels(self) -> Levels:
        """The baseline of every factor."""
        return {factor: next(iter(levels)) for factor, levels in self.factors.items()} | self.baseline

    def combinations(self) -> list[Levels]:
        """The levels of every cell, the baseline first."""
        baseline = self.baseline_levels
        if self.design == "grid":
            names = [sorted(levels, key=lambda level, f=f: level != baseline[f]) for f, levels in self.factors.items()]
            return [dict(zip(self.factors, one, strict=True)) for one in itertools.product(*names)]
        others = ((f, level) for f, levels in self.factors.items() for level in levels if level != baseline[f])
        return [baseline, *(baseline | {factor: level} for factor, level in others)]

    def cell_name(self, levels: Levels) -> str:
        """Name of a cell: the levels that differ from the baseline."""
        changed = [f"{factor}={level}" for factor, level in levels.items() if level != self.baseline_levels[factor]]
        return ",".join(changed) or "baseline"

    def check_changes(self, levels: Levels) -> None:
        """Check what the levels of a cell change.

        Raises:
          UserError: an unknown field, one that a level of another factor changes, one that has no effect, or a name of
            the cell that is too long.
        """
        name = self.cell_name(levels)
        require(
            len(name) <= MAX_CELL_NAME,
            f"study {self.name}: the name of the cell {name[:60]}... has {len(name)} characters, and a directory at "
            f"most {MAX_CELL_NAME}: give factors and levels shorter names",
        )
        factor_of: dict[str, str] = {}
        for factor, level in levels.items():
            where = f"study {self.name}, {factor} {level}"
            for name, changes in self.factors[factor][level].items():
                require(name != "tasks" or bool(self.tasks), f"{where}: tasks: the study has no tasks")
                require(
                    name in ("tasks", "models") or not self.models_of(levels),
                    f"{where}: {name} changes pretraining, and the models exist already: change models or tasks",
                )
                for changed in _changed_fields(self.base, name, changes, where):
                    other = factor_of.setdefault(changed, factor)
                    require(
                        other == factor,
                        f"study {self.name}: the factors {other} and {factor} both change {changed} "
                        f"({other}={levels[other]}, {factor}={level}), so only one of them would have an effect: leave "
                        "the field to one factor, or make one factor of both",
                    )

    def config_of(self, levels: Levels) -> Config:
        """The config of a cell, before its steps are adjusted to the budget.

        Raises:
          UserError: see `check_changes`; or the config is not valid.
        """
        self.check_changes(levels)
        sections: dict[str, Changes] = {}
        phases: tuple[Phase, ...] = self.base.phases
        for factor, level in levels.items():
            where = f"study {self.name}, {factor} {level}"
            for name, changes in self.factors[factor][level].items():
                if name == "phases":
                    phases = _change_phases(phases, changes, where)
                elif name != "tasks" and changes != {}:
                    sections[name] = sections.get(name, {}) | changes if isinstance(changes, dict) else changes
        cell = self.cell_name(levels)
        try:
            config = config_lib.replace(self.base, **sections, name=f"{self.name}/{cell}", phases=phases)
        except UserError as error:
            raise UserError(f"study {self.name}, {cell}: {error}") from error
        require(
            config.model.vocab_size == self.base.model.vocab_size,
            f"study {self.name}, {cell}: model.vocab_size {config.model.vocab_size} is not that of the corpora, "
            f"{self.base.model.vocab_size}: cells with different tokenizers cannot be compared: write the level as a "
            "dict, without vocab_size",
        )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain values of the study, to compare with another version of it."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        values |= {"base": config_lib.to_dict(self.base), "baseline": self.baseline_levels}
        return json.loads(json.dumps(values, default=dataclasses.asdict))


def _require_known(name: Any, known: Any, where: str, kind: str) -> None:
    hint = did_you_mean(str(name), known)
    require(name in known, f"{where}: there is no {kind} '{name}': {hint and f'{hint} '}use {', '.join(known)}")


def _changed_fields(base: Config, name: str, changes: Any, where: str) -> list[str]:
    """The fields that a level changes in a section, in the phases or in the options of tasks; or ``[name]``.

    Raises:
      UserError: an unknown name or field, or a dict for a name without fields.
    """
    names = [one.name for one in dataclasses.fields(Config) if one.name not in ("name", "finetune", "distil")]
    _require_known(name, [*names, "tasks", "models"], where, "field")
    if name == "models":
        return [name]
    section = {"phases": Phase, "tasks": FinetuneOptions}.get(name) or getattr(base, name)
    known = [one.name for one in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
    if not isinstance(changes, dict):
        require(name != "tasks", f"{where}: tasks is {short_repr(changes)}: it must be a dict of options")
        return [f"{name}.{one}" for one in known] or [name]
    require(bool(known), f"{where}: {name} is {short_repr(changes)}: it has no fields, give a value")
    for one in changes:
        _require_known(one, known, f"{where}, {name}", "option" if name == "tasks" else "field")
    return [f"{name}.{one}" for one in changes]


def _change_phases(phases: tuple[Phase, ...], changes: Any, where: str) -> Any:
    """The phases of a level; what is neither a dict nor a list is left for the check of the config."""
    if not isinstance(changes, dict):
        return tuple(changes) if isinstance(changes, list) else changes
    try:
        return tuple(dataclasses.replace(phase, **changes) for phase in phases)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def study_files() -> dict[str, Path]:
    """The shipped studies by name."""
    return presets.shipped_files("studies")


def load_study(name_or_file: str) -> Study:
    """The study that a shipped or another Python file returns from its function ``study()``.

    Raises:
      UserError: there is no such study or file, or see `presets.call_in_file`.
    """
    shipped = study_files()
    path = shipped.get(name_or_file, Path(name_or_file))
    if path.suffix != ".py" or not os.path.isfile(path):  # noqa: PTH113 (Path.is_file raises for names that are too long)
        hint = did_you_mean(name_or_file, shipped)
        raise UserError(
            f"there is no study '{name_or_file[:80]}': {hint and f'{hint} '}Studies are {', '.join(shipped)}; a file "
            "must end in .py"
        )
    return presets.call_in_file(path, "study", Study)
