"""Checks of learning rates against batch sizes, schedules against phases, and settings against the run. Needs no jax.

Peak rates are compared with published ones, scaled to the phase's batch size by the square-root rule (Krizhevsky 2014;
You et al. 2020, section 4.1). This is a rule of thumb, so deviations are warnings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.config import Config, Phase
from bert_jax.data.batch import SpecialIds
from bert_jax.data.row_reader import CorpusRows
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.doctor.epochs import estimate_epochs
from bert_jax.training.optimizers.schedules import learning_rate


class ReferenceLearningRate(NamedTuple):
    """A published learning rate, scaled to other batch sizes by the square-root rule."""

    rate: float
    batch_size: int
    """Batch size of the published rate."""
    min_batch: int
    """Smallest published batch size: the scaled rate is constant below it."""
    max_ratio: float
    """A peak above this multiple of the scaled rate gives a warning."""
    source: str


REFERENCE_RATES = {
    # RoBERTa's 6e-4 at 8,192 and 1e-3 at 8,000 (table 3) are 1.1 and 1.8 times the scaled rate, 24-hour BERT's 1e-3 at
    # 4,096 2.5 times.
    "adamw": ReferenceLearningRate(1e-4, 256, 256, 4.0, "Devlin et al. 2019, 1e-4 at 256 rows"),
    # The scaled rate equals all values of table 4, 6.25e-4 at 512 to 5e-3 at 32,768, and ALBERT's 1.76e-3 at 4,096;
    # MLPerf's 2.88e-3 at 8,192 is 1.15 times the scaled rate.
    "lamb": ReferenceLearningRate(
        5e-3, 32_768, 512, 2.0, "You et al. 2020, table 4: 6.25e-4 at 512 to 5e-3 at 32,768 rows"
    ),
}
PUBLISHED_WIDTH = 768
"""hidden_size of the smallest model of these runs; narrower models have larger rates, as 1 / width (Yang et al. 2022,
Tensor Programs V)."""
NO_WARMUP_RATIO = 0.5
"""A peak above this multiple of the scaled rate needs a warmup."""
MAX_DECAY_LEFT = 0.2
"""Largest accepted share of the decay from peak to end that is left at the last step."""


def reference_rate(config: Config, phase: Phase) -> float:
    """The published learning rate, scaled to a phase's batch size and the model's width; infinite if there is none."""
    if (published := REFERENCE_RATES.get(config.optimizer.name)) is None:
        return math.inf
    batch = max(phase.batch_size, published.min_batch)
    width_factor = max(1.0, PUBLISHED_WIDTH / config.model.hidden_size)
    return published.rate * math.sqrt(batch / published.batch_size) * width_factor


def rates(context: CheckContext) -> Iterator[Finding]:
    """Peak rates against batch sizes."""
    config, published = context.config, REFERENCE_RATES.get(context.config.optimizer.name)
    if published is None:
        yield Finding("ok", "rate", f"no published learning rate of {config.optimizer.name} to compare with", {})
        return
    for i, phase in enumerate(config.phases):
        scaled = reference_rate(config, phase)
        ratio = phase.learning_rate / scaled
        values = {"phase": i, "learning_rate": phase.learning_rate, "published": scaled, "ratio": ratio}
        width = config.model.hidden_size
        factor = f" x {PUBLISHED_WIDTH} / width {width}" if width < PUBLISHED_WIDTH else ""
        text = (
            f"phase {i}: peak {phase.learning_rate:g} with {phase.batch_size:,} rows is {ratio:.2g} x {scaled:.2g}, "
            f"the square-root rule{factor} of {config.optimizer.name} ({published.source})"
        )
        remedy = f"expect divergence; lower --phases.{i}.learning-rate to {scaled:.2g}, or raise batch_size"
        yield finding("rate", text, values, remedy if ratio > published.max_ratio else "")


def warmups(context: CheckContext) -> Iterator[Finding]:
    """Warmup against the phase's peak rate; `ineffective_settings` reports a warmup as long as the phase."""
    for i, phase in enumerate(context.config.phases):
        large = NO_WARMUP_RATIO * reference_rate(context.config, phase)
        values = {"phase": i, "warmup_steps": phase.warmup_steps, "steps": phase.steps, "large": large}
        text = f"phase {i}: {phase.warmup_steps:,} of {phase.steps:,} steps"
        if not phase.warmup_steps and phase.learning_rate > large:
            remedy = f"set --phases.{i}.warmup-steps, e.g. {max(1, phase.steps // 10):,}"
            text += f"; it starts at {phase.learning_rate:g}, above {large:.2g}, half of the published rate"
            yield finding("warmup", text, values, remedy)
        elif phase.warmup_steps < phase.steps:
            if not phase.warmup_steps:
                text += f"; {phase.learning_rate:g} is at most {large:.2g}, half of the published rate"
            yield finding("warmup", text, values)


