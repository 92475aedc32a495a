"""Mixtures of corpora: the directories and weights that a user gives, and which corpus each row comes from."""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.config import Config, Phase
from bert_jax.data.corpus import Corpus
from bert_jax.data.manifest import TOKENIZER, read_manifest, stored_files
from bert_jax.errors import UserError, require
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.paths import StoredPath, check_reachable, is_remote, to_path
from bert_jax.tokenizers.tokenizer import Tokenizer

CYCLE_ROWS = 10_000
"""Rows after which the order of corpora repeats. In every cycle, counted from the start of the stream, each corpus has
exactly its share s, rounded to a ten-thousandth. In any n consecutive rows it has n s rows plus or minus at most
1 + s (c - 2), where c is the number of corpora (1 for two of them); in the first n rows, half of that."""

NO_CORPUS = "no corpus is given: add --corpus DIR, a directory that `bert-data build` made"


@dataclass(frozen=True)
class CorpusWeight:
    """One corpus of a mixture."""

    directory: StoredPath
    """Of the corpus."""
    weight: float | None = None
    """Rows of it per row of a corpus with weight 1; None: weights follow from the sizes of the corpora."""


def parse_corpus_weight(text: str, flag: str = "--corpus") -> CorpusWeight:
    """Parses the value of a flag, ``DIR`` or ``DIR=WEIGHT``. If the whole text is an existing path, it has no weight.

    Raises:
      UserError: the weight is not a positive, finite number, or the store of the path cannot be reached.
    """
    directory, equals, weight = text.rpartition("=")
    if equals:
        check_reachable(to_path(text))
    if not equals or to_path(text).exists():
        return CorpusWeight(to_path(text), None)
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not directory or not 0 < value < math.inf:
        raise UserError(
            f"{flag} {text}: there is no such directory, and '{weight}' is not a weight: write a positive number "
            f"after the '=', as in {flag} books=0.3"
        )
    return CorpusWeight(to_path(directory), value)


def open_corpora(
    mixture: Sequence[CorpusWeight], split: str = "train", cache: LocalCache | None = None
) -> tuple[list[CorpusWeight], list[Corpus]]:
    """Opens one split of each corpus. Both lists are sorted by `Corpus.identity`: the order of flags has no effect.

    Args:
      mixture: the corpora.
      split: see `Corpus.open`.
      cache: of copies from stores, which all corpora share; None: the default one.

    Raises:
      UserError: no corpus, one that cannot be opened, the same corpus twice, two with one name (metrics are named by
        corpus), or a cache that is too small for them.
    """
    cache = cache or LocalCache()
    require(bool(mixture), NO_CORPUS)
    check_cache_limit([entry.directory for entry in mixture], cache)
    pairs = sorted(
        ((entry, Corpus.open(entry.directory, split, cache)) for entry in mixture), key=lambda pair: pair[1].identity
    )
    for (_, other), (_, corpus) in itertools.pairwise(pairs):
        if other.identity == corpus.identity:
            raise UserError(
                f"{other.directory} and {corpus.directory} are the same corpus: name it once, with the weight of both"
            )
    names: dict[str, Corpus] = {}
    for _, corpus in pairs:
        other = names.setdefault(corpus.name, corpus)
        if other is not corpus:
            raise UserError(
                f"corpora {other.directory} and {corpus.directory} are both named '{corpus.name}', and metrics are "
                "named by corpus: build one of them again with another --name"
            )
    return [entry for entry, _ in pairs], [corpus for _, corpus in pairs]


def check_cache_limit(directories: Sequence[StoredPath], cache: LocalCache) -> None:
    """Checks that a cache can hold what is in use at the same time: all length arrays, and one shard.

    Args:
      directories: of the corpora; those on disks need no copies.
      cache: that they share.

    Raises:
      UserError: its limit is too small, or a corpus cannot be opened.
    """
    if cache.limit_gb is None:
        return
    arrays, shard = 0, 0
    for directory in directories:
        if is_remote(directory):
            files = stored_files(directory, read_manifest(directory)).values()
            arrays += sum(file.size for file in files if file.path.suffix == ".npy")
            shard = max(shard, *(file.size for file in files if file.records is not None))
    if cache.limit_gb * 1e9 < arrays + shard:
        raise UserError(
            f"data.cache_limit_gb is {cache.limit_gb:g}, but the corpora have {_gigabytes(arrays)} GB of length "
            f"arrays, which are always in use, and shards of up to {_gigabytes(shard)} GB: set it to at least "
            f"{_gigabytes(arrays + shard)}"
        )


def _gigabytes(count: int) -> str:
    """Bytes as 10^9 bytes, rounded up to three digits."""
    digits = max(0, len(str(count)) - 3)
    return f"{math.ceil(count / 10**digits) * 10**digits / 1e9:.12g}"


