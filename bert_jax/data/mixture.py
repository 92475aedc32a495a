"""Which corpus each row comes from: several corpora in one stream, with exact shares."""

from collections.abc import Sequence

import numpy as np

from bert_jax.errors import UserError

CYCLE_ROWS = 10_000
"""Rows after which the order of corpora repeats. In every cycle, counted from the start of the stream, each corpus has
exactly its share s, rounded to a ten-thousandth. In any n consecutive rows it has n s rows plus or minus at most
1 + s (c - 2), where c is the number of corpora (1 for two of them); in the first n rows, half of that."""


def smoothed_shares(sizes: Sequence[float] | np.ndarray, exponent: float) -> np.ndarray:
    """Share of each corpus or language, float64 [num_sizes], proportional to its share of all sizes to the power of
    `exponent`.

    An exponent below 1 gives small ones more than their size. Multilingual BERT used 0.7 for its languages
    (google-research/bert, multilingual.md).

    Args:
      sizes: positive, e.g. bytes of text.
      exponent: 1 for shares by size, 0 for equal ones.
    """
    sizes = np.asarray(sizes, np.float64)
    if not (sizes > 0).all():
        raise ValueError(f"sizes must be positive, not {sizes.tolist()}")
    powers = (sizes / sizes.sum()) ** exponent
    return powers / powers.sum()


class MixtureOrder:
    """The order in which the corpora of a mixture provide rows, the same in every cycle."""

    def __init__(self, shares: Sequence[float] | np.ndarray):
        """Spreads the rows of each corpus evenly over a cycle.

        Args:
          shares: of each corpus; positive, summing to 1.

        Raises:
          UserError: a share that rounds to no row of a cycle.
        """
        counts = rows_per_cycle(shares)
        if (counts == 0).any():
            raise UserError(
                f"a corpus has a share of {min(shares):.2g} of the mixture, which is rounded to 0 of {CYCLE_ROWS:,} "
                "rows: give it more weight, or leave it out"
            )
        corpus_of_row = np.concatenate([np.full(count, corpus) for corpus, count in enumerate(counts)])
        # The j-th of n rows of a corpus is at (j + 1/2) / n of the cycle; at equal places the earlier corpus is first.
        # So up to any place x each corpus has n x rows plus or minus 1/2, from which the bound above follows: an error
        # is its own (at most 1/2) less s times the sum of all c, and an interval is the difference of two.
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        self.order = corpus_of_row[np.argsort(places, kind="stable")]
        self.counts = counts

    def corpus_of_rows(self, start: int, count: int) -> np.ndarray:
        """Index of the corpus of each of `count` rows from row `start` of the stream on, int64 [count]."""
        return self.order[(start + np.arange(count)) % CYCLE_ROWS]


def rows_per_cycle(shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """Rows of a cycle that each corpus gets, int64 [num_corpora]: they sum to CYCLE_ROWS, by largest remainders.

    Args:
      shares: of each corpus; positive, in proportion. Of equal remainders the earlier one is rounded up.
    """
    exact = np.asarray(shares, np.float64) / np.sum(shares) * CYCLE_ROWS
    counts = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: CYCLE_ROWS - counts.sum()]] += 1
    return counts
