"""Config sections that decide no step: checkpoints, logs, evaluation, recovery, target."""

from dataclasses import dataclass
from typing import Annotated

from bert_jax.errors import require
from bert_jax.field_validation import Count, CountOrZero, Interval, Positive, Rows, Share, check


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved. A run always saves one at its end, on SIGTERM and on Ctrl-C."""

    every: Count = 1000
    """Steps between checkpoints."""
    every_minutes: Positive | None = None
    """Also save when this much time has passed since the last checkpoint; None: never."""
    keep: Count = 3
    """Number of newest checkpoints to keep; one between multiples of `every` (of a stop, of `every_minutes`, of an
    evaluation) is kept until the next one."""
    keep_every: Count | None = None
    """Checkpoints at multiples of this number of steps are kept for ever; it is a multiple of `every`."""
    keep_best: str | None = None
    """Held-out metric, as metrics.jsonl names it, e.g. mlm_loss: after an evaluation with its best value so far, a
    checkpoint is saved, and kept until there is a better one. Losses and perplexities are better when they are lower,
    all other metrics when they are higher. None: no such checkpoint."""
    local_directory: str | None = None
    """Directory on a disk of each host, or in its memory (/dev/shm/...), for a copy of the state every `local_every`
    steps, from which the run continues if a process or one host is lost (docs/pods.md); None: no copies."""
    local_every: Count = 10
    """Steps between local copies."""

    def __post_init__(self) -> None:
        check(self, "checkpoint.")
        require(
            "://" not in (self.local_directory or ""),
            f"checkpoint.local_directory {self.local_directory} is not on a host: give a directory on a disk of each "
            "host, or in its memory, e.g. /dev/shm/copies",
        )
        require(
            self.keep_every is None or self.keep_every % self.every == 0,
            f"checkpoint.keep_every {self.keep_every} is not a multiple of checkpoint.every {self.every}, so that not "
            "all of these steps have a checkpoint: change one of them",
        )


@dataclass(frozen=True)
class LogConfig:
    """Metrics that are written during training."""

    every: Count = 100
    """Steps between lines in metrics.jsonl."""
    layers: bool = True
    """Write norms of gradients and updates, and LAMB's trust ratios, for each layer too."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
    wandb: str | None = None
    """Weights & Biases project to write to as well (needs the package wandb); None: none."""
    prometheus_port: Annotated[int, Interval("[1, 65535]")] | None = None
    """Serve the metrics to Prometheus over HTTP (docs/monitoring.md): process I on this port + I, on all interfaces;
    None: not at all."""

    def __post_init__(self) -> None:
        check(self, "log.")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation. Its masks are fixed: 15 % of the tokens, masked singly. A causal model has no masks: in a
    causal phase, all tokens are predicted from those before them."""

    every: CountOrZero = 1000
    """Steps between evaluations during training; one always runs at the end. 0: only at the end."""
    rows: Count = 512
    """Rows of each validation split to score; all rows if the split has fewer."""
    batch_size: Rows = 32
    """Rows per evaluation batch, rounded up to a multiple of the row shards. It does not change the metrics."""

    def __post_init__(self) -> None:
        check(self, "evaluation.")


@dataclass(frozen=True)
class RecoveryConfig:
    """What happens when training diverges, a device corrupts its parameters, or a run is started in vain. A step whose
    loss or gradient is not finite is always skipped."""

    max_skipped: Count = 5
    """This many skipped steps in a row count as divergence."""
    max_skipped_share: Share = 0.1
    """Largest share of skipped steps, of the last 100; above it, the run stops with an error. 1: no bound."""
    spike: Positive | None = 3.0
    """Divergence: three losses in a row this many nats above the lowest running average of their phase, if that is also
    more than the noise of the losses (4 mean differences between successive ones), or a running average this many nats
    above the lowest; None: never. With objective.token 'rtd', the loss has the discriminator's times its weight, 50:
    electra_small has 15."""
    stable_steps: Count = 50
    """Steps without divergence after which a checkpoint counts as good; also the span of the running average, and the
    number of steps before the first bad step whose rows are skipped after a rollback."""
    max_rollbacks: CountOrZero = 3
    """Number of rollbacks to the last good checkpoint, within rollback_steps, before the run stops with an error."""
    rollback_steps: Count = 10_000
    """A rollback this many steps before a divergence, or more, no longer counts for max_rollbacks."""
    max_starts: Count = 10
    """Number of starts in a row without a new checkpoint after which the run refuses to start again, so that a launcher
    does not repeat it for ever."""
    replica_check_every: CountOrZero | None = None
    """Steps between comparisons of the copies of parameters and moments on devices that must have the same; they are
    also compared before every save. After a difference, the run rolls back and names the device. 0: never. None: 100,
    but never on GPUs, on which it was not tried."""
    stall_seconds: Positive | None = 300.0
    """A step, a read of rows, an evaluation or a save that takes longer than this, and than 20 times the longest of its
    kind before, writes the stacks of all threads to the folder stacks of the work directory; after twice that time the
    process ends with exit code 75. None: never."""

    def __post_init__(self) -> None:
        check(self, "recovery.")


@dataclass(frozen=True)
class TargetConfig:
    """Train until the model reaches a target accuracy, as in MLPerf."""

    mlm_accuracy: Annotated[float, Interval("(0, 1]")] | None = None
    """Stop as soon as the held-out MLM accuracy reaches this; None: train to the end of the phases."""
    every_rows: Count | None = None
    """Between evaluations. None: floor(0.05 * (230.23 * batch_size + 3,000,000) / 25,000) * 25,000, MLPerf's."""

    def __post_init__(self) -> None:
        check(self, "target.")

    def rows_between_evaluations(self, batch_size: int) -> int:
        """Rows between evaluations (mlcommons/training, retired_benchmarks/bert/README.md)."""
        if self.every_rows is not None:
            return self.every_rows
        return max(1, int(0.05 * (230.23 * batch_size + 3_000_000) / 25_000)) * 25_000
