"""The config of a run: all sections, their JSON form, and the run's fingerprint.

A file in ``configs/`` holds a function ``config()`` that returns a `Config`; the command line overrides
single fields (``--model.num-layers 6``, ``--phases.0.steps 100``). This module does not import jax.
"""

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from bert_jax.config.finetuning import DistilConfig, FinetuneConfig, TaskHead
from bert_jax.config.generator import generator_model
from bert_jax.config.operation import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    RecoveryConfig,
    TargetConfig,
)
from bert_jax.config.sections import (
    KERNEL_ROW_LENGTHS,
    PAIR_FORMATS,
    TPU_ATTENTION_MAX_LENGTH,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
)
from bert_jax.config.training import (
    MODEL_FIELDS,
    MeshConfig,
    OptimizerConfig,
    Phase,
    StartConfig,
)
from bert_jax.errors import require
from bert_jax.field_validation import Seed, check, from_json

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistilConfig",
    "EvaluationConfig",
    "FinetuneConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Phase",
    "RecoveryConfig",
    "StartConfig",
    "TargetConfig",
    "TaskHead",
    "fingerprint",
    "flatten",
    "from_dict",
    "identity_fields",
    "replace",
    "to_dict",
]


@dataclass(frozen=True)
class Config:
    """A whole run. Together with the corpora it determines every step."""

    name: str
    """Name of the preset."""
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    phases: tuple[Phase, ...] = (Phase(),)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    start: StartConfig = field(default_factory=StartConfig)
    finetune: Annotated[FinetuneConfig | None, tyro.conf.Suppress] = None
    """The task of a fine-tuning run; None: pretraining."""
    distil: Annotated[DistilConfig | None, tyro.conf.Suppress] = None
    """The teacher of a pretraining run; None: it has none."""
    seed: Seed = 0
    """Seed of initialisation, examples, order, masks and dropout."""

    def __post_init__(self) -> None:
        check(self, "", Config)
        require(len(self.phases) >= 1, "phases: a run needs at least one")
        for i, phase in enumerate(self.phases):
            self._check_phase(i, phase)
        for i, (before, phase) in enumerate(itertools.pairwise(self.phases), 1):
            thawed = sorted(set(before.frozen) - set(phase.frozen))
            require(
                not thawed or phase.step_count == "reset",
                f"phases.{i} trains parameters that the phase before froze ({', '.join(thawed)}), whose moments are "
                "still 0: set its moments reset and step_count reset",
            )
        require(
            all(a <= b for a, b in itertools.pairwise(self.model_of(i).num_layers for i in range(len(self.phases)))),
            "phases: num_layers shrinks from one phase to the next: the stack can only grow",
        )
        for name in MODEL_FIELDS:
            last, expected = getattr(self.phases[-1], name), getattr(self.model, name)
            require(
                last in (None, expected),
                f"phases.{len(self.phases) - 1}.{name} {last} is not model.{name} {expected}: the last phase must have "
                f"that of the model: change model.{name}, or leave it out",
            )
        masked = self.model.direction == "bidirectional" and self.objective.token == "mlm"
        require(
            self.target.mlm_accuracy is None or masked,
            "target.mlm_accuracy: only a model that predicts masked tokens has an MLM accuracy: unset it",
        )
        require(
            self.distil is None or self.objective.token == "mlm",
            "objective.token 'rtd' has no distillation: set objective.token mlm",
        )
        require(
            self.optimizer.layer_decay == 1 or self.model.parameter_groups is None,
            f"optimizer.layer_decay {self.optimizer.layer_decay} needs parameters of every layer, which "
            f"model.parameter_groups {self.model.parameter_groups} shares: set optimizer.layer_decay 1",
        )
        pair, data_format = self.objective.pair, self.data.format
        require(
            pair == "none" or data_format in PAIR_FORMATS[pair],
            f"objective.pair '{pair}' needs data.format {' or '.join(PAIR_FORMATS.get(pair, ()))}, not "
            f"'{data_format}': change one of them, or set objective.pair none",
        )
        require(
            self.model.type_vocab_size >= 2 or not self.data.paired,
            f"data.format {data_format} marks its second segment with token type 1: set model.type_vocab_size 2",
        )
        self._check_causal()

    def _check_causal(self) -> None:
        """What a model cannot learn in a causal phase."""
        for i, phase in enumerate(self.phases):
            if self.model_of(i).direction == "causal":
                name = "model.direction" if phase.direction is None else f"phases.{i}.direction"
                require(
                    self.objective.token == "mlm",
                    f"{name} 'causal' predicts the next token, not what objective.token 'rtd' replaces: set "
                    "objective.token mlm",
                )
                require(
                    self.objective.pair == "none",
                    f"{name} 'causal': [CLS] attends to no other token, so it cannot learn pairs: set objective.pair "
                    "none",
                )
                require(
                    phase.end_mask_rate is None,
                    f"phases.{i}.end_mask_rate {phase.end_mask_rate}: a causal model has no masks: leave it out",
                )

    def _check_phase(self, i: int, phase: Phase) -> None:
        for name, needs, has in (
            ("rotary_base", "model.positions 'rotary'", self.model.positions == "rotary"),
            ("local_rotary_base", "model.attention_window", self.model.attention_window is not None),
        ):
            value = getattr(phase, name)
            require(value is None or has, f"phases.{i}.{name} {value} needs {needs}: set it, or leave this out")
        require(
            # Positions of fine-tuning begin anew with every text, and the texts of a multiple choice are in one row.
            phase.seq_len <= self.model.max_positions or self.finetune is not None,
            f"phases.{i}.seq_len {phase.seq_len} is longer than the position table: "
            f"lower it, or set model.max_positions to at least {phase.seq_len}",
        )
        attention = self.model.attention
        tokens = KERNEL_ROW_LENGTHS.get(attention, 1)
        require(
            phase.seq_len % tokens == 0,
            f"phases.{i}.seq_len {phase.seq_len} is not a multiple of {tokens}, which model.attention '{attention}' "
            "needs: change it, or set model.attention reference",
        )
        require(
            attention != "pallas_tpu" or phase.seq_len <= TPU_ATTENTION_MAX_LENGTH,
            f"phases.{i}.seq_len {phase.seq_len} is longer than {TPU_ATTENTION_MAX_LENGTH}, the longest row of "
            "model.attention 'pallas_tpu': lower it, or set model.attention xla or reference",
        )
        if self.model_of(i).direction == "bidirectional":
            self._check_mask_rates(i, phase)
        require(
            phase.hours is None or i == len(self.phases) - 1,
            f"phases.{i}.hours: only the last phase may have a time limit: give the others steps",
        )
        self.model_of(i)  # raises if the other settings of the model do not allow this depth
        self.generator_of(i)

    def _check_mask_rates(self, i: int, phase: Phase) -> None:
        """The mask rates at both ends of a phase, between which all others are."""
        start = "objective.mask_rate" if phase.mask_rate is None else f"phases.{i}.mask_rate"
        ordinary = phase.seq_len - (3 if self.data.paired else 2)  # without [CLS] and [SEP]
        for name, rate in zip((start, f"phases.{i}.end_mask_rate"), self._mask_rates(i), strict=True):
            count = round(rate * phase.seq_len)
            require(
                count >= 1,
                f"{name} {rate} rounds to no token in rows of {phase.seq_len} (phases.{i}.seq_len): "
                f"use at least {1 / phase.seq_len:.2g}",
            )
            require(
                count <= ordinary or (phase.max_predictions or count) <= ordinary,
                f"{name} {rate} needs {count} predictions in rows of {phase.seq_len} (phases.{i}.seq_len), which have "
                f"{ordinary} tokens besides [CLS] and [SEP]: lower it",
            )

    def locate_step(self, step: int) -> tuple[int, int]:
        """The phase of step `step`, counted from 0 over the run, and the step's number within that phase.

        For `step` = `total_steps` the phase is the last one.
        """
        phase = 0
        while phase + 1 < len(self.phases) and step >= self.phases[phase].steps:
            step -= self.phases[phase].steps
            phase += 1
        return phase, step

    def model_of(self, phase: int) -> ModelConfig:
        """The model with the depth, the rotary bases and the direction that it has in a phase."""
        settings = self.phases[phase]
        changes = {name: value for name in MODEL_FIELDS if (value := getattr(settings, name)) is not None}
        return dataclasses.replace(self.model, **changes) if changes else self.model

    def objective_of(self, phase: int) -> ObjectiveConfig:
        """The objective with the largest mask rate that it has in a phase."""
        return dataclasses.replace(self.objective, mask_rate=max(self._mask_rates(phase)))

    def mask_rate_at(self, phase: int, step: int) -> float:
        """The mask rate of a step of a phase, counted from 0 at its start."""
        start, end = self._mask_rates(phase)
        return start + (end - start) * step / self.phases[phase].steps

    def _mask_rates(self, phase: int) -> tuple[float, float]:
        """At the start and after the last step of a phase."""
        settings = self.phases[phase]
        start = self.objective.mask_rate if settings.mask_rate is None else settings.mask_rate
        return start, start if settings.end_mask_rate is None else settings.end_mask_rate

    def generator_of(self, phase: int) -> ModelConfig | None:
        """The generator of replaced-token detection in a phase; None: the run has no generator."""
        if self.objective.token != "rtd" or self.finetune is not None:
            return None
        return generator_model(self.model_of(phase), self.objective)

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain dict (tuples become lists), as written to ``config.json``."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(values: dict[str, Any]) -> Config:
    """Inverse of `to_dict`.

    Raises:
      UserError: an unknown or missing key, or a value that it cannot have; the message has its path.
    """
    return from_json(Config, values, "config")


