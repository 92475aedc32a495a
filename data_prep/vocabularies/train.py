"""Trains a tokenizer on sources, from reading to the finished vocabulary."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bert_jax.data.mixture import smoothed_shares
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.sources.base import Source
from data_prep.vocabularies import wordpiece_bpe
from data_prep.vocabularies.counting import (
    MAX_WORDS,
    WEIGHT_SCALE,
    BertWordCounter,
    ByteWordCounter,
    WordCounts,
    weighted_counts,
)
from data_prep.vocabularies.map_blocks import SourceTotals, map_blocks
from data_prep.vocabularies.merges import MIN_COUNT
from data_prep.vocabularies.sampling_rates import largest_sample, sampling_rates

SENTENCEPIECE_SAMPLE_BYTES = 50_000_000
"""What SentencePiece is trained on at most, unless more is asked for: unigram training takes 22 bytes of memory and
1.3 microseconds for each byte."""

KINDS = ("wordpiece", "bpe", "byte-bpe", "sentencepiece-unigram", "sentencepiece-bpe")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What kind of vocabulary to make, of how much of the text."""

    kind: str
    """one of `KINDS`"""
    vocab_size: int
    """number of pieces"""
    lowercase: bool
    """lower-case; WordPiece and BPE also strip accents"""
    score: str = "count"
    """for WordPiece: which pairs to join, one of `merges.SCORES`"""
    max_characters: int = wordpiece_bpe.MAX_CHARACTERS
    """for WordPiece and BPE: how many different characters are kept"""
    sampling_exponent: float = 1.0
    """the share of each source is its size to this power"""
    sample_bytes: int | None = None
    """how much cleaned text to use at most; None for all of it, and for `SENTENCEPIECE_SAMPLE_BYTES` of it"""


def train(recipe: Recipe, sources: Sequence[Source], workers: int) -> Tokenizer:
    """Trains a tokenizer; the result depends neither on time nor on `workers`.

    Args:
      recipe: what to make.
      sources: where the text comes from; each is one language, if a sampling exponent is given.
      workers: processes that read.

    Raises:
      UserError: a source cannot be read or gives no text, or a vocab_size that cannot hold the characters.
    """
    if recipe.kind.startswith("sentencepiece"):
        return _train_on_text(recipe, sources, workers)
    return _train_on_counts(recipe, sources, workers)


def _train_on_counts(recipe: Recipe, sources: Sequence[Source], workers: int) -> Tokenizer:
    rates = None
    sizes = None
    if recipe.sample_bytes is not None:
        sizes = _measure(sources, workers)
        rates = sampling_rates(sizes, smoothed_shares(sizes, recipe.sampling_exponent), recipe.sample_bytes)
    mixes = recipe.sampling_exponent != 1 and len(sources) > 1
    tables = [WordCounts(MAX_WORDS // len(sources)) for _ in sources] if mixes else [WordCounts()]
    words = (ByteWordCounter if recipe.kind == "byte-bpe" else BertWordCounter)(recipe.lowercase)

    def add(source: int, counts: dict[str, int]) -> None:
        tables[source if mixes else 0].add(counts)

    totals = map_blocks(sources, words, add, workers, "counting words", rates)
    if sizes is None:
        _report(sources, totals)
    if not mixes:
        return _from_counts(recipe, tables[0].counts, MIN_COUNT)
    sizes = _sizes(sources, totals) if sizes is None else sizes
    kept = np.maximum([total.kept_bytes for total in totals], 1)
    weights = smoothed_shares(sizes, recipe.sampling_exponent) / kept
    weights /= weights.min()
    return _from_counts(recipe, weighted_counts([table.counts for table in tables], weights), MIN_COUNT * WEIGHT_SCALE)


def _from_counts(recipe: Recipe, counts: dict[str, int], min_count: int) -> Tokenizer:
    size, lowercase = recipe.vocab_size, recipe.lowercase
    if recipe.kind == "byte-bpe":
        return wordpiece_bpe.train_byte_bpe(counts, size, lowercase, min_count=min_count)
    options = {"max_characters": recipe.max_characters, "min_count": min_count}
    if recipe.kind == "bpe":
        return wordpiece_bpe.train_bpe(counts, size, lowercase, **options)
    return wordpiece_bpe.train_wordpiece(counts, size, lowercase, score=recipe.score, **options)


def _train_on_text(recipe: Recipe, sources: Sequence[Source], workers: int) -> Tokenizer:
    # Imported here: no other kind needs the library.
    from data_prep.vocabularies.sentencepiece_training import LineSplitter, train_sentencepiece

    sizes = _measure(sources, workers)
    wanted = smoothed_shares(sizes, recipe.sampling_exponent)
    limit = min(recipe.sample_bytes or SENTENCEPIECE_SAMPLE_BYTES, largest_sample(sizes, wanted))
    lines: list[str] = []
    map_blocks(
        sources,
        LineSplitter(),
        lambda _, found: lines.extend(found),
        workers,
        "sampling text",
        sampling_rates(sizes, wanted, limit),
    )
    model_type = recipe.kind.removeprefix("sentencepiece-")
    return train_sentencepiece(lines, model_type, recipe.vocab_size, recipe.lowercase)


def _measure(sources: Sequence[Source], workers: int) -> np.ndarray:
    totals = map_blocks(sources, _nothing, lambda *_: None, workers, "measuring text")
    _report(sources, totals)
    return _sizes(sources, totals)


def _nothing(texts: list[str]) -> None:
    """All that is wanted is the size."""


def _report(sources: Sequence[Source], totals: Sequence[SourceTotals]) -> None:
    for source, total in zip(sources, totals, strict=True):
        total.report(source)


def _sizes(sources: Sequence[Source], totals: Sequence[SourceTotals]) -> np.ndarray:
    """UTF-8 bytes of cleaned text, int64 [num_sources], none of them 0."""
    for source, total in zip(sources, totals, strict=True):
        if not total.text_bytes:
            raise UserError(f"--source {source.spec}: cleaning leaves no text of it; leave it out")
    return np.array([total.text_bytes for total in totals], np.int64)
