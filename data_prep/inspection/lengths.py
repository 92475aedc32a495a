"""Histograms of lengths: exact, and small for any size of corpus."""

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bin:
    """Lengths from `first` to `last`, both included."""

    first: int
    last: int
    count: int
    """number of such lengths"""
    tokens: int
    """sum of such lengths"""

    @property
    def label(self) -> str:
        """The range as text."""
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,}–{self.last:,}"


@dataclasses.dataclass(frozen=True, eq=False)
class LengthHistogram:
    """How often each length occurs.

    Lengths that sum to T have at most sqrt(2 T) different values, so this stays small: 63,000 for 2 billion.

    Attributes:
      values: the lengths that occur, positive, ascending, int64 [num_values].
      counts: of each value, int64 [num_values].
    """

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def from_lengths(cls, lengths: np.ndarray) -> "LengthHistogram":
        """Counts lengths [any shape], all positive."""
        return cls(*np.unique(np.asarray(lengths, np.int64), return_counts=True))

    @classmethod
    def merge(cls, histograms: Iterable["LengthHistogram"]) -> "LengthHistogram":
        """The sum of several histograms."""
        histograms = list(histograms)
        values, places = np.unique(np.concatenate([histogram.values for histogram in histograms]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, places, np.concatenate([histogram.counts for histogram in histograms]))
        return cls(values, counts)

    @property
    def total(self) -> int:
        """Number of lengths."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Sum of all lengths."""
        return int(self.values @ self.counts)

    @property
    def mean(self) -> float:
        """Mean length."""
        return self.tokens / self.total

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of all lengths, in (0, 1], does not exceed."""
        return int(self.values[np.searchsorted(np.cumsum(self.counts), share * self.total, "left")])

    def bins(self) -> list[Bin]:
        """Two bins per power of 2, from the bin of the shortest length to that of the longest."""
        edges = _edges(int(self.values[-1]))
        edges = edges[np.searchsorted(edges, self.values[0], "right") - 1 :]
        starts = np.searchsorted(self.values, edges)
        counts = np.diff(np.concatenate([[0], np.cumsum(self.counts)])[starts]).tolist()
        tokens = np.diff(np.concatenate([[0], np.cumsum(self.values * self.counts)])[starts]).tolist()
        return [
            Bin(*values) for values in zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts, tokens, strict=True)
        ]


def _edges(longest: int) -> np.ndarray:
    """1, 2, 3, 4, 6, 8, 11, 16, 23, 32, ...: powers of the square root of 2, the last above `longest`."""
    steps = 2 * longest.bit_length() + 1
    edges = np.unique(np.round(2 ** (np.arange(steps) / 2)).astype(np.int64))
    return edges[: np.searchsorted(edges, longest, "right") + 1]