def common_tokenizer(corpora: Sequence[Corpus], num_embeddings: int) -> Tokenizer:
    """Loads the tokenizer that all corpora share, for a model with `num_embeddings` token embeddings.

    Raises:
      UserError: a corpus's tokenizer.json is not the one it was built with, the corpora have different tokenizers, or
        the vocabulary has more ids than the model has embeddings.
    """
    for corpus in corpora:
        file = corpus.directory / TOKENIZER
        tokenizer = Tokenizer.load(file)
        if tokenizer.fingerprint != corpus.tokenizer_fingerprint:
            raise UserError(
                f"{file} is not the tokenizer that the corpus was built with: its ids would mean other words; copy the "
                "corpus again or rebuild it"
            )
        if corpus.tokenizer_fingerprint != corpora[0].tokenizer_fingerprint:
            raise UserError(
                f"corpora {corpora[0].directory} and {corpus.directory} were built with different tokenizers: build "
                f"one again with --tokenizer {corpora[0].directory / TOKENIZER}"
            )
    if tokenizer.vocab_size > num_embeddings:
        raise UserError(
            f"corpus {corpora[0].directory} has token ids up to {tokenizer.vocab_size - 1}, but model.vocab_size is "
            f"{num_embeddings}: set --model.vocab-size {tokenizer.vocab_size}"
        )
    return tokenizer


def vocab_size(mixture: Sequence[CorpusWeight]) -> int:
    """Vocabulary size of the corpora, which share one tokenizer (`common_tokenizer` checks that).

    Raises:
      UserError: see `read_manifest`.
    """
    require(bool(mixture), NO_CORPUS)
    return max(read_manifest(entry.directory)["vocab_size"] for entry in mixture)


def resolve_shares(mixture: Sequence[CorpusWeight], tokens: Sequence[int], exponent: float) -> list[float]:
    """Share of each corpus in the rows of the stream; the shares sum to 1.

    Args:
      mixture: corpora that all have a weight, or none of them.
      tokens: of each corpus; used if there are no weights.
      exponent: of each corpus's share of all tokens, see `smoothed_shares`.

    Raises:
      UserError: only some of the corpora have a weight.
    """
    weights = [entry.weight for entry in mixture if entry.weight is not None]
    if not weights:
        return smoothed_shares(tokens, exponent).tolist()
    if len(weights) < len(mixture):
        bare = next(entry for entry in mixture if entry.weight is None)
        raise UserError(
            f"--corpus {bare.directory} has no weight, but another corpus has one: give all of them a weight "
            f"(--corpus {bare.directory}=1), or none"
        )
    # However small a weight is beside the largest, its share is not 0, so that `MixtureOrder` refuses it.
    return smoothed_shares([max(weight / max(weights), sys.float_info.min) for weight in weights], 1.0).tolist()


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
          shares: of each corpus; not negative, summing to 1.

        Raises:
          UserError: a positive share that rounds to no row of a cycle.
        """
        counts = rows_per_cycle(shares)
        if lost := [share for share, count in zip(shares, counts, strict=True) if share > 0 and count == 0]:
            raise UserError(
                f"a corpus has a share of {min(lost):.2g} of the mixture, which is rounded to 0 of {CYCLE_ROWS:,} "
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


def order_by_phase(config: Config, names: Sequence[str], shares: Sequence[float]) -> list[MixtureOrder]:
    """The order in each phase of a run.

    Args:
      config: of the run.
      names: of the corpora.
      shares: of the corpora in phases without `corpus_weights`; positive, summing to 1.

    Raises:
      UserError: a phase has weights for other corpora, or a share rounds to no row of a cycle.
    """
    return [MixtureOrder(_shares_in_phase(phase, i, names, shares)) for i, phase in enumerate(config.phases)]


def _shares_in_phase(phase: Phase, index: int, names: Sequence[str], shares: Sequence[float]) -> Sequence[float]:
    weights = dict(phase.corpus_weights)
    if not weights:
        return shares
    if unknown := weights.keys() - set(names):
        raise UserError(
            f"phases.{index}.corpus_weights: there is no corpus '{min(unknown)}'; the corpora are {', '.join(names)}"
        )
    if missing := set(names) - weights.keys():
        raise UserError(
            f"phases.{index}.corpus_weights has no weight for corpus '{min(missing)}': add it, with weight 0 for none "
            "of its rows"
        )
    return [weights[name] / sum(weights.values()) for name in names]


def rows_per_cycle(shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """Rows of a cycle that each corpus gets, int64 [num_corpora]: they sum to CYCLE_ROWS, by largest remainders.

    Args:
      shares: of each corpus; not negative, in proportion. Of equal remainders the earlier one is rounded up.
    """
    exact = np.asarray(shares, np.float64) / np.sum(shares) * CYCLE_ROWS
    counts = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: CYCLE_ROWS - counts.sum()]] += 1
    return counts
