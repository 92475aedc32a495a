"""Whether learning rates go with batches, schedules with their phases, and settings with the run. Needs no jax.

Peaks are compared with published ones, moved to the phase's batch by the square-root rule (Krizhevsky 2014; You et al.
2020, section 4.1). They are a rule of thumb, so whatever is found is a warning.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.config import Config, Phase
from bert_jax.data.corpus_rows import CorpusRows
from bert_jax.data.row_reader import Marks
from bert_jax.doctor.check_context import CheckContext
from bert_jax.doctor.epochs import estimate_epochs
from bert_jax.doctor.finding import Finding
from bert_jax.training.optimizers.schedules import learning_rate


class ReferenceLearningRate(NamedTuple):
    """A line of learning rates over batch sizes."""

    rate: float
    batch_size: int
    """At which `rate` was published."""
    min_batch: int
    """Batch below which the line is level: nothing was published there."""
    max_ratio: float
    """Times the line: from there on a rate is far above it."""
    source: str


REFERENCE_RATES = {
    # RoBERTa's 6e-4 at 8,192 and 1e-3 at 8,000 (table 3) are 1.1 and 1.8 times this line, 24-hour BERT's 1e-3 at 4,096
    # 2.5 times.
    "adamw": ReferenceLearningRate(1e-4, 256, 256, 4.0, "Devlin et al. 2019, 1e-4 at 256 rows"),
    # The same line goes through all points of table 4, 6.25e-4 at 512 to 5e-3 at 32,768, and ALBERT's 1.76e-3 at 4,096;
    # MLPerf's 2.88e-3 at 8,192 is 1.15 times the line.
    "lamb": ReferenceLearningRate(
        5e-3, 32_768, 512, 2.0, "You et al. 2020, table 4: 6.25e-4 at 512 to 5e-3 at 32,768 rows"
    ),
}
PUBLISHED_WIDTH = 768
"""hidden_size of the smallest model of these runs; of narrower ones larger rates are expected, as 1 / width (Yang et
al. 2022, Tensor Programs V)."""
NO_WARMUP_RATIO = 0.5
"""Of the line: a peak above that is large for a start without warmup."""
MAX_DECAY_LEFT = 0.2
"""Share of the way from peak to end that may be left at the last update."""


def reference_rate(config: Config, phase: Phase) -> float:
    """The published learning rate for a phase's batch and the model's width."""
    published = REFERENCE_RATES[config.optimizer.name]
    batch = max(phase.batch_size, published.min_batch)
    return (
        published.rate * math.sqrt(batch / published.batch_size) * max(1.0, PUBLISHED_WIDTH / config.model.hidden_size)
    )


def rates(context: CheckContext) -> Iterator[Finding]:
    """Peaks against batches."""
    config, published = context.config, REFERENCE_RATES[context.config.optimizer.name]
    for i, phase in enumerate(config.phases):
        line = reference_rate(config, phase)
        times = phase.learning_rate / line
        values = {"phase": i, "learning_rate": phase.learning_rate, "published": line, "times": times}
        wide = config.model.hidden_size
        narrow = f" x {PUBLISHED_WIDTH} / width {wide}" if wide < PUBLISHED_WIDTH else ""
        text = (
            f"phase {i}: peak {phase.learning_rate:g} with {phase.batch_size:,} rows is {times:.2g} times {line:.2g}, "
            f"the square-root line{narrow} of {config.optimizer.name} ({published.source})"
        )
        if times > published.max_ratio:
            remedy = f"expect divergence; lower --phases.{i}.learning-rate to {line:.2g}, or raise the batch"
            yield Finding("warning", "rate", f"{text}: {remedy}", values)
        else:
            yield Finding("ok", "rate", text, values)


def warmups(context: CheckContext) -> Iterator[Finding]:
    """Warmup against the phase's peak; `ineffective` reports one that is as long as the phase."""
    for i, phase in enumerate(context.config.phases):
        large = NO_WARMUP_RATIO * reference_rate(context.config, phase)
        values = {"phase": i, "warmup_steps": phase.warmup_steps, "steps": phase.steps, "large": large}
        text = f"phase {i}: {phase.warmup_steps:,} of {phase.steps:,} updates"
        if not phase.warmup_steps and phase.learning_rate > large:
            tenth = max(1, phase.steps // 10)
            remedy = f"set --phases.{i}.warmup-steps, e.g. {tenth:,}"
            start = f"it starts at {phase.learning_rate:g}, above {large:.2g}, half of the published line"
            yield Finding("warning", "warmup", f"{text}; {start}: {remedy}", values)
        elif phase.warmup_steps < phase.steps:
            below = "" if phase.warmup_steps else f"; {phase.learning_rate:g} is at most {large:.2g}, half of the line"
            yield Finding("ok", "warmup", f"{text}{below}", values)


def decays(context: CheckContext) -> Iterator[Finding]:
    """End rates, and whether the last phase reaches its own."""
    for i, phase in enumerate(context.config.phases):
        last, peak, end = learning_rate(phase, phase.steps - 1), phase.learning_rate, phase.end_learning_rate
        values = {"phase": i, "peak": peak, "end": end, "last": last}
        text = f"phase {i}: {phase.decay} from {peak:g} to {end:g}; its last update has {last:.3g}"
        if phase.decay == "constant":
            yield Finding("ok", "decay", f"phase {i}: constant at {peak:g}", values)
            continue
        left = (last - end) / (peak - end) if peak > end else 0.0
        final = i == len(context.config.phases) - 1
        if end > peak:
            remedy = f"the rate rises: lower --phases.{i}.end-learning-rate to at most {peak:g}"
            yield Finding("warning", "decay", f"{text}: {remedy}", values)
        elif final and phase.warmup_steps < phase.steps and left > MAX_DECAY_LEFT:
            remedy = f"set --phases.{i}.decay polynomial with power 1, an earlier decay-start, or more updates"
            yield Finding("warning", "decay", f"{text}, {left:.0%} of the way above its end: {remedy}", values)
        else:
            yield Finding("ok", "decay", text, values)


def steps(context: CheckContext) -> Iterator[Finding]:
    """Whether the run is long enough for its optimizer."""
    total, beta2 = context.config.total_steps, context.config.optimizer.beta2
    span = 1 / (1 - beta2)
    values = {"steps": total, "span": span}
    text = f"{total:,} updates; the second moment averages over {span:,.0f} (optimizer.beta2 {beta2:g})"
    if total < span:
        remedy = "good for a trial only; raise --phases.N.steps, or lower --optimizer.beta2"
        yield Finding("warning", "steps", f"{text}: {remedy}", values)
        return
    yield Finding("ok", "steps", text, values)


def settings(context: CheckContext) -> Iterator[Finding]:
    """Settings that cannot take effect."""
    config, epochs = context.config, {}
    if context.turns is not None and (config.data.example_copies or config.data.mask_copies):
        # Rows are only counted, so no id matters.
        corpora = [CorpusRows(corpus, config.data, Marks(0, 0, 0), config.seed) for corpus in context.corpora]
        epochs = estimate_epochs(config, corpora, context.turns)
    found = ineffective_settings(config, epochs)
    for name, text in found.items():
        yield Finding("warning", "settings", text, {"setting": name})
    if not found:
        yield Finding("ok", "settings", "the run is long enough for its copies, warmups, ramps and intervals", {})


def ineffective_settings(config: Config, epochs: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Settings that cannot take effect in a run because of its length or format: a warning for each, by its name.

    Args:
      config: of the run.
      epochs: that each phase makes of each corpus, by the corpus's name (`estimate_epochs`). Of what is missing
        here, nothing is reported.
    """
    found = _copies(config, epochs)
    for i, phase in enumerate(config.phases):
        if phase.warmup_steps >= phase.steps:
            found[f"phases.{i}.warmup_steps"] = (
                f"phase {i}: {phase.warmup_steps:,} warmup steps of {phase.steps:,}, so the peak "
                f"{phase.learning_rate:g} is never reached: lower --phases.{i}.warmup-steps below {phase.steps}"
            )
        last = phase.batch_size_at(phase.steps - 1)
        if last < phase.batch_size:
            found[f"phases.{i}.ramp_steps"] = (
                f"phase {i}: its {phase.steps:,} steps end before the ramp of {phase.ramp_steps:,}, so batches have at "
                f"most {last:,} rows, not {phase.batch_size:,}: lower --phases.{i}.ramp-steps"
            )
    return found | _intervals(config)


def _intervals(config: Config) -> dict[str, str]:
    """What happens only once, at the end."""
    found, total = {}, config.total_steps
    every = {"checkpoint.every": config.checkpoint.every, "log.every": config.log.every}
    if config.target.mlm_accuracy is None:
        every = {"evaluation.every": config.evaluation.every} | every
    else:
        rows = sum(phase.rows_before(phase.steps) for phase in config.phases)
        between = config.target.rows_between(config.phases[-1].batch_size)
        if between > rows:
            found["target.every"] = (
                f"target.every {between:,} exceeds the {rows:,} rows of the run, so the target is checked only at the "
                "end: lower --target.every"
            )
    long = [f"{name} {value:,}" for name, value in every.items() if value > total]
    if long:
        found[", ".join(name for name, value in every.items() if value > total)] = (
            f"the run has {total:,} steps, fewer than {', '.join(long)}: this happens only at the end; lower it"
        )
    return found


def _copies(config: Config, epochs: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Sets of examples and of masks that never come again, or not on the same examples."""
    data, found, periods = config.data, {}, {}
    if data.example_copies is not None:
        if data.paired:
            periods["example_copies"] = data.example_copies
        else:
            found["data.example_copies"] = (
                f"data.example_copies {data.example_copies} has no effect: {data.format} makes the same examples in "
                "every epoch; leave it out"
            )
    if data.mask_copies is not None:
        if config.model.direction == "causal":
            found["data.mask_copies"] = (
                f"data.mask_copies {data.mask_copies} has no effect: a causal model has no masks; leave it out"
            )
        elif data.paired and data.example_copies is None:
            found["data.mask_copies"] = (
                f"data.mask_copies {data.mask_copies} repeats masks, but {data.format} draws new examples in every "
                f"epoch, so almost nothing is shown twice: set --data.example-copies {data.mask_copies} too"
            )
        else:
            # What is shown repeats when both the examples and the masks do.
            periods["mask_copies"] = math.lcm(data.mask_copies, periods.get("example_copies", 1))
    for name, period in periods.items():
        idle = [
            f"{corpus} ({sum(made):.3g} epochs)" for corpus, made in epochs.items() if _all_new(config, made, period)
        ]
        if idle:
            found[f"data.{name}"] = (
                f"data.{name} {getattr(data, name)} has no effect on {', '.join(idle)}: what is shown comes again "
                f"after {period} epochs in rows of the same length; use fewer copies than epochs, or leave it out"
            )
    return found


def _all_new(config: Config, made: Sequence[float], period: int) -> bool:
    """Whether no two epochs of a corpus, in rows of one length, are the same modulo a period."""
    first, seen = 0, set()
    for phase, count in zip(config.phases, made, strict=True):
        for epoch in range(first, first + math.ceil(count)):
            if (phase.seq_len, epoch % period) in seen:
                return False
            seen.add((phase.seq_len, epoch % period))
        first += math.ceil(count)
    return True


CHECKS = {"rate": rates, "warmup": warmups, "decay": decays, "steps": steps, "settings": settings}
"""By the name that an error of theirs gets."""
