"""Checks of learning rates against batch sizes, schedules against phases, and settings against the run. Needs no jax.

Peak rates are compared with published ones, scaled to the phase's batch size by the square-root rule (Krizhevsky 2014;
You et al. 2020, section 4.1). This is a rule of thumb, so deviations are warnings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.config import Config, Phase
from bert_jax.config.presets import load_config, preset_files
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.doctor.epochs import PhaseEpochs, estimate_epochs
from bert_jax.training.optimizers.schedules import learning_rate


class _ReferenceLearningRate(NamedTuple):
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
    "adamw": _ReferenceLearningRate(1e-4, 256, 256, 4.0, "Devlin et al. 2019, 1e-4 at 256 rows"),
    # ModernBERT's 8e-4 at 4,608 (Warner et al. 2024) is 1.9 times the scaled rate.
    "stable_adamw": _ReferenceLearningRate(1e-4, 256, 256, 4.0, "Devlin et al. 2019, 1e-4 at 256 rows (AdamW)"),
    # The scaled rate equals all values of table 4, 6.25e-4 at 512 to 5e-3 at 32,768, and ALBERT's 1.76e-3 at 4,096;
    # MLPerf's 2.88e-3 at 8,192 is 1.15 times the scaled rate.
    "lamb": _ReferenceLearningRate(
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


def settings(context: CheckContext) -> Iterator[Finding]:
    """Settings that have no effect, or not the usual one, in a run of this length, schedule and format."""
    config, epochs = context.config, {}
    if context.mixture_order is not None and (config.data.example_copies or config.data.mask_copies):
        epochs = estimate_epochs(config, context.corpora, context.orders)
    warnings = questionable_settings(config, epochs)
    if config.name in preset_files():  # what a preset chooses is intended
        shipped = questionable_settings(load_config(config.name), {})
        warnings = {name: text for name, text in warnings.items() if shipped.get(name) != text}
    for name, text in warnings.items():
        yield Finding("warning", "settings", text, {"setting": name})
    if not warnings:
        yield finding("settings", "the run is long enough for its copies, schedules, ramps and intervals", {})


def questionable_settings(config: Config, epochs: Mapping[str, Sequence[PhaseEpochs]]) -> dict[str, str]:
    """Warnings about settings that have no effect in this run, or one that is rarely intended, by setting.

    Args:
      config: of the run.
      epochs: of each corpus in each phase, by name of the corpus (`estimate_epochs`). Missing corpora are not checked.
    """
    warnings = {}
    for i, phase in enumerate(config.phases):
        warnings |= _phase_settings(config, i, phase)
    model, longest = config.model, max(phase.seq_len for phase in config.phases)
    if model.positions == "learned" and longest < model.max_positions:
        warnings["model.max_positions"] = (
            f"rows have up to {longest} tokens, so positions from {longest} on are never trained: set "
            f"--model.max-positions {longest}, or add a phase with longer rows"
        )
    span = 1 / (1 - config.optimizer.beta2)
    if config.total_steps < span:
        warnings["optimizer.beta2"] = (
            f"{config.total_steps:,} steps are fewer than the {span:,.0f} over which the second moment averages, "
            "sufficient only for a trial: raise --phases.N.steps, or lower --optimizer.beta2"
        )
    if config.data.samples_documents and config.data.example_copies:
        warnings["data.example_copies and weights"] = (
            f"the {config.data.example_copies} epochs of data.example_copies repeat, so most documents with a smaller "
            f"share of the largest weight than 1 / {config.data.example_copies} are in none: leave it out, or raise it"
        )
    return warnings | _copies(config, epochs) | _intervals(config)


def _phase_settings(config: Config, i: int, phase: Phase) -> dict[str, str]:
    """Warnings about warmup, decay and batch ramp of a phase."""
    warnings, peak, end = {}, phase.learning_rate, phase.end_learning_rate
    large, last = NO_WARMUP_RATIO * reference_rate(config, phase), learning_rate(phase, phase.steps - 1)
    if phase.warmup_steps >= phase.steps:
        warnings["warmup_steps"] = (
            f"{phase.warmup_steps:,} warmup steps of {phase.steps:,}, so the peak {peak:g} is never reached: lower "
            f"--phases.{i}.warmup-steps below {phase.steps}"
        )
    elif not phase.warmup_steps and peak > large:
        warnings["warmup_steps"] = (
            f"no warmup, and it starts at {peak:g}, above {large:.2g}, half of the published rate: set "
            f"--phases.{i}.warmup-steps, e.g. {max(1, phase.steps // 10):,}"
        )
    elif phase.decay != "constant" and i == len(config.phases) - 1 and last - end > MAX_DECAY_LEFT * (peak - end) > 0:
        warnings["decay"] = (
            f"the last step has {last:.3g}, with {(last - end) / (peak - end):.0%} of the decay left: set "
            f"--phases.{i}.decay polynomial with power 1, an earlier decay-start, or more steps"
        )
    if phase.decay != "constant" and end > peak:
        warnings["end_learning_rate"] = (
            f"the rate rises from {peak:g} to {end:g}: lower --phases.{i}.end-learning-rate to at most {peak:g}"
        )
    reached = phase.batch_size_at(phase.steps - 1)
    if reached < phase.batch_size:
        warnings["ramp_steps"] = (
            f"its {phase.steps:,} steps end before the ramp of {phase.ramp_steps:,}, so batches have at most "
            f"{reached:,} rows, not {phase.batch_size:,}: lower --phases.{i}.ramp-steps"
        )
    return {f"phases.{i}.{name}": f"phase {i}: {text}" for name, text in warnings.items()}


def _intervals(config: Config) -> dict[str, str]:
    """Warnings about intervals longer than the run, which take effect only at its end, or never."""
    every = {"evaluation.every": config.evaluation.every} if config.target.mlm_accuracy is None else {}
    every |= {"checkpoint.every": config.checkpoint.every, "log.every": config.log.every}
    long = {name: f"{name} {steps:,}" for name, steps in every.items() if steps > config.total_steps}
    text = (
        f"the run has {config.total_steps:,} steps, fewer than {', '.join(long.values())}: this happens only at the "
        "end; lower it"
    )
    warnings = {", ".join(long): text} if long else {}
    keep_every = config.checkpoint.keep_every
    if keep_every is not None and keep_every > config.total_steps:
        warnings["checkpoint.keep_every"] = (
            f"checkpoint.keep_every {keep_every:,} has no effect: the run has {config.total_steps:,} steps; lower it"
        )
    return warnings


def _copies(config: Config, epochs: Mapping[str, Sequence[PhaseEpochs]]) -> dict[str, str]:
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
        if all(config.model_of(i).direction == "causal" for i in range(len(config.phases))):
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
            f"{corpus} ({sum(phase.epochs for phase in phases):.3g} epochs)"
            for corpus, phases in epochs.items()
            if _never_repeats(config, phases, period)
        ]
        if idle:
            warnings[f"data.{name}"] = (
                f"data.{name} {getattr(data, name)} has no effect on {', '.join(idle)}: rows of the same length "
                f"repeat only after {period} epochs; use fewer copies than epochs, or leave it out"
            )
    return warnings


def _never_repeats(config: Config, epochs: Sequence[PhaseEpochs], period: int) -> bool:
    """Whether no two epochs of a corpus, in rows of the same length, are equal modulo a period."""
    read = [
        (phase.seq_len, epoch % period)
        for phase, one in zip(config.phases, epochs, strict=True)
        for epoch in range(one.first, one.first + math.ceil(one.epochs))
    ]
    return len(set(read)) == len(read)


CHECKS = {"rate": rates, "settings": settings}
"""Checks by the name of the finding that reports their error."""
