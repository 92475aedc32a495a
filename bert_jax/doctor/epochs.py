"""Counts over the plan of an epoch, and the number of epochs of each phase. Needs no jax and reads no records."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config import Config
from bert_jax.data.corpus import Corpus
from bert_jax.data.epoch_plan import EpochPlanner, WindowPlan
from bert_jax.data.mixture import CYCLE_ROWS, MixtureOrder
from bert_jax.progress import progress_bar

PROGRESS_BAR_WINDOWS = 50
"""A progress bar is shown for at least this number of windows (about 200 M tokens)."""


@dataclasses.dataclass(frozen=True)
class EpochStatistics:
    """Counts over windows of an epoch."""

    windows: int
    """number of counted windows"""
    all_windows: int
    """number of windows of the epoch"""
    all_tokens: int
    """number of tokens of the corpus"""
    tokens: int
    """number of tokens of the corpus in the counted windows"""
    covered: int
    """those of `tokens` that are in an example"""
    truncated: int
    """those of `tokens` that are in no example, according to the plan"""
    examples: int
    rows: int
    filled: int
    """tokens of all rows without padding: text, including random segments, and special tokens"""
    labelled: int
    """examples with a pair label"""
    negatives: int
    """examples with label 1: B is random, or A and B are swapped"""
    singles: int
    """pairs with a random B because their chunk has only one sentence"""

    @property
    def scale_factor(self) -> float:
        """Factor from the counts to those of the whole epoch; 1 if all windows were counted."""
        return 1.0 if self.windows == self.all_windows else self.all_tokens / self.tokens


def measure_epoch(plan: EpochPlanner, budget: float = math.inf) -> EpochStatistics:
    """Count the first epoch, or evenly spaced windows of it if the corpus has more than `budget` tokens."""
    windows, total = plan.windows, plan.corpus.num_tokens
    planned = windows if total <= budget else max(1, int(windows * budget // total))
    chosen = [windows * (2 * i + 1) // (2 * planned) for i in range(planned)]
    counts = np.zeros(9, np.int64)
    for window in _windows(plan, chosen):
        counts += _counts(plan, window)
    return EpochStatistics(planned, windows, total, *counts.tolist())


def _windows(plan: EpochPlanner, chosen: list[int]) -> Iterator[WindowPlan]:
    if len(chosen) < PROGRESS_BAR_WINDOWS:
        yield from (plan.window(0, index) for index in chosen)
        return
    with progress_bar(f"planning {plan.corpus.name} at {plan.seq_len}", len(chosen), "window") as bar:
        for index in chosen:
            yield plan.window(0, index)
            bar.update()


def _counts(plan: EpochPlanner, window: WindowPlan) -> tuple[int, ...]:
    """The fields of `EpochStatistics` from `tokens` on."""
    examples, sentences = window.examples, np.asarray(plan.corpus.record_offsets)[window.chunks]
    lengths = np.asarray(plan.corpus.sentence_lengths)
    own = [examples[f"{segment}_tokens"][examples[f"{segment}_offset"] >= 0].sum() for segment in "ab"]
    return (
        sum(int(lengths[first:last].sum(dtype=np.int64)) for first, last in sentences),
        int(sum(own)),
        window.truncated_tokens,
        len(examples),
        len(window),
        int(examples["length"].sum(dtype=np.int64)),
        int((examples["pair_label"] >= 0).sum()),
        int((examples["pair_label"] == 1).sum()),
        window.forced_random_pairs,
    )


def rows_by_phase_and_corpus(config: Config, turns: MixtureOrder) -> np.ndarray:
    """Rows that each phase reads of each corpus, int64 [num_phases, num_corpora]."""
    bounds = np.cumsum([0, *(phase.rows_before(phase.steps) for phase in config.phases)])
    taken = [
        int(row) // CYCLE_ROWS * turns.counts
        + np.bincount(turns.order[: row % CYCLE_ROWS], minlength=len(turns.counts))
        for row in bounds
    ]
    return np.diff(np.stack(taken), axis=0)


class PhaseEpochs(NamedTuple):
    """Epochs of one corpus in one phase."""

    first: int
    """First epoch of the phase, counted from 0: the first one that no earlier phase reads from."""
    epochs: float
    """Number of epochs, e.g. 2.25."""
    statistics: EpochStatistics
    """Of the first epoch of the corpus, in rows of the phase's length."""


def estimate_epochs(
    config: Config, corpora: Sequence[Corpus], turns: MixtureOrder, budget: float = 1
) -> dict[str, list[PhaseEpochs]]:
    """Epochs that each phase makes of each corpus, by the corpus's name.

    All epochs are assumed to have as many rows as the first one.

    Args:
      config: of the run.
      corpora: of the run, in the order of `turns`.
      turns: how the corpora share the rows.
      budget: tokens to plan per corpus and phase, as in `measure_epoch`. By default one window, which takes tenths of a
        second for corpora of any size.

    Raises:
      UserError: see `EpochPlanner`.
    """
    found = {}
    for corpus, rows in zip(corpora, rows_by_phase_and_corpus(config, turns).T.tolist(), strict=True):
        first, phases = 0, []
        for phase, count in zip(config.phases, rows, strict=True):
            statistics = measure_epoch(EpochPlanner(corpus, config.data, phase.seq_len, config.seed), budget=budget)
            phases.append(PhaseEpochs(first, count / (statistics.rows * statistics.scale_factor), statistics))
            first += math.ceil(phases[-1].epochs)
        found[corpus.name] = phases
    return found
