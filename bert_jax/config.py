"""What a run is: frozen, validated dataclasses. One default for every field, documented in its unit.

A file in ``configs/`` holds a function ``config()`` that returns a `Config`; the command line overrides
single fields (``--model.num-layers 6``, ``--phases.0.steps 100``). No jax is needed here.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from bert_jax.errors import UserError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class ModelConfig:
    """The encoder and its heads. The defaults are BERT-base, uncased (Devlin et al. 2019, section 3)."""

    vocab_size: int = 30522
    """Number of token ids, special tokens included."""
    hidden_size: int = 768
    """Width of the residual stream (H)."""
    num_layers: int = 12
    """Depth (L)."""
    num_heads: int = 12
    """Attention heads per layer (A)."""
    head_size: int | None = None
    """Width of one head; None is hidden_size / num_heads."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer."""
    max_positions: int = 512
    """Longest sequence that the position table serves, in tokens."""
    type_vocab_size: int = 2
    """Number of token types (sentence A and B)."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Of the feed-forward layer and the MLM head. `gelu` is the exact, erf form, as published BERTs use."""
    norm_epsilon: float = 1e-12
    """Added to the variance in every LayerNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the truncated normal (at two deviations) that draws all weights."""
    hidden_dropout: float = 0.1
    """Dropout rate on embeddings and on the output of each sub-layer."""
    attention_dropout: float = 0.1
    """Dropout rate on attention probabilities; only the `reference` attention has it."""
    positions: Literal["learned", "rotary"] = "learned"
    """Learned absolute positions (BERT), or rotary ones inside attention (Su et al. 2021)."""
    rotary_base: float = 10000.0
    """Base of the rotary wavelengths in layers that see the whole sequence."""
    local_rotary_base: float = 10000.0
    """Base of the rotary wavelengths in layers with a local window."""
    norm_placement: Literal["post", "pre"] = "post"
    """LayerNorm after the residual sum (BERT), or before each sub-layer and once at the end."""
    attention_window: int | None = None
    """Local layers see this many tokens to each side; None lets every layer see everything."""
    global_every: int = 1
    """With attention_window set, every n-th layer, the first included, still sees everything."""
    parameter_groups: int | None = None
    """Number of parameter sets shared by consecutive layers (ALBERT: 1); None gives each layer its own."""
    attention: Literal["reference", "xla", "cudnn"] = "reference"
    """Implementation: ours in plain jnp, or `jax.nn.dot_product_attention` lowered by XLA or cuDNN."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products. Parameters, norms, softmax and losses stay in float32."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or whole layers."""
    scan_unroll: int = 1
    """Layers per iteration of the scan over depth; num_layers unrolls it."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions")
        for name in (*sizes, "type_vocab_size"):
            _require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}: it must be at least 1")
        _require(
            self.head_size is not None or self.hidden_size % self.num_heads == 0,
            f"model.hidden_size {self.hidden_size} is not divisible by model.num_heads {self.num_heads}: "
            "change one of them, or set model.head_size",
        )
        _require(self.head_size is None or self.head_size >= 1, f"model.head_size is {self.head_size}: use 1 or more")
        _require(
            self.positions == "learned" or self.size_per_head % 2 == 0,
            f"model.positions 'rotary' needs even heads, not {self.size_per_head} wide: set model.head_size",
        )
        for name in ("hidden_dropout", "attention_dropout"):
            _require(0 <= getattr(self, name) < 1, f"model.{name} is {getattr(self, name)}: it must be in [0, 1)")
        _require(
            self.attention == "reference" or self.attention_dropout == 0,
            f"model.attention '{self.attention}' has no dropout on attention probabilities: "
            "set model.attention_dropout 0, or model.attention reference",
        )
        groups = self.parameter_groups
        _require(
            groups is None or (groups >= 1 and self.num_layers % groups == 0),
            f"model.parameter_groups {groups} does not divide model.num_layers {self.num_layers}",
        )
        _require(self.global_every >= 1, f"model.global_every is {self.global_every}: it must be at least 1")
        _require(self.scan_unroll >= 1, f"model.scan_unroll is {self.scan_unroll}: it must be at least 1")

    @property
    def size_per_head(self) -> int:
        """Width of one attention head."""
        return self.head_size or self.hidden_size // self.num_heads


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model learns (Devlin et al. 2019, section 3.1)."""

    mask_rate: float = 0.15
    """Share of an example's tokens to predict: max(1, round(rate * length)), special tokens counted in length."""
    mask_token_share: float = 0.8
    """Of the predicted positions, the share that shows [MASK]."""
    random_token_share: float = 0.1
    """Of the predicted positions, the share that shows a random ordinary token; the rest stay as they are."""
    pair: Literal["nsp", "none"] = "nsp"
    """Pair objective on [CLS]: next-sentence prediction (label 0: B follows A; 1: random B), or none."""

    def __post_init__(self) -> None:
        _require(0 < self.mask_rate < 1, f"objective.mask_rate is {self.mask_rate}: it must be between 0 and 1")
        shares = self.mask_token_share, self.random_token_share
        _require(
            min(shares) >= 0 and sum(shares) <= 1,
            f"objective.mask_token_share {shares[0]} and random_token_share {shares[1]} must not exceed 1 together",
        )


