"""Counts over the plan of an epoch, and the number of epochs of each phase. Needs no jax and reads no records."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config import Config
from bert_jax.data.epoch_plan import EpochPlan, Window
from bert_jax.data.mixture import CYCLE_ROWS, MixtureOrder
from bert_jax.data.row_reader import CorpusRows
from bert_jax.progress import progress

MAX_COUNTED_TOKENS = 500_000_000
"""For larger corpora, windows with about this number of tokens are counted, which takes a few seconds."""
MAX_EXACT_WINDOWS = 120
"""The epochs of a phase are counted exactly if this takes at most this number of windows (about 500 M tokens)."""
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
    def scale(self) -> float:
        """Factor from the counts to those of the whole epoch; 1 if all windows were counted."""
        return 1.0 if self.windows == self.all_windows else self.all_tokens / self.tokens


def measure_epoch(plan: EpochPlan, epoch: int = 0, budget: int = MAX_COUNTED_TOKENS) -> EpochStatistics:
    """Count an epoch, or evenly spaced windows of it if the corpus has more than `budget` tokens."""
    windows, total = plan.windows, plan.corpus.num_tokens
    planned = windows if total <= budget else max(1, windows * budget // total)
    chosen = [windows * (2 * i + 1) // (2 * planned) for i in range(planned)]
    counts = np.zeros(9, np.int64)
    for window in _windows(plan, epoch, chosen):
        counts += _counts(plan, window)
    return EpochStatistics(planned, windows, total, *counts.tolist())


def _windows(plan: EpochPlan, epoch: int, chosen: list[int]) -> Iterator[Window]:
    if len(chosen) < PROGRESS_BAR_WINDOWS:
        yield from (plan.window(epoch, index) for index in chosen)
        return
    with progress(f"planning {plan.corpus.name} at {plan.seq_len}", len(chosen), "window") as bar:
        for index in chosen:
            yield plan.window(epoch, index)
            bar.update()


def _counts(plan: EpochPlan, window: Window) -> tuple[int, ...]:
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


def rows_by_phase(config: Config, turns: MixtureOrder) -> np.ndarray:
    """Rows that each phase reads of each corpus, int64 [num_phases, num_corpora]."""
    bounds = np.cumsum([0, *(phase.rows_before(phase.steps) for phase in config.phases)])
    taken = [
        int(row) // CYCLE_ROWS * turns.counts
        + np.bincount(turns.order[: row % CYCLE_ROWS], minlength=len(turns.counts))
        for row in bounds
    ]
    return np.diff(np.stack(taken), axis=0)


def estimate_epochs(config: Config, corpora: Sequence[CorpusRows], turns: MixtureOrder) -> dict[str, list[float]]:
    """Epochs that each phase makes of each corpus, by the corpus's name, e.g. {"books": [2.5, 0.25]}.

    One window of each corpus is planned, which takes tenths of a second for corpora of any size.
    `count_phase_epochs` is exact.

    Raises:
      UserError: see `EpochPlan`.
    """
    rows = rows_by_phase(config, turns)
    counts = [[measure_epoch(one.epoch_plan(phase.seq_len), budget=1) for phase in config.phases] for one in corpora]
    return {
        one.corpus.name: [int(rows[i, j]) / (epoch.rows * epoch.scale) for i, epoch in enumerate(counts[j])]
        for j, one in enumerate(corpora)
    }


class PhaseEpochs(NamedTuple):
    """Epochs of one corpus in one phase."""

    first: int
    """first epoch of the phase, counted from 0"""
    epochs: float
    """number of epochs, e.g. 2.25"""
    exact: bool
    """whether every epoch was planned; otherwise all epochs are assumed to have as many rows as the counted one"""

    @property
    def following(self) -> int:
        """First epoch of the next phase: the first one that this phase does not read from."""
        return self.first + math.ceil(self.epochs)


def count_phase_epochs(
    plan: EpochPlan, counts: EpochStatistics, first: int, rows: int, max_windows: int = MAX_EXACT_WINDOWS
) -> PhaseEpochs:
    """Number of epochs that a phase takes to read `rows` rows of a corpus, from the start of epoch `first`.

    Args:
      plan: of the corpus, for rows of the phase's length.
      counts: of any epoch of the corpus.
      first: first epoch of the phase.
      rows: number of rows that the phase reads of this corpus.
      max_windows: number of windows that may be planned for an exact result.
    """
    about = rows / (counts.rows * counts.scale)
    if (about + 1) * plan.windows > max_windows:
        return PhaseEpochs(first, about, False)
    epochs = 0
    while rows:
        epoch_rows = sum(len(window) for window in _windows(plan, first + epochs, list(range(plan.windows))))
        if epoch_rows > rows:
            return PhaseEpochs(first, epochs + rows / epoch_rows, True)
        rows, epochs = rows - epoch_rows, epochs + 1
    return PhaseEpochs(first, float(epochs), True)
