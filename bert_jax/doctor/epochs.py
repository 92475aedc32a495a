"""The number of epochs of each phase. Needs no jax and reads no records."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.config import Config
from bert_jax.data.corpus import Corpus
from bert_jax.data.epoch_counts import EpochStatistics, measure_epoch
from bert_jax.data.epoch_plan import EpochPlanner
from bert_jax.data.mixture import CYCLE_ROWS, MixtureOrder


def rows_by_phase_and_corpus(config: Config, orders: Sequence[MixtureOrder]) -> np.ndarray:
    """Rows that each phase reads of each corpus, int64 [num_phases, num_corpora]; `orders` has that of each phase."""
    bounds = np.cumsum([0, *(phase.rows_before(phase.steps) for phase in config.phases)]).tolist()

    def rows_before(order: MixtureOrder, row: int) -> np.ndarray:
        rest = np.bincount(order.order[: row % CYCLE_ROWS], minlength=len(order.counts))
        return row // CYCLE_ROWS * order.counts + rest

    return np.stack(
        [
            rows_before(order, end) - rows_before(order, start)
            for order, (start, end) in zip(orders, itertools.pairwise(bounds), strict=True)
        ]
    )


class PhaseEpochs(NamedTuple):
    """Epochs of one corpus in one phase."""

    first: int
    """First epoch of the phase, counted from 0: the first one that no earlier phase reads from."""
    epochs: float
    """Number of epochs, e.g. 2.25."""
    statistics: EpochStatistics
    """Of the first epoch of the corpus, in rows of the phase's length."""


def estimate_epochs(
    config: Config, corpora: Sequence[Corpus], orders: Sequence[MixtureOrder], budget: float = 1
) -> dict[str, list[PhaseEpochs]]:
    """Epochs that each phase makes of each corpus, by the corpus's name.

    All epochs are assumed to have as many rows as the first one.

    Args:
      config: of the run.
      corpora: of the run, in the order of `orders`.
      orders: how the corpora share the rows of each phase.
      budget: tokens to plan per corpus and phase, as in `measure_epoch`. By default one window, which takes tenths of a
        second for corpora of any size.

    Raises:
      UserError: see `EpochPlanner`.
    """
    found = {}
    for corpus, rows in zip(corpora, rows_by_phase_and_corpus(config, orders).T.tolist(), strict=True):
        first, phases = 0, []
        for phase, count in zip(config.phases, rows, strict=True):
            statistics = measure_epoch(EpochPlanner(corpus, config.data, phase.seq_len, config.seed), budget=budget)
            phases.append(PhaseEpochs(first, count / (statistics.rows * statistics.scale_factor), statistics))
            first += math.ceil(phases[-1].epochs)
        found[corpus.name] = phases
    return found