def decays(context: CheckContext) -> Iterator[Finding]:
    """End rates, and whether the last phase reaches its end rate."""
    for i, phase in enumerate(context.config.phases):
        last, peak, end = learning_rate(phase, phase.steps - 1), phase.learning_rate, phase.end_learning_rate
        values = {"phase": i, "peak": peak, "end": end, "last": last}
        text = f"phase {i}: {phase.decay} from {peak:g} to {end:g}; its last step has {last:.3g}"
        if phase.decay == "constant":
            yield finding("decay", f"phase {i}: constant at {peak:g}", values)
            continue
        left, remedy = (last - end) / (peak - end) if peak > end else 0.0, ""
        final = i == len(context.config.phases) - 1
        if end > peak:
            remedy = f"the rate rises: lower --phases.{i}.end-learning-rate to at most {peak:g}"
        elif final and phase.warmup_steps < phase.steps and left > MAX_DECAY_LEFT:
            text += f", with {left:.0%} of the decay left"
            remedy = f"set --phases.{i}.decay polynomial with power 1, an earlier decay-start, or more steps"
        yield finding("decay", text, values, remedy)


def steps(context: CheckContext) -> Iterator[Finding]:
    """Whether the run is long enough for its optimizer."""
    total, beta2 = context.config.total_steps, context.config.optimizer.beta2
    span = 1 / (1 - beta2)
    values = {"steps": total, "span": span}
    text = f"{total:,} steps; the second moment averages over {span:,.0f} (optimizer.beta2 {beta2:g})"
    remedy = "sufficient only for a trial; raise --phases.N.steps, or lower --optimizer.beta2"
    yield finding("steps", text, values, remedy if total < span else "")


def settings(context: CheckContext) -> Iterator[Finding]:
    """Settings that cannot take effect."""
    config, epochs = context.config, {}
    if context.mixture_order is not None and (config.data.example_copies or config.data.mask_copies):
        # Rows are only counted: ids do not matter.
        corpora = [CorpusRows(corpus, config.data, SpecialIds(0, 0, 0), config.seed) for corpus in context.corpora]
        epochs = estimate_epochs(config, corpora, context.mixture_order)
    warnings = ineffective_settings(config, epochs)
    for name, text in warnings.items():
        yield Finding("warning", "settings", text, {"setting": name})
    if not warnings:
        yield finding("settings", "the run is long enough for its copies, warmups, ramps and intervals", {})


