"""An epoch's plan, counted; and how many epochs the phases of a run make. Needs no jax and reads no record."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config import Config
from bert_jax.data.corpus_rows import CorpusRows
from bert_jax.data.epoch_plan import EpochPlan, Window
from bert_jax.data.mixture import CYCLE_ROWS, MixtureOrder
from bert_jax.progress import progress

PLANNED_TOKENS = 500_000_000
"""Of larger corpora, windows with about this number of tokens are measured; some seconds."""
PLANNED_WINDOWS = 120
"""How long a phase stays is counted exactly if that takes no more windows; about as many tokens."""
SHOWN_WINDOWS = 50
"""From so many windows on (some 200 M tokens) a bar is shown."""


@dataclasses.dataclass(frozen=True)
class Epoch:
    """Counts over windows of an epoch."""

    windows: int
    """planned and counted here"""
    all_windows: int
    """that the epoch has"""
    all_tokens: int
    """of the corpus"""
    tokens: int
    """of the corpus in the windows counted"""
    shown: int
    """of these, in an example"""
    truncated: int
    """of these, in none, as the plan says"""
    examples: int
    rows: int
    filled: int
    """tokens of all rows that are not padding: text, that of random segments too, and special tokens"""
    labelled: int
    """examples with a pair label"""
    negatives: int
    """examples with label 1: B is random, or A and B are swapped"""
    singles: int
    """pairs that had to have a random B, because their chunk had one sentence"""

    @property
    def scale(self) -> float:
        """What counts are to be multiplied by to be those of the epoch; 1 if all of it was planned."""
        return 1.0 if self.windows == self.all_windows else self.all_tokens / self.tokens


def measure(plan: EpochPlan, epoch: int = 0, budget: int = PLANNED_TOKENS) -> Epoch:
    """Plans an epoch, or evenly spaced windows of it where the corpus has more than `budget` tokens."""
    windows, total = plan.windows, plan.corpus.num_tokens
    planned = windows if total <= budget else max(1, windows * budget // total)
    chosen = [windows * (2 * i + 1) // (2 * planned) for i in range(planned)]
    counts = np.zeros(9, np.int64)
    for window in _windows(plan, epoch, chosen):
        counts += _counts(plan, window)
    return Epoch(planned, windows, total, *counts.tolist())


def _windows(plan: EpochPlan, epoch: int, chosen: list[int]) -> Iterator[Window]:
    if len(chosen) < SHOWN_WINDOWS:
        yield from (plan.window(epoch, index) for index in chosen)
        return
    with progress(f"planning {plan.corpus.name} at {plan.seq_len}", len(chosen), "window") as bar:
        for index in chosen:
            yield plan.window(epoch, index)
            bar.update()


def _counts(plan: EpochPlan, window: Window) -> tuple[int, ...]:
    """The fields of `Epoch` from `tokens` on."""
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


def estimate(config: Config, corpora: Sequence[CorpusRows], turns: MixtureOrder) -> dict[str, list[float]]:
    """Epochs that each phase makes of each corpus, by the corpus's name, e.g. {"books": [2.5, 0.25]}.

    One window of each is planned, so this takes tenths of a second whatever the corpora; `stay` is exact.

    Raises:
      UserError: see `EpochPlan`.
    """
    rows = rows_by_phase(config, turns)
    measured = [[measure(one.plan(phase.seq_len), budget=1) for phase in config.phases] for one in corpora]
    return {
        one.corpus.name: [int(rows[i, j]) / (found.rows * found.scale) for i, found in enumerate(measured[j])]
        for j, one in enumerate(corpora)
    }


class Stay(NamedTuple):
    """How long a phase stays with one corpus."""

    first: int
    """epoch that it opens with, counted from 0"""
    epochs: float
    """that it makes of the corpus, e.g. 2.25"""
    exact: bool
    """whether every epoch was planned; otherwise it was assumed that each has as many rows as the one measured"""

    @property
    def following(self) -> int:
        """Epoch that the next phase opens: the first one that this phase has not touched."""
        return self.first + math.ceil(self.epochs)


def stay(plan: EpochPlan, measured: Epoch, first: int, rows: int, most: int = PLANNED_WINDOWS) -> Stay:
    """How many epochs it takes to read so many rows of a corpus from the start of epoch `first` on.

    Args:
      plan: of the corpus, for the rows' length.
      measured: any epoch of it.
      first: epoch that the phase opens with.
      rows: that it reads of this corpus.
      most: windows that may be planned to get at an exact figure.
    """
    about = rows / (measured.rows * measured.scale)
    if (about + 1) * plan.windows > most:
        return Stay(first, about, False)
    epochs = 0
    while rows:
        here = sum(len(window) for window in _windows(plan, first + epochs, list(range(plan.windows))))
        if here > rows:
            return Stay(first, epochs + rows / here, True)
        rows, epochs = rows - here, epochs + 1
    return Stay(first, float(epochs), True)
