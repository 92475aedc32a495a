"""Config sections for training: optimizer, phases, mesh, start."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from bert_jax.errors import require
from bert_jax.field_validation import (
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

MIN_SEQ_LEN = 8
"""Shortest row for training and evaluation, in tokens."""


SCHEDULE_FIELDS = (
    "steps",
    "learning_rate",
    "warmup_steps",
    "warmup_done",
    "decay",
    "decay_start",
    "decay_power",
    "end_learning_rate",
    "hours",
)
"""Fields of a phase that determine only its length and its learning rates."""
MODEL_FIELDS = ("num_layers", "rotary_base", "local_rotary_base", "direction")
"""Fields of a phase that replace those of the model, unless they are None."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; biases and LayerNorms have no weight decay (table: training/optimizers/param_rules.py)."""

    name: Literal["adamw", "lamb", "muon", "stable_adamw"] = "adamw"
    """AdamW (Loshchilov and Hutter 2019), LAMB (You et al. 2020), StableAdamW (Wortsman et al. 2023), or Muon for the
    matrices of the layers with AdamW for all other parameters (Jordan et al. 2024)."""
    lamb_flavour: Literal["paper", "google", "nvidia"] = "nvidia"
    """Which published LAMB: they differ in bias correction and in the trust ratio of tensors without weight decay
    (training/optimizers/lamb.py)."""
    beta1: Rate = 0.9
    """Decay of the first moment."""
    beta2: Rate = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-6
    """Added to the square root of the second moment."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    clip_norm: Positive | None = 1.0
    """Clip the gradient to this global norm; None: no clipping."""
    bias_correction: bool | None = None
    """Divide the moments by 1 - beta^t. None: LAMB does if its flavour does, all others do."""
    muon_momentum: Rate = 0.95
    """Decay of Muon's momentum. Its updates have about the size of AdamW's, so learning rates for AdamW suit it."""
    min_trust_ratio: NonNegative = 0.0
    """Smallest trust ratio of LAMB."""
    max_trust_ratio: Positive | None = None
    """Largest trust ratio of LAMB; None: no bound."""
    ema_decay: Annotated[float, Interval("(0, 1)")] | None = None
    """Decay per step of an exponential moving average of the parameters, which is evaluated and exported instead of
    them; at first it is smaller, (1 + step) / (10 + step). None: no average."""
    learning_rate_scales: tuple[tuple[str, NonNegative], ...] = ()
    """Parameters whose learning rate is scaled: (pattern, factor). A pattern is a regular expression for the end of
    a parameter's path, e.g. 'encoder/layers/.*' or 'word'; the first match applies."""
    layer_decay: Annotated[float, Interval("(0, 1]")] = 1.0
    """Layer-wise learning rates: that of layer l of L, counted from 1, is multiplied by layer_decay^(L + 1 - l), that
    of the embeddings by layer_decay^(L + 1); heads and pooler have the full rate (Clark et al. 2020, appendix B). The
    published code of ELECTRA multiplies all but the head's by layer_decay once more, a known error
    (google-research/electra, issue 51)."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over devices; `bfloat16` sends half of the bytes. Parameters, moments and sums
    over micro-batches are float32 in both."""

    def __post_init__(self) -> None:
        check(self, "optimizer.")
        low, high = self.min_trust_ratio, self.max_trust_ratio
        require(
            high is None or low <= high,
            f"optimizer.min_trust_ratio {low} and max_trust_ratio {high} allow no ratio: use min <= max",
        )