def ineffective_settings(config: Config, epochs: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Warnings about settings that cannot take effect because of the run's length or format, by setting.

    Args:
      config: of the run.
      epochs: number of epochs of each corpus in each phase, by name of the corpus (`estimate_epochs`). Missing corpora
        are not checked.
    """
    warnings = _copies(config, epochs)
    for i, phase in enumerate(config.phases):
        if phase.warmup_steps >= phase.steps:
            warnings[f"phases.{i}.warmup_steps"] = (
                f"phase {i}: {phase.warmup_steps:,} warmup steps of {phase.steps:,}, so the peak "
                f"{phase.learning_rate:g} is never reached: lower --phases.{i}.warmup-steps below {phase.steps}"
            )
        last = phase.batch_size_at(phase.steps - 1)
        if last < phase.batch_size:
            warnings[f"phases.{i}.ramp_steps"] = (
                f"phase {i}: its {phase.steps:,} steps end before the ramp of {phase.ramp_steps:,}, so batches have at "
                f"most {last:,} rows, not {phase.batch_size:,}: lower --phases.{i}.ramp-steps"
            )
    return warnings | _intervals(config)


def _intervals(config: Config) -> dict[str, str]:
    """Warnings about intervals longer than the run, which take effect only at its end."""
    warnings, total = {}, config.total_steps
    every = {"checkpoint.every": config.checkpoint.every, "log.every": config.log.every}
    if config.target.mlm_accuracy is None:
        every = {"evaluation.every": config.evaluation.every} | every
    else:
        rows = sum(phase.rows_before(phase.steps) for phase in config.phases)
        between = config.target.rows_between(config.phases[-1].batch_size)
        if between > rows:
            warnings["target.every"] = (
                f"target.every {between:,} exceeds the {rows:,} rows of the run, so the target is checked only at the "
                "end: lower --target.every"
            )
    long = [f"{name} {value:,}" for name, value in every.items() if value > total]
    if long:
        warnings[", ".join(name for name, value in every.items() if value > total)] = (
            f"the run has {total:,} steps, fewer than {', '.join(long)}: this happens only at the end; lower it"
        )
    return warnings


def _copies(config: Config, epochs: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Warnings about copies of examples or masks that are never repeated, or not on the same examples."""
    data, warnings, periods = config.data, {}, {}
    if data.example_copies is not None:
        if data.paired:
            periods["example_copies"] = data.example_copies
        else:
            warnings["data.example_copies"] = (
                f"data.example_copies {data.example_copies} has no effect: {data.format} makes the same examples in "
                "every epoch; leave it out"
            )
    if data.mask_copies is not None:
        if config.model.direction == "causal":
            warnings["data.mask_copies"] = (
                f"data.mask_copies {data.mask_copies} has no effect: a causal model has no masks; leave it out"
            )
        elif data.paired and data.example_copies is None:
            warnings["data.mask_copies"] = (
                f"data.mask_copies {data.mask_copies} repeats masks, but {data.format} draws new examples in every "
                f"epoch, so almost nothing is repeated: set --data.example-copies {data.mask_copies} too"
            )
        else:
            # A row repeats when both its examples and its masks repeat.
            periods["mask_copies"] = math.lcm(data.mask_copies, periods.get("example_copies", 1))
    for name, period in periods.items():
        idle = [
            f"{corpus} ({sum(counts):.3g} epochs)"
            for corpus, counts in epochs.items()
            if _never_repeats(config, counts, period)
        ]
        if idle:
            warnings[f"data.{name}"] = (
                f"data.{name} {getattr(data, name)} has no effect on {', '.join(idle)}: rows of the same length "
                f"repeat only after {period} epochs; use fewer copies than epochs, or leave it out"
            )
    return warnings


def _never_repeats(config: Config, counts: Sequence[float], period: int) -> bool:
    """Whether no two epochs of a corpus, in rows of the same length, are equal modulo a period."""
    first, seen = 0, set()
    for phase, count in zip(config.phases, counts, strict=True):
        for epoch in range(first, first + math.ceil(count)):
            if (phase.seq_len, epoch % period) in seen:
                return False
            seen.add((phase.seq_len, epoch % period))
        first += math.ceil(count)
    return True


CHECKS = {"rate": rates, "warmup": warmups, "decay": decays, "steps": steps, "settings": settings}
"""Checks by the name of the finding that reports their error."""