READER_FIELDS = ("verify", "reader_processes", "prefetch", "cache_dir", "cache_limit_gb")
"""Fields of `DataConfig` that do not change the rows."""


def identity_fields(config: Config) -> dict[str, Any]:
    """The settings that determine the steps of a run: all but mesh, checkpoint, log, evaluation, recovery, target,
    readers and implementation choices.
    """
    values = to_dict(config)
    for section in ("mesh", "checkpoint", "log", "evaluation", "recovery", "target"):
        del values[section]
    for name in READER_FIELDS:
        del values["data"][name]
    for name in ("attention", "remat", "scan_unroll"):
        del values["model"][name]
    for phase in values["phases"]:
        del phase["accumulation"]
    for name in ("finetune", "distil"):  # by content and by flag, not by path and position
        if (section := getattr(config, name)) is not None:
            del values["start"]["source"]
            named = (flag.split(" ", 1) for flag in section.flags)
            values[name]["flags"] = {flag: " ".join(value) for flag, *value in named}
    return values


def fingerprint(config: Config) -> str:
    """Hex SHA-256 of `identity_fields`: two runs with the same fingerprint and the same corpora are the same run."""
    return hashlib.sha256(json.dumps(identity_fields(config), sort_keys=True).encode()).hexdigest()


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Nested values by dotted path, as in the names of flags."""
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = ((str(i), value) for i, value in enumerate(values))
    else:
        return {path: values}
    flat = {}
    for key, value in items:
        flat |= flatten(value, f"{path}.{key}" if path else key)
    return flat


def replace(config: Config, **changes: Any) -> Config:
    """`dataclasses.replace` that accepts dicts for sections: ``replace(config, model={"num_layers": 2})``."""
    merged: dict[str, Any] = {}
    for name, value in changes.items():
        merged[name] = dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
    return dataclasses.replace(config, **merged)
