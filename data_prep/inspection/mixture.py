"""Sampling weights for training on several corpora."""

import dataclasses
from collections.abc import Sequence

from bert_jax.data.mixture import smoothed_shares
from data_prep.inspection.statistics import CorpusStatistics


@dataclasses.dataclass(frozen=True)
class MixtureShare:
    """One corpus of a mixture."""

    directory: str
    tokens: int
    """of its train split"""
    share: float
    """of the tokens of all corpora"""
    weight: float
    """share of the rows to read from it"""

    @property
    def repeats(self) -> float:
        """Epochs of this corpus while as many tokens are read as all corpora have together."""
        return self.weight / self.share


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Weights for `bert-jax pretrain --corpus DIR=WEIGHT`."""

    exponent: float
    parts: tuple[MixtureShare, ...]
    one_tokenizer: bool
    """whether all corpora were made with the same tokenizer; otherwise they cannot be mixed"""


def weight_corpora(corpora: Sequence[CorpusStatistics], exponent: float) -> Mixture:
    """Weights q_i ~ p_i^exponent, where p_i is the share of corpus i in all tokens.

    With an exponent below 1, small corpora are read more often than by size; multilingual BERT used 0.7.
    """
    tokens = [corpus.train_tokens for corpus in corpora]
    weights = smoothed_shares(tokens, exponent).tolist()
    parts = [
        MixtureShare(corpus.directory, size, size / sum(tokens), weight)
        for corpus, size, weight in zip(corpora, tokens, weights, strict=True)
    ]
    fingerprints = {corpus.manifest["tokenizer"]["fingerprint"] for corpus in corpora}
    return Mixture(exponent, tuple(parts), len(fingerprints) == 1)
