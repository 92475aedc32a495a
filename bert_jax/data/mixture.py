"""Whose turn it is: several corpora in one stream, with exact shares."""

from collections.abc import Sequence

import numpy as np

from bert_jax.errors import UserError

CYCLE = 10_000
"""Rows after which the turns repeat. In every cycle, counted from the start of the stream, each corpus has exactly
its share s, rounded to a ten-thousandth; in any n consecutive rows, wherever they begin, it has n s rows give or take
at most 1 + s (c - 2), where c is the number of corpora (1 for two of them); in the first n rows, half of that."""


def shares(sizes: Sequence[float] | np.ndarray, exponent: float) -> np.ndarray:
    """Share of each part, float64 [num_parts], proportional to its share of all sizes to the power of `exponent`.

    Below 1, small parts get more than their size says. Multilingual BERT took 0.7 for its languages
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


class Turns:
    """Which corpus each row of the stream comes from, the same in every cycle."""

    def __init__(self, wanted: Sequence[float] | np.ndarray):
        """Spreads the turns of each corpus evenly over a cycle.

        Args:
          wanted: share of each corpus; positive, summing to 1.

        Raises:
          UserError: a share that rounds to no row of a cycle.
        """
        counts = rounded(wanted)
        if (counts == 0).any():
            raise UserError(
                f"a corpus has a share of {min(wanted):.2g} of the mixture, which is rounded to 0 of {CYCLE:,} rows: "
                "give it more weight, or leave it out"
            )
        order = np.concatenate([np.full(count, corpus) for corpus, count in enumerate(counts)])
        # The j-th of n turns stands at (j + 1/2) / n of the cycle; at equal places the earlier corpus goes first.
        # So up to any place x each corpus has had n x turns give or take 1/2, from which the bound above follows:
        # an error is its own (at most 1/2) less s times the sum of all c, and a window is the difference of two.
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        self.order = order[np.argsort(places, kind="stable")]
        self.counts = counts

    def of(self, start: int, count: int) -> np.ndarray:
        """Corpus of each of `count` rows from row `start` of the stream on, int64 [count]."""
        return self.order[(start + np.arange(count)) % CYCLE]


def rounded(wanted: Sequence[float] | np.ndarray) -> np.ndarray:
    """Rows of a cycle that each corpus gets, int64 [num_corpora]: they sum to CYCLE, by largest remainders.

    Args:
      wanted: share of each corpus; positive, in proportion. Of equal remainders the earlier one is rounded up.
    """
    exact = np.asarray(wanted, np.float64) / np.sum(wanted) * CYCLE
    counts = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: CYCLE - counts.sum()]] += 1
    return counts