@dataclass(frozen=True)
class Phase:
    """A part of training with one sequence length, batch size and schedule, which counts from the phase's step 0."""

    steps: Count = 100_000
    """Steps in this phase. One step is one optimizer update."""
    seq_len: Annotated[int, Interval(f"[{MIN_SEQ_LEN}, 1e6]")] = 128
    """Tokens per row."""
    batch_size: Rows = 256
    """Rows per step, over all devices and micro-batches."""
    start_batch_size: Rows | None = None
    """Rows of the phase's first steps; the batch grows to batch_size in increments of this size. None: no ramp."""
    ramp_steps: CountOrZero = 0
    """Steps after which the batch has reached batch_size."""
    accumulation: Rows | None = None
    """Micro-batches per step (gradient accumulation); each device splits its own rows. None: the fewest that fit into
    device memory, found before the first step and written to ledger.jsonl; on a CPU, the smallest possible number."""
    learning_rate: NonNegative = 1e-4
    """Peak learning rate."""
    warmup_steps: CountOrZero = 10_000
    """Steps over which the learning rate rises linearly from 0 to its peak."""
    warmup_done: CountOrZero = 0
    """Warmup steps that count as done before the phase begins: the first learning rate is
    warmup_done / (warmup_done + warmup_steps) of the peak (MLPerf's start_warmup_step)."""
    decay: Literal["polynomial", "cosine", "sqrt", "constant"] = "polynomial"
    """How the learning rate decays from its peak to its end value: by (1 - t)^decay_power, by half a cosine, by
    1 - sqrt(t) (Warner et al. 2024), or not at all."""
    decay_start: CountOrZero = 0
    """Step at which the decay begins; t is 0 there and 1 at the end of the phase. 0 as in Google's BERT, where warmup
    replaces the beginning of the decay; warmup_steps as in fairseq; a late step gives warmup-stable-decay."""
    decay_power: NonNegative = 1.0
    """Power of the polynomial decay; 1 is linear."""
    end_learning_rate: NonNegative = 0.0
    """Learning rate after the last step of the phase."""
    hours: Positive | None = None
    """Time limit of the phase, in hours of training. The phase ends at this limit or after `steps` steps, whichever
    comes first. Its schedule, given for `steps` steps, is stretched over the steps that fit into the time. Only the
    last phase may have a limit."""
    max_predictions: Count | None = None
    """Largest number of predicted tokens per example, whatever the mask rate is; None: no bound."""
    mask_rate: Annotated[float, Interval("(0, 1)")] | None = None
    """Mask rate in this phase; None: objective.mask_rate. mmBERT lowers it in steps, 30, 15 and 5 % (Marone et
    al. 2025)."""
    end_mask_rate: Annotated[float, Interval("(0, 1)")] | None = None
    """Mask rate after the last step of the phase, which the rate reaches linearly; None: it is constant. GPT-BERT goes
    from 30 to 15 % (Charpentier and Samuel 2024)."""
    corpus_weights: tuple[tuple[str, NonNegative], ...] = ()
    """Weights of all corpora in this phase, by name: rows per row of a corpus with weight 1; 0: none. Empty: those of
    the flags --corpus."""
    num_layers: Layers | None = None
    """Depth in this phase; None: model.num_layers. Where a deeper phase begins, the layer stack is repeated
    (progressive stacking, Gong et al. 2019)."""
    rotary_base: Positive | None = None
    """Base of the rotary wavelengths of global layers in this phase; None: model.rotary_base. ModernBERT raises it from
    10,000 to 160,000 where rows grow from 1,024 to 8,192 tokens (Warner et al. 2024)."""
    local_rotary_base: Positive | None = None
    """The same of local layers; None: model.local_rotary_base."""
    direction: Literal["bidirectional", "causal"] | None = None
    """Direction of attention in this phase, and with it the objective: the next token, or masked ones; None:
    model.direction. Causal phases before bidirectional ones: Gisserot-Boukhlef et al. 2025."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: patterns as in optimizer.learning_rate_scales."""
    moments: Literal["keep", "reset"] = "keep"
    """Keep or reset the optimizer's moments when the phase begins. Kept moments of a repeated stack are repeated."""
    step_count: Literal["keep", "reset"] = "keep"
    """Keep or reset the optimizer's step count, which bias correction uses (NVIDIA's second phase: reset)."""

    def __post_init__(self) -> None:
        check(self, "phases: ")
        require(
            self.decay_start < self.steps,
            f"phases: decay_start {self.decay_start} is after the phase's {self.steps} steps: lower it",
        )
        require(
            not (self.moments == "reset" and self.step_count == "keep"),
            "phases: moments 'reset' with step_count 'keep' would not correct the bias of zero moments: reset both",
        )
        require(
            self.end_mask_rate is None or self.hours is None,
            "phases: end_mask_rate with hours: a time limit decides the number of steps, over which the mask rate "
            "would change: leave one of them out",
        )
        names = [name for name, _ in self.corpus_weights]
        require(len(set(names)) == len(names), f"phases: corpus_weights names a corpus twice: {', '.join(names)}")
        require(
            not names or any(weight for _, weight in self.corpus_weights),
            f"phases: corpus_weights gives all corpora the weight 0 ({', '.join(names)}): give one a positive weight",
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
            f"phases: start_batch_size {start} is not a multiple of a micro-batch of {micro} rows "
            "(batch_size / accumulation): raise accumulation",
        )

    def without_schedule(self) -> "Phase":
        """The phase with the defaults of SCHEDULE_FIELDS and corpus_weights: phases that are equal then have the same
        programs."""
        return dataclasses.replace(
            self, **{name: getattr(Phase, name) for name in (*SCHEDULE_FIELDS, "corpus_weights")}
        )

    @property
    def fewest_micro_batches(self) -> int:
        """Micro-batches per step if each is as large as possible: all rows of the phase's first step."""
        return self.batch_size // self.batch_size_at(0)

    def valid_accumulations(self, shards: int) -> list[int]:
        """All numbers of micro-batches that give every row shard the same number of whole rows, in ascending order."""
        smallest, largest = self.batch_size_at(0), self.batch_size
        counts = (n for n in range(1, largest // shards + 1) if largest % n == 0)
        return [n for n in counts if (largest // n) % shards == 0 and smallest % (largest // n) == 0]

    def batch_size_at(self, step: int) -> int:
        """Rows of step `step`, counted from 0 at the phase's start."""
        if self.start_batch_size is None or step >= self.ramp_steps:
            return self.batch_size
        sizes = self.batch_size // self.start_batch_size
        return self.start_batch_size * (1 + step * sizes // self.ramp_steps)

    def rows_before(self, step: int) -> int:
        """Total rows of the phase's steps before `step`."""
        if self.start_batch_size is None:
            return step * self.batch_size
        sizes = self.batch_size // self.start_batch_size
        # Each further size begins at a step of its own and adds start_batch_size rows to every step from there.
        first_steps = [-(-i * self.ramp_steps // sizes) for i in range(sizes)]
        return self.start_batch_size * sum(max(0, step - first) for first in first_steps)


Axis = Annotated[int, Interval("[-1, 1e6]")]


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1: all remaining devices."""

    data: Axis = -1
    """Splits batch rows; parameters are replicated."""
    fsdp: Axis = 1
    """Splits batch rows, parameters and moments."""
    tensor: Axis = 1
    """Splits attention heads, feed-forward units and the vocabulary."""

    def __post_init__(self) -> None:
        check(self, "mesh.")


@dataclass(frozen=True)
class StartConfig:
    """Initial parameters of the run."""

    source: Annotated[str | None, tyro.conf.arg(aliases=("--init-from",))] = None
    """Work directory of a run, or any model that `bert-jax convert` reads, to initialise parameters from. If its depth
    differs, layers are repeated or dropped. RUN@STEP or RUN@best: a fork, which continues a run from this checkpoint
    with its whole state and its position in the stream (docs/large_batch.md). None: random initialisation."""
    embeddings: Literal["keep", "transfer", "new"] = "keep"
    """Keep the source's word embeddings; or `transfer` them to another vocabulary of the same kind: tokens that the
    source has keep their embedding and decoder bias, others get the mean of those of their pieces in the source (Gee et
    al. 2022); or initialise `new` ones."""
    optimizer_state: Literal["keep", "new"] = "new"
    """Keep the source's optimizer state (moments and step count), or start with a new one."""
    generator: str | None = None
    """With objective.token 'rtd': a model with an MLM head that is the generator of the source, which is a
    discriminator alone, as the two models of a published ELECTRA. None: that of the source, if it is a run with a
    generator, or a new one."""

    def __post_init__(self) -> None:
        check(self, "start.")
        for name, value, default in (
            ("generator", self.generator, None),
            ("embeddings", self.embeddings, "keep"),
            ("optimizer_state", self.optimizer_state, "new"),
        ):
            require(self.source is not None or value == default, f"start.{name} '{value}': set start.source")
        require(
            self.generator is None or self.optimizer_state == "new",
            "start.optimizer_state 'keep' does not go with start.generator, another model: set it to new",
        )
        require(
            self.embeddings == "keep" or self.optimizer_state == "new",
            f"start.optimizer_state 'keep' does not go with start.embeddings '{self.embeddings}': new embeddings have "
            "no moments",
        )