@dataclass(frozen=True)
class DataConfig:
    """How rows are made from the corpus and how often they repeat."""

    short_example_rate: float = 0.1
    """Share of chunks whose target length is drawn uniformly from [2, seq_len - 3], as BERT does."""
    example_copies: int | None = None
    """Sets of examples: epoch e uses set e mod K. None makes new examples every epoch."""
    mask_copies: int | None = None
    """Sets of masks: epoch e uses set e mod K (static masking). None draws new masks every epoch (dynamic)."""
    prefetch: int = 4
    """Batches prepared ahead of the device."""

    def __post_init__(self) -> None:
        for name in ("example_copies", "mask_copies"):
            copies = getattr(self, name)
            _require(copies is None or copies >= 1, f"data.{name} is {copies}: it must be at least 1, or None")
        _require(
            0 <= self.short_example_rate <= 1,
            f"data.short_example_rate is {self.short_example_rate}: it must be in [0, 1]",
        )
        _require(self.prefetch >= 1, f"data.prefetch is {self.prefetch}: it must be at least 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or LAMB; biases and LayerNorms are never decayed (training/optimizer.py holds the table)."""

    name: Literal["adamw", "lamb"] = "adamw"
    """AdamW (Loshchilov and Hutter 2019) or LAMB (You et al. 2020)."""
    lamb_flavour: Literal["paper", "google", "nvidia"] = "nvidia"
    """Whose LAMB: they differ in bias correction and in what excluded tensors get (training/lamb.py)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient; None never clips."""

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name} is {getattr(self, name)}: it must be in [0, 1)")
        _require(self.epsilon > 0, f"optimizer.epsilon is {self.epsilon}: it must be positive")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay is {self.weight_decay}: it must not be negative")
        _require(
            self.clip_norm is None or self.clip_norm > 0,
            f"optimizer.clip_norm is {self.clip_norm}: it must be positive, or None to clip never",
        )


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one sequence length, batch and schedule. Its schedule starts at its own step 0."""

    steps: int = 100_000
    """Updates in this phase."""
    seq_len: int = 128
    """Tokens per row."""
    batch_size: int = 256
    """Rows per update, over all devices and micro-batches."""
    accumulation: int = 1
    """Micro-batches per update; each device splits its own rows."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    warmup_steps: int = 10_000
    """Updates over which the learning rate rises linearly from 0 to its peak."""
    end_learning_rate: float = 0.0
    """Learning rate after the last update of the phase."""
    decay_power: float = 1.0
    """Power of the polynomial decay; 1 is linear."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation"):
            _require(getattr(self, name) >= 1, f"phases: {name} is {getattr(self, name)}: it must be at least 1")
        for name in ("learning_rate", "warmup_steps", "end_learning_rate", "decay_power"):
            _require(getattr(self, name) >= 0, f"phases: {name} is {getattr(self, name)}: it must not be negative")
        _require(self.seq_len >= 8, f"phases: seq_len is {self.seq_len}: the shortest useful row has 8 tokens")
        _require(
            self.batch_size % self.accumulation == 0,
            f"phases: batch_size {self.batch_size} is not divisible by accumulation {self.accumulation}",
        )


@dataclass(frozen=True)
class MeshConfig:
    """How many devices each mesh axis spans; -1 takes all that are left."""

    data: int = -1
    """Batch rows are split over it; parameters are copied."""
    fsdp: int = 1
    """Batch rows are split over it, and so are parameters and moments."""
    tensor: int = 1
    """Attention heads, feed-forward units and the vocabulary are split over it."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved; it is always saved at its end and on SIGTERM."""

    every: int = 1000
    """Updates between checkpoints."""
    keep: int = 3
    """Checkpoints that stay on disk."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, f"checkpoint.every is {self.every}: it must be at least 1")
        _require(self.keep >= 1, f"checkpoint.keep is {self.keep}: it must be at least 1")


@dataclass(frozen=True)
class LogConfig:
    """What is written while training."""

    every: int = 100
    """Updates between lines in metrics.jsonl."""
    tensorboard: bool = True
    """Also write TensorBoard events."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, f"log.every is {self.every}: it must be at least 1")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation; its masks are fixed and always cover 15 % of the tokens."""

    every: int = 1000
    """Updates between evaluations during training; one always runs at the end. 0: only at the end."""
    rows: int = 512
    """Rows of the validation split that are scored; all of them if there are fewer."""
    batch_size: int = 32
    """Rows per evaluation batch."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, f"evaluation.every is {self.every}: it must be at least 1, or 0 for only at the end")
        for name in ("rows", "batch_size"):
            _require(getattr(self, name) >= 1, f"evaluation.{name} is {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True)
class Config:
    """A whole run. Together with the corpora it decides every update."""

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
    seed: int = 0
    """Of initialisation, examples, order, masks and dropout."""

    def __post_init__(self) -> None:
        _require(len(self.phases) >= 1, "phases: a run needs at least one")
        _require(0 <= self.seed < 2**31, f"seed is {self.seed}: it must be in [0, 2^31)")
        for i, phase in enumerate(self.phases):
            _require(
                phase.seq_len <= self.model.max_positions,
                f"phases.{i}.seq_len {phase.seq_len} is longer than the position table: "
                f"lower it, or set model.max_positions to at least {phase.seq_len}",
            )

    @property
    def total_steps(self) -> int:
        """Updates in all phases."""
        return sum(phase.steps for phase in self.phases)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain dict (tuples become lists), as written to ``config.json``."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(values: dict[str, Any]) -> Config:
    """Inverse of `to_dict`.

    Raises:
      UserError: an unknown or missing key, named with its path.
    """
    return _build(Config, values, "")


def decisive(config: Config) -> dict[str, Any]:
    """The settings that decide the updates: all but mesh, logging, prefetch, save intervals and how to compute."""
    values = to_dict(config)
    for section in ("mesh", "checkpoint", "log", "evaluation"):
        del values[section]
    del values["data"]["prefetch"]
    for name in ("attention", "remat", "scan_unroll"):
        del values["model"][name]
    for phase in values["phases"]:
        del phase["accumulation"]
    return values


def fingerprint(config: Config) -> str:
    """Hex SHA-256 of the decisive settings: two runs that share it, and the corpora, are the same run."""
    return hashlib.sha256(json.dumps(decisive(config), sort_keys=True).encode()).hexdigest()


def replace(config: Config, **changes: Any) -> Config:
    """`dataclasses.replace` that takes dicts for sections: ``replace(config, model={"num_layers": 2})``."""
    merged: dict[str, Any] = {}
    for name, value in changes.items():
        merged[name] = dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
    return dataclasses.replace(config, **merged)


def _build(cls: type, values: dict[str, Any], path: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        _require(key in fields, f"config: unknown field '{path}{key}'")
    arguments = {}
    for name, value in values.items():
        kind = fields[name].type
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            arguments[name] = _build(kind, value, f"{path}{name}.")
        elif name == "phases":
            arguments[name] = tuple(_build(Phase, phase, f"{path}phases.{i}.") for i, phase in enumerate(value))
        else:
            arguments[name] = value
    missing = [n for n, f in fields.items() if n not in values and f.default is f.default_factory]
    _require(not missing, f"config: missing field '{path}{missing[0] if missing else ''}'")
    return cls(**arguments)
