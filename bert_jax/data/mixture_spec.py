"""The corpora of a run as a user names them: which directories, and how much of each."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bert_jax.data.corpus import TOKENIZER, Corpus
from bert_jax.data.mixture import shares
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, check_reachable, to_path
from bert_jax.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """One corpus of a mixture."""

    directory: StoredPath
    """Where it lies."""
    weight: float | None = None
    """Rows of it per row of a corpus with weight 1; None leaves it to the corpora's sizes."""


def parse(text: str) -> Part:
    """What ``--corpus DIR`` or ``--corpus DIR=WEIGHT`` says; a path that exists as it is written has no weight.

    Raises:
      UserError: the weight is no positive, finite number, or the store of the path cannot be asked.
    """
    directory, equals, weight = text.rpartition("=")
    if equals:
        check_reachable(to_path(text))
    if not equals or to_path(text).exists():
        return Part(to_path(text), None)
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not directory or not 0 < value < math.inf:
        raise UserError(
            f"--corpus {text}: there is no such directory, and '{weight}' is not a weight: write a positive number "
            "after the '=', as in --corpus books=0.3"
        )
    return Part(to_path(directory), value)


def opened(parts: Sequence[Part], split: str = "train") -> tuple[list[Part], list[Corpus]]:
    """The parts and one split of each, in the order of `Corpus.identity`: the order of flags decides nothing.

    Raises:
      UserError: no part, one that cannot be opened, the same corpus twice, or two of one name: metrics are named
        by it.
    """
    if not parts:
        raise UserError("no corpus is given: add --corpus DIR, a directory that `bert-data build` made")
    found = sorted(((part, Corpus.open(part.directory, split)) for part in parts), key=lambda one: one[1].identity)
    for (_, other), (_, corpus) in itertools.pairwise(found):
        if other.identity == corpus.identity:
            both = f"{other.directory} and {corpus.directory} are the same corpus"
            if other.directory == corpus.directory:
                both = f"corpus {corpus.directory} is given twice"
            raise UserError(f"{both}: name it once, with the weight of both")
    names: dict[str, Corpus] = {}
    for _, corpus in found:
        other = names.setdefault(corpus.name, corpus)
        if other is not corpus:
            raise UserError(
                f"corpora {other.directory} and {corpus.directory} are both named '{corpus.name}', and metrics are "
                "named by corpus: build one of them again with another --name"
            )
    return [part for part, _ in found], [corpus for _, corpus in found]


def common_tokenizer(corpora: Sequence[Corpus], embeddings: int) -> Tokenizer:
    """The one tokenizer of all corpora, for a model with so many embeddings.

    Raises:
      UserError: a corpus's tokenizer.json is not what it was built with, two were built with different ones, or
        it has more ids than the model has embeddings.
    """
    for corpus in corpora:
        file = corpus.directory / TOKENIZER
        found = Tokenizer.load(file)
        if found.fingerprint != corpus.tokenizer_fingerprint:
            raise UserError(
                f"{file} is not the tokenizer that the corpus was built with: its ids would mean other words; copy the "
                "corpus again or rebuild it"
            )
        if corpus.tokenizer_fingerprint != corpora[0].tokenizer_fingerprint:
            raise UserError(
                f"corpora {corpora[0].directory} and {corpus.directory} were built with different tokenizers: build "
                f"one again with --tokenizer {corpora[0].directory / TOKENIZER}"
            )
    if found.vocab_size > embeddings:
        raise UserError(
            f"corpus {corpora[0].directory} has token ids up to {found.vocab_size - 1}, but model.vocab_size is "
            f"{embeddings}: set --model.vocab-size {found.vocab_size}"
        )
    return found


def vocab_size(parts: Sequence[Part]) -> int:
    """Token ids of the corpora, which have one tokenizer (`common_tokenizer` sees to it).

    Raises:
      UserError: see `opened`.
    """
    return max(corpus.vocab_size for corpus in opened(parts)[1])


def resolve(parts: Sequence[Part], tokens: Sequence[int], exponent: float) -> list[float]:
    """Share of each part in the rows of the stream; they sum to 1.

    Args:
      parts: all with a weight, or none.
      tokens: of each part; they count where there are no weights.
      exponent: of each part's share of all tokens, see `mixture.shares`.

    Raises:
      UserError: only some of the parts have a weight.
    """
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        return shares(tokens, exponent).tolist()
    if len(weights) < len(parts):
        bare = next(part for part in parts if part.weight is None)
        raise UserError(
            f"--corpus {bare.directory} has no weight, but another corpus has one: give all of them a weight "
            f"(--corpus {bare.directory}=1), or none"
        )
    return shares([weight / max(weights) for weight in weights], 1.0).tolist()
