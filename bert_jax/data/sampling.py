"""Sampling within a corpus: how often each epoch has the documents of a source, a language or a score.

A document whose group has the largest weight is in every epoch. One with a share p of that weight is in every (1/p)-th
epoch, and which epochs these are is a hash of (seed, document): in any n epochs it is floor(n p) or ceil(n p) times.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.hash_random import make_key, uniform_of_indices
from bert_jax.data.manifest import GROUPS, REBUILD, GroupEntry, array_file
from bert_jax.data.shards import REMEDY
from bert_jax.errors import UserError, did_you_mean

SAMPLING_STREAM = 0x5A3
_FIELDS = ("source", "language")
_DOCUMENTS_AT_ONCE = 1 << 20
"""So that no large array is converted to 64 bits."""
_LEAST_DRAWN = 1e-4
"""Of all documents: a random segment is searched as many times as this is smaller, 0.2 microseconds each."""
_LEAST_SHARE = 1e-6
"""With smaller ones, the search for a document of the largest weight would take long."""


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentSampling:
    """Which documents are in which epoch."""

    shares: np.ndarray
    """of each group, the share of the epochs that have a document of it, float64 [num_groups]; the largest is 1"""
    groups: np.ndarray
    """index in `shares` of each document, uint16 [num_documents]"""
    key: np.uint64
    """hash of the seed"""
    num_tokens: float
    """of an epoch, on average"""

    def is_chosen(self, documents: np.ndarray, epoch: int) -> np.ndarray:
        """Whether each document, by index, is in an epoch, bool [n]."""
        shares = self.shares[self.groups[documents]]
        places = uniform_of_indices(self.key, documents)
        return np.floor((epoch + 1) * shares + places) > np.floor(epoch * shares + places)


def document_sampling(corpus: Corpus, data: DataConfig, seed: int) -> DocumentSampling | None:
    """How the documents of a corpus are sampled; None: every epoch has all of them.

    Raises:
      UserError: the corpus was built before groups were recorded, its groups contradict each other, weights differ too
        much, or too few documents have a positive one or are in an epoch.
    """
    if not data.samples_documents:
        return None
    shares = group_shares(corpus.groups, data, str(corpus.directory))
    if (shares == 1).all():
        return None
    counts = np.zeros(len(shares), np.int64)
    for start in range(0, corpus.num_documents, _DOCUMENTS_AT_ONCE):
        block = corpus.document_groups[start : start + _DOCUMENTS_AT_ONCE]
        if block.max() < len(shares):  # else the counts differ
            counts += np.bincount(block, minlength=len(shares))
    if counts.tolist() != [group["documents"] for group in corpus.groups]:
        raise UserError(
            f"corpus {corpus.directory}: {array_file(corpus.split, GROUPS)} contradicts corpus.json; {REMEDY}"
        )
    if data.paired and np.dot(counts, shares) < _LEAST_DRAWN * counts.sum():
        raise UserError(
            f"corpus {corpus.directory}: an epoch has {np.dot(counts, shares):,.0f} of {counts.sum():,} documents by "
            f"data.* weights, and {data.format} searches random segments among all, which takes too long below one in "
            "10,000: build a corpus of the documents that are wanted, or set --data.format doc_sentences and "
            "--objective.pair none"
        )
    if data.paired and np.dot(counts, shares > 0) < 2:
        raise UserError(
            f"corpus {corpus.directory}: split '{corpus.split}' has one document with a positive weight "
            f"but {data.format} needs at least 2, because random segments come from another document"
        )
    tokens = float(np.dot([group["tokens"] for group in corpus.groups], shares))
    return DocumentSampling(shares, np.asarray(corpus.document_groups), make_key(seed, SAMPLING_STREAM), tokens)


def group_shares(groups: Collection[GroupEntry], data: DataConfig, name: str) -> np.ndarray:
    """The weight of each group as a share of the largest one, float64 [num_groups].

    It is the product of the weights of its source, its language and its score. With `data.language_exponent`, that of a
    language is also its share of the tokens to the power of (exponent - 1).

    Args:
      groups: of a corpus.
      data: with the weights.
      name: of the corpus, for messages.

    Raises:
      UserError: see `document_sampling`.
    """
    if not groups:
        raise UserError(
            f"corpus {name} was built before sources, languages and scores of documents were recorded, by which data.* "
            f"weights sample: {REBUILD}"
        )
    weights = np.ones(len(groups))
    for field in _FIELDS:
        chosen = dict(getattr(data, f"{field}_weights"))
        weights *= [chosen.get(group[field], 1.0) for group in groups]
    if data.score_weights:
        weights *= [_score_weight(group["score"], dict(data.score_weights)) for group in groups]
    tokens: dict[str, int] = {}
    for group in groups:
        tokens[group["language"]] = tokens.get(group["language"], 0) + group["tokens"]
    total = sum(tokens.values())
    weights *= [(tokens[group["language"]] / total) ** (data.language_exponent - 1) for group in groups]
    if not weights.max() > 0:
        raise UserError(
            f"corpus {name}: no document has a positive weight by data.source_weights, data.language_weights and "
            "data.score_weights: give one to some of its documents"
        )
    shares = weights / weights.max()
    if (least := min(shares[shares > 0])) < _LEAST_SHARE:
        rarest, most = (groups[index] for index in (shares.tolist().index(least), shares.argmax()))
        raise UserError(
            f"corpus {name}: by data.* weights, documents of {_described(most)} are {1 / least:.2g} times as frequent "
            f"as those of {_described(rarest)}, and at most a million times is possible: use a larger "
            "language_exponent or other weights"
        )
    return shares


def _described(group: GroupEntry) -> str:
    score = "" if group["score"] is None else f", score {group['score']:g}"
    return f"{group['source']} ({group['language']}{score})"


def _score_weight(score: float | None, weights: Mapping[float, float]) -> float:
    """The weight of the largest bound that is not above the score; 0 without one."""
    bound = max((bound for bound in weights if score is not None and bound <= score), default=None)
    return 0.0 if bound is None else weights[bound]


def check_weights(corpora: Iterable[Corpus], data: DataConfig) -> None:
    """Checks that the weights name sources, languages and scores of the corpora.

    Raises:
      UserError: a name that no corpus has, or weights by score of corpora without scores.
    """
    if not data.samples_documents:
        return
    groups = [group for corpus in corpora for group in corpus.groups]
    if not groups:
        return
    for field in _FIELDS:
        known = sorted({str(group[field]) for group in groups})
        for name, _ in getattr(data, f"{field}_weights"):
            if name not in known:
                hint = did_you_mean(name, known) or f"there are: {', '.join(known[:20])}"
                raise UserError(f"data.{field}_weights: no document has the {field} '{name}', {hint}")
    if data.score_weights and all(group["score"] is None for group in groups):
        raise UserError("data.score_weights: no document has a score: build the corpus with --score @FIELD")
