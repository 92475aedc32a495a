"""Counts over the plan of an epoch: tokens covered and truncated, rows, examples, labels. Reads no records."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from bert_jax.command.progress import progress_bar
from bert_jax.data.epoch_plan import EpochPlanner, WindowPlan

LOW_COVERAGE = 0.7
"""A smaller share of the tokens in an epoch is worth a warning: pairs of English books cover 87 % in rows of 128."""
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
    """number of tokens of the documents of an epoch, on average"""
    tokens: int
    """those of them in the counted windows"""
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
    windows, total = plan.windows, round(plan.num_tokens)
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
