"""Equal budgets: the cost of a run, and the steps with which it costs as much as another one."""

import dataclasses
import functools
from dataclasses import dataclass

import jax

from bert_jax import config as config_lib
from bert_jax.config import Config, Phase
from bert_jax.errors import UserError, require
from bert_jax.experiments.study import CURVE_METRICS, Levels, Study
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.model.generator import ModelSpec
from bert_jax.objectives.objectives import active_objectives
from bert_jax.training.pretraining_task import model_spec, train_step_flops


@dataclass(frozen=True)
class Cost:
    """Cost of a run, all counted from its config."""

    steps: int
    tokens: int
    """Positions of all rows, padding included."""
    flops: float
    """FLOPs of the model (model/flops.py)."""
    parameters: int
    """Of encoder and heads, at full depth."""


@dataclass(frozen=True)
class Cell:
    """The runs of one combination of levels, which differ in their seed."""

    name: str
    levels: Levels
    config: Config
    """Of the run with index 0."""
    cost: Cost
    """Of each pretraining run."""
    tasks: dict[str, tuple[FinetuneOptions, ...]]
    """Options of the tasks that each run is fine-tuned on, by learning rate."""
    pretrained: str
    """Name of the first cell with the same pretraining runs; usually this one."""
    metrics: tuple[str, ...]
    """Metrics with a margin that its runs have."""
    seeds: tuple[str, ...]
    """What tells its runs apart: those of two cells with the same ones are paired."""
    models: tuple[str, ...] = ()
    """Of a study of models: one, or one for each seed."""

    def run_config(self, index: int) -> Config:
        """The config of the run with an index."""
        return dataclasses.replace(self.config, seed=self.config.seed + index)


def cost_of(config: Config) -> Cost:
    """The cost of a run."""
    rows = [phase.rows_before(phase.steps) for phase in config.phases]
    return Cost(
        config.total_steps,
        positions_before(config, config.total_steps),
        sum(train_step_flops(config, i, 1) * count for i, count in enumerate(rows)),
        _parameters(model_spec(config, -1)),
    )


def positions_before(config: Config, step: int) -> int:
    """Positions of all rows of the steps before `step`, padding included."""
    total = 0
    for phase in config.phases:
        steps = min(step, phase.steps)
        total, step = total + phase.rows_before(steps) * phase.seq_len, step - steps
    return total


@functools.cache  # tracing takes a tenth of a second
def _parameters(spec: ModelSpec) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(spec.shapes()))


def make_cells(study: Study, vocab_size: int) -> list[Cell]:
    """All cells of a study, the baseline first, with equal budgets.

    Args:
      study: the study.
      vocab_size: of the corpora.

    Raises:
      UserError: a cell's config is not valid, its number of steps is not fixed, or its budget cannot be made equal; two
        cells would have equal runs; or no comparison would have a metric with a margin.
    """
    study = dataclasses.replace(study, base=config_lib.replace(study.base, model={"vocab_size": vocab_size}))
    cells: list[Cell] = []
    for levels in study.combinations():
        name, config = study.cell_name(levels), study.config_of(levels)
        where = f"study {study.name}, {name}"
        fixed = config.target.mlm_accuracy is None and all(phase.hours is None for phase in config.phases)
        require(fixed, f"{where}: unset target.mlm_accuracy and phases.N.hours: with them, steps are not fixed")
        require(
            all(phase.seq_len <= config.model.max_positions for phase in config.phases)
            and study.rows.seq_len <= config.model.max_positions,
            f"{where}: rows.seq_len {study.rows.seq_len} is longer than the position table: lower it",
        )
        if cells:
            config = with_equal_budget(config, cells[0].cost, study, where)
        require(
            {*_metrics(study, config)}.isdisjoint(CURVE_METRICS) or _has_curve(config),
            f"{where}: a run keeps one checkpoint of masked steps, and margins has a metric of curves "
            f"({', '.join(CURVE_METRICS)}): raise checkpoint.keep, and lower checkpoint.every below the number of them",
        )
        tasks = study.finetune_options(levels)
        for one in cells:
            equal = dataclasses.replace(config, name=one.config.name, seed=one.config.seed) == one.config
            require(
                not equal or tasks != one.tasks or abs(config.seed - one.config.seed) >= study.seeds,
                f"{where} and {one.name} would have equal runs (the same config, tasks and seeds), and a comparison of "
                "runs with themselves shows nothing: change a level, or remove it",
            )
        same = [one for one in cells if dataclasses.replace(config, name=one.config.name) == one.config]
        config, pretrained = (same[0].config, same[0].name) if same else (config, name)
        seeds = tuple(str(config.seed + index) for index in range(study.seeds))
        cells.append(Cell(name, levels, config, cost_of(config), tasks, pretrained, _metrics(study, config), seeds))
    check_margins(study, cells)
    return cells


