"""How a run is trained: sections for optimizer, phases, records, rescue. One default for every field, in its unit."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bert_jax.config.field_validation import (
    Count,
    CountOrZero,
    Interval,
    Layers,
    NonNegative,
    Positive,
    Rate,
    Rows,
    check,
)
from bert_jax.errors import require

MIN_SEQ_LEN = 8
"""Tokens of the shortest row that is trained on or scored."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or LAMB; biases and LayerNorms are never decayed (training/optimizer.py holds the table)."""

    name: Literal["adamw", "lamb"] = "adamw"
    """AdamW (Loshchilov and Hutter 2019) or LAMB (You et al. 2020)."""
    lamb_flavour: Literal["paper", "google", "nvidia"] = "nvidia"
    """Whose LAMB: they differ in bias correction and in what excluded tensors get (training/lamb.py)."""
    beta1: Rate = 0.9
    """Decay of the first moment."""
    beta2: Rate = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    clip_norm: Positive | None = 1.0
    """Largest global norm of the gradient; None never clips."""
    bias_correction: bool | None = None
    """Divide the moments by 1 - beta^t. None: AdamW does, and LAMB as its flavour says."""
    min_trust_ratio: NonNegative = 0.0
    """Smallest trust ratio of LAMB."""
    max_trust_ratio: Positive | None = None
    """Largest trust ratio of LAMB; None sets no bound."""
    learning_rate_scales: tuple[tuple[str, NonNegative], ...] = ()
    """Parameters whose learning rate is scaled: (pattern, factor). A pattern is a regular expression for the end of
    a parameter's path, e.g. 'encoder/layers/.*' or 'word'; the first that matches counts."""

    def __post_init__(self) -> None:
        check(self, "optimizer.")
        low, high = self.min_trust_ratio, self.max_trust_ratio
        require(
            high is None or low <= high,
            f"optimizer.min_trust_ratio {low} and max_trust_ratio {high} leave no ratio: use min <= max",
        )


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one sequence length, batch and schedule. Its schedule starts at its own step 0."""

    steps: Count = 100_000
    """Updates in this phase."""
    seq_len: Annotated[int, Interval(f"[{MIN_SEQ_LEN}, 1e6]")] = 128
    """Tokens per row."""
    batch_size: Rows = 256
    """Rows per update, over all devices and micro-batches."""
    start_batch_size: Rows | None = None
    """Rows of the phase's first updates; batch_size is reached in equal steps of this size. None: no ramp."""
    ramp_steps: CountOrZero = 0
    """Updates after which the ramp has reached batch_size."""
    accumulation: Rows | None = None
    """Micro-batches per update; each device splits its own rows. None: the fewest that fit into the memory of the
    devices, found before the first update and written to ledger.jsonl; on a CPU, the fewest that there can be."""
    learning_rate: NonNegative = 1e-4
    """Peak learning rate."""
    warmup_steps: CountOrZero = 10_000
    """Updates over which the learning rate rises linearly from 0 to its peak."""
    warmup_done: CountOrZero = 0
    """Updates of the warmup that lie before the phase: its rate begins above 0, at the share that they are of these
    and warmup_steps together (MLPerf's start_warmup_step)."""
    decay: Literal["polynomial", "cosine", "sqrt", "constant"] = "polynomial"
    """How the learning rate falls from its peak to its end: by (1 - t)^decay_power, by half a cosine, by
    1 - sqrt(t) (Warner et al. 2024), or not at all."""
    decay_start: CountOrZero = 0
    """Update from which it falls, t being the share of the way from there to the phase's end. 0 is Google's BERT,
    whose warmup covers the beginning of the decay; warmup_steps is fairseq's; a late one is warmup-stable-decay."""
    decay_power: NonNegative = 1.0
    """Power of the polynomial decay; 1 is linear."""
    end_learning_rate: NonNegative = 0.0
    """Learning rate after the last update of the phase."""
    hours: Positive | None = None
    """The phase ends after so many hours of training, whatever the speed, or after `steps` updates if they come
    first. The schedule, which `steps` describes, is stretched over the updates that the time allows for. Only the
    last phase may have it."""
    max_predictions: Count | None = None
    """At most so many tokens of an example are predicted, whatever objective.mask_rate says; None sets no bound."""
    num_layers: Layers | None = None
    """Depth in this phase; None is model.num_layers. Where a deeper phase begins, the stack is repeated
    (progressive stacking, Gong et al. 2019)."""
    frozen: tuple[str, ...] = ()
    """Parameters that stay as they are: patterns like those of optimizer.learning_rate_scales."""
    moments: Literal["keep", "reset"] = "keep"
    """What happens to the optimizer's moments where the phase begins. Kept ones of a repeated stack are repeated."""
    step_count: Literal["keep", "reset"] = "keep"
    """What happens to the optimizer's count of updates, which bias correction reads (NVIDIA's second phase: reset)."""

    def __post_init__(self) -> None:
        check(self, "phases: ")
        require(
            self.decay_start < self.steps,
            f"phases: decay_start {self.decay_start} is after the phase's {self.steps} steps: lower it",
        )
        require(
            not (self.moments == "reset" and self.step_count == "keep"),
            "phases: moments 'reset' with step_count 'keep' would take fresh moments for old ones: reset both",
        )
        start = self.start_batch_size
        require(
            (start is None) == (self.ramp_steps == 0),
            "phases: a batch ramp needs both start_batch_size and ramp_steps",
        )
        require(
            start is None or self.batch_size % start == 0,
            f"phases: start_batch_size {start} does not divide batch_size {self.batch_size}",
        )
        require(
            self.batch_size % (self.accumulation or 1) == 0,
            f"phases: batch_size {self.batch_size} is not divisible by accumulation {self.accumulation}",
        )
        micro = self.batch_size // (self.accumulation or self.fewest_micro_batches)
        require(
            start is None or start % micro == 0,
            f"phases: start_batch_size {start} is no multiple of a micro-batch of {micro} rows "
            "(batch_size / accumulation): raise accumulation",
        )

    @property
    def fewest_micro_batches(self) -> int:
        """Micro-batches per update if each is as large as it can be: all rows of the phase's first update."""
        return self.batch_size // self.batch_size_at(0)

    def batch_size_at(self, step: int) -> int:
        """Rows of update `step`, counted from the phase's start."""
        if self.start_batch_size is None or step >= self.ramp_steps:
            return self.batch_size
        sizes = self.batch_size // self.start_batch_size
        return self.start_batch_size * (1 + step * sizes // self.ramp_steps)

    def rows_before(self, step: int) -> int:
        """Rows of the updates before `step`, counted from the phase's start."""
        if self.start_batch_size is None:
            return step * self.batch_size
        sizes = self.batch_size // self.start_batch_size
        # Every size but the first is reached at a ramp's update of its own, and adds start_batch_size rows from there.
        reached = [-(-i * self.ramp_steps // sizes) for i in range(sizes)]
        return self.start_batch_size * sum(max(0, step - update) for update in reached)


Axis = Annotated[int, Interval("[-1, 1e6]")]


@dataclass(frozen=True)
class MeshConfig:
    """How many devices each mesh axis spans; -1 takes all that are left."""

    data: Axis = -1
    """Batch rows are split over it; parameters are copied."""
    fsdp: Axis = 1
    """Batch rows are split over it, and so are parameters and moments."""
    tensor: Axis = 1
    """Attention heads, feed-forward units and the vocabulary are split over it."""

    def __post_init__(self) -> None:
        check(self, "mesh.")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved; it is always saved at its end, on SIGTERM and on Ctrl-C."""

    every: Count = 1000
    """Updates between checkpoints."""
    keep: Count = 3
    """Checkpoints that stay on disk."""

    def __post_init__(self) -> None:
        check(self, "checkpoint.")


@dataclass(frozen=True)
class LogConfig:
    """What is written while training."""

    every: Count = 100
    """Updates between lines in metrics.jsonl."""
    layers: bool = True
    """Norms of gradients and updates, and LAMB's trust ratios, also for each layer."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
    wandb: str | None = None
    """Also write to this project of Weights & Biases (needs the package wandb); None does not."""

    def __post_init__(self) -> None:
        check(self, "log.")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation; its masks are fixed, single tokens, and always 15 % of them. A causal model has none."""

    every: CountOrZero = 1000
    """Updates between evaluations during training; one always runs at the end. 0: only at the end."""
    rows: Count = 512
    """Rows of each validation split that are scored; all of them if there are fewer."""
    batch_size: Rows = 32
    """Rows per evaluation batch; a few more where devices would not get equally many. It changes no figure."""

    def __post_init__(self) -> None:
        check(self, "evaluation.")


@dataclass(frozen=True)
class RescueConfig:
    """What happens when training goes wrong. An update whose loss or gradient is not finite is always skipped."""

    max_skipped: Count = 5
    """So many skipped updates in a row are trouble."""
    spike: Positive | None = 3.0
    """A loss that lies so much, in nats, above the lowest running average of its phase is trouble; None: never."""
    calm_steps: Count = 50
    """Updates without trouble after which a checkpoint counts as good; also the span of the running average, and how
    far before the first bad update the rows are that are passed over when the run goes back."""
    max_rollbacks: CountOrZero = 3
    """How often a run goes back to its last good checkpoint before it stops with the reason."""

    def __post_init__(self) -> None:
        check(self, "rescue.")


@dataclass(frozen=True)
class TargetConfig:
    """Train until a figure is reached, as MLPerf does."""

    mlm_accuracy: Annotated[float, Interval("(0, 1]")] | None = None
    """Stop as soon as the held-out MLM accuracy reaches this; None trains to the end of the phases."""
    every: Count | None = None
    """Rows between evaluations. None: floor(0.05 * (230.23 * batch_size + 3,000,000) / 25,000) * 25,000, MLPerf's."""

    def __post_init__(self) -> None:
        check(self, "target.")

    def rows_between(self, batch_size: int) -> int:
        """Rows between evaluations (mlcommons/training, retired_benchmarks/bert/README.md)."""
        if self.every is not None:
            return self.every
        return max(1, int(0.05 * (230.23 * batch_size + 3_000_000) / 25_000)) * 25_000


@dataclass(frozen=True)
class StartConfig:
    """What the parameters are at the start."""

    source: str | None = None
    """Work directory of a run, or exported model, to start from. Its layers are repeated or left out if the depth
    is another. None: parameters are drawn."""
    embeddings: Literal["keep", "new"] = "keep"
    """Take the source's word embeddings, or draw new ones, for another vocabulary."""
    moments: Literal["keep", "new"] = "new"
    """Begin with the optimizer's moments and its count of updates as the source has them, or with new ones."""

    def __post_init__(self) -> None:
        check(self, "start.")
        require(
            self.source is not None or self.embeddings == "keep",
            "start.embeddings 'new' needs start.source: fresh parameters have new ones anyway",
        )
        require(
            self.source is not None or self.moments == "new",
            "start.moments 'keep' needs start.source: fresh parameters have no moments",
        )
        require(
            self.embeddings == "keep" or self.moments == "new",
            "start.moments 'keep' does not go with start.embeddings 'new': it would take fresh moments for old ones",
        )