def _has_curve(config: Config) -> bool:
    """Whether a run keeps two checkpoints after its causal phases."""
    causal = [index for index in range(len(config.phases)) if config.model_of(index).direction == "causal"]
    begin = sum(phase.steps for phase in config.phases[: max(causal, default=-1) + 1])
    previous = (config.total_steps - 1) // config.checkpoint.every * config.checkpoint.every
    return config.checkpoint.keep >= 2 and previous > begin


def _metrics(study: Study, config: Config) -> tuple[str, ...]:
    """The metrics with a margin that runs of a config have."""
    objectives = active_objectives(config.model, config.objective)
    prefixes = [config.objective.pair if name == "pair" else name for name in objectives]
    return tuple(one for one in study.margins if one in study.tasks or one.partition("_")[0] in prefixes)


def check_margins(study: Study, cells: list[Cell]) -> None:
    """Check that every metric with a margin is measured, and that one of them can be compared."""
    for metric in study.margins:
        require(
            any(metric in cell.metrics for cell in cells),
            f"study {study.name}: margins.{metric}: no cell has this metric, because none trains its objective: remove "
            "it, or train the objective",
        )
    baseline, *others = cells
    require(
        any(
            metric in cell.metrics and (metric in study.tasks or cell.pretrained != baseline.pretrained)
            for cell in others
            for metric in baseline.metrics
        ),
        f"study {study.name}: margins: the baseline and the other cells have none of {', '.join(study.margins)} in "
        "common, or share the runs that it is measured on: add a margin of a metric that both have",
    )


def with_equal_budget(config: Config, baseline: Cost, study: Study, where: str) -> Config:
    """The config with steps for which it has the budget of a baseline.

    Where the number of steps changes, warmup, decay start and batch ramp keep their share of it.

    Raises:
      UserError: the budgets differ by more than the study's tolerance.
    """
    kind = "steps" if study.equal == "parameters" else study.equal
    target = getattr(baseline, kind)
    ratio = target / getattr(cost_of(config), kind)
    if ratio != 1:
        phases = tuple(_with_steps(phase, round(phase.steps * ratio)) for phase in config.phases)
        config = dataclasses.replace(config, phases=phases)
        # What rounding left is the last phase's.
        last = phases[-1]
        per_step = {
            "steps": 1,
            "tokens": last.batch_size * last.seq_len,
            "flops": train_step_flops(config, len(phases) - 1, last.batch_size),
        }[kind]
        left = round((target - getattr(cost_of(config), kind)) / per_step)
        config = dataclasses.replace(config, phases=(*phases[:-1], _with_steps(last, last.steps + left)))
    cost = cost_of(config)
    for name in {kind, study.equal}:
        value, wanted = getattr(cost, name), getattr(baseline, name)
        if abs(value / wanted - 1) > study.tolerance:
            remedy = "change the level's model" if name == "parameters" else "use more steps"
            raise UserError(
                f"{where}: {value:,.0f} {name} cannot be compared with the baseline's {wanted:,.0f}, more than "
                f"{study.tolerance:.2%} apart: {remedy}, or raise tolerance"
            )
    return config


def _with_steps(phase: Phase, steps: int) -> Phase:
    steps = max(1, steps)
    shares = {
        name: round(getattr(phase, name) * steps / phase.steps)
        for name in ("warmup_steps", "decay_start", "ramp_steps")
    }
    if phase.start_batch_size is not None:
        shares["ramp_steps"] = max(1, shares["ramp_steps"])
    shares["decay_start"] = min(shares["decay_start"], steps - 1)
    return dataclasses.replace(phase, steps=steps, **shares)
