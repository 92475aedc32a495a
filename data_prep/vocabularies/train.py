"""Trains a tokenizer on sources: reading, sampling, counting, and training."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bert_jax.data.mixture import smoothed_shares
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.for_each_input import Totals, for_each_input, report_skipped
from data_prep.sources.base import Source
from data_prep.vocabularies import wordpiece_bpe
from data_prep.vocabularies.counting import (
    MAX_WORDS,
    WEIGHT_SCALE,
    BertWordCounter,
    BoundedWordCounter,
    BoundedWordCounts,
    ByteWordCounter,
    MarkCounts,
    weighted_counts,
)
from data_prep.vocabularies.merges import MIN_COUNT

SENTENCEPIECE_SAMPLE_BYTES = 50_000_000
"""Default maximum size of SentencePiece's training text: unigram training takes 22 bytes of memory and 1.3 microseconds
per byte."""

_MANY_DELETED = 0.005
"""Share of letters and marks; in English it is below 0.05%, in German 1.5%."""

KINDS = ("wordpiece", "bpe", "byte-bpe", "sentencepiece-unigram", "sentencepiece-bpe")


@dataclasses.dataclass(frozen=True)
class VocabularySettings:
    """Kind and size of a vocabulary, and the text to train it on."""

    kind: str
    """one of `KINDS`"""
    vocab_size: int
    """number of pieces"""
    lowercase: bool
    """lower-case"""
    strip_accents: bool | None = None
    """for WordPiece and BPE; None: the value of `lowercase`"""
    score: str = "count"
    """for WordPiece: the order of merges, one of `merges.SCORES`"""
    max_characters: int | None = None
    """for WordPiece and BPE: number of different characters to keep; None: see `wordpiece_bpe.train_wordpiece`"""
    sampling_exponent: float = 1.0
    """the share of each source is proportional to its size to this power"""
    sample_bytes: int | None = None
    """maximum size of the cleaned text; None: all of it, or `SENTENCEPIECE_SAMPLE_BYTES` for SentencePiece"""


Report = Callable[[Sequence[Source], Sequence[Totals]], None]
"""Called with the totals of the sources when all of their text has been read."""


def train(
    settings: VocabularySettings, sources: Sequence[Source], workers: int, report: Report = report_skipped
) -> Tokenizer:
    """Trains a tokenizer; the result is deterministic and does not depend on `workers`.

    Args:
      settings: kind, size and sampling.
      sources: of the text; one per language, if a sampling exponent is given.
      workers: processes that read.
      report: on what was skipped.

    Raises:
      UserError: a source cannot be read or gives no text, or vocab_size is too small for the characters.
    """
    if settings.kind.startswith("sentencepiece"):
        return _train_on_text(settings, sources, workers, report)
    return _train_on_counts(settings, sources, workers, report)


def _train_on_counts(
    settings: VocabularySettings, sources: Sequence[Source], workers: int, report: Report
) -> Tokenizer:
    rates = None
    sizes = None
    if settings.sample_bytes is not None:
        sizes = _measure(sources, workers, report)
        rates = sampling_rates(sizes, smoothed_shares(sizes, settings.sampling_exponent), settings.sample_bytes)
    is_mixture = settings.sampling_exponent != 1 and len(sources) > 1
    limit = MAX_WORDS // len(sources) if is_mixture else MAX_WORDS
    tables = [BoundedWordCounts(limit) for _ in sources] if is_mixture else [BoundedWordCounts(limit)]
    strips, marks = settings.lowercase if settings.strip_accents is None else settings.strip_accents, MarkCounts()
    words = ByteWordCounter(settings.lowercase)
    if settings.kind != "byte-bpe":
        words = BertWordCounter(settings.lowercase, strips)

    def add(source: int, result: tuple[dict[str, int], MarkCounts]) -> None:
        tables[source if is_mixture else 0].add(result[0])
        marks.add(result[1])

    totals = for_each_input(sources, BoundedWordCounter(words, limit), add, workers, "counting words", rates=rates)
    if sizes is None:
        report(sources, totals)
    else:
        _note_empty_samples(sources, totals)
    if strips and marks.deleted > _MANY_DELETED * marks.characters:
        print(
            f"note: stripping accents deletes {marks.deleted / marks.characters:.1%} of the letters and marks of the"
            " text; --keep-accents keeps them",
            file=sys.stderr,
        )
    if not is_mixture:
        return _from_counts(settings, tables[0].counts, MIN_COUNT)
    sizes = _sizes(sources, totals) if sizes is None else sizes
    kept = np.maximum([total.kept_bytes for total in totals], 1)
    shares = smoothed_shares(sizes, settings.sampling_exponent)
    _print_shares(sources, shares)
    weights = shares / kept
    weights /= weights.min()
    return _from_counts(
        settings, weighted_counts([table.counts for table in tables], weights), MIN_COUNT * WEIGHT_SCALE
    )


def _from_counts(settings: VocabularySettings, counts: dict[str, int], min_count: int) -> Tokenizer:
    size, lowercase = settings.vocab_size, settings.lowercase
    if settings.kind == "byte-bpe":
        return wordpiece_bpe.train_byte_bpe(counts, size, lowercase, min_count=min_count)
    options = {
        "max_characters": settings.max_characters,
        "min_count": min_count,
        "strip_accents": settings.strip_accents,
    }
    if settings.kind == "bpe":
        return wordpiece_bpe.train_char_bpe(counts, size, lowercase, **options)
    return wordpiece_bpe.train_wordpiece(counts, size, lowercase, score=settings.score, **options)


def _train_on_text(settings: VocabularySettings, sources: Sequence[Source], workers: int, report: Report) -> Tokenizer:
    # Imported here because no other kind needs the library.
    from data_prep.vocabularies.sentencepiece_training import split_lines, train_sentencepiece

    sizes = _measure(sources, workers, report)
    shares = smoothed_shares(sizes, settings.sampling_exponent)
    if settings.sampling_exponent != 1 and len(sources) > 1:
        _print_shares(sources, shares)
    largest = float((sizes / shares).min())  # with these shares and without repeating text
    limit = min(settings.sample_bytes or SENTENCEPIECE_SAMPLE_BYTES, largest)
    lines: list[str] = []
    totals = for_each_input(
        sources,
        split_lines,
        lambda _, input_lines: lines.extend(input_lines),
        workers,
        "sampling text",
        rates=sampling_rates(sizes, shares, limit),
    )
    _note_empty_samples(sources, totals)
    model_type = settings.kind.removeprefix("sentencepiece-")
    return train_sentencepiece(lines, model_type, settings.vocab_size, settings.lowercase)


def _note_empty_samples(sources: Sequence[Source], totals: Sequence[Totals]) -> None:
    for source, total in zip(sources, totals, strict=True):
        if not total.kept_bytes:
            print(f"note: source {source.spec}: no line of it is in the sample; raise --sample-mb", file=sys.stderr)


def _print_shares(sources: Sequence[Source], shares: np.ndarray) -> None:
    parts = [f"{source.spec} {share:.1%}" for source, share in zip(sources, shares, strict=True)]
    print(f"shares of the text: {', '.join(parts)}", file=sys.stderr)


def _measure(sources: Sequence[Source], workers: int, report: Report) -> np.ndarray:
    totals = for_each_input(sources, _read_all, lambda *_: None, workers, "measuring text")
    report(sources, totals)
    return _sizes(sources, totals)


def _read_all(blocks: Iterable[list[str]]) -> None:
    """For measuring sizes only."""
    for _ in blocks:
        pass


def _sizes(sources: Sequence[Source], totals: Sequence[Totals]) -> np.ndarray:
    """UTF-8 bytes of cleaned text, int64 [num_sources]; none is 0."""
    for source, total in zip(sources, totals, strict=True):
        if not total.text_bytes:
            raise UserError(f"source {source.spec}: cleaning leaves no text of it; leave it out")
    return np.array([total.text_bytes for total in totals], np.int64)


def sampling_rates(sizes: Sequence[float] | np.ndarray, shares: np.ndarray, limit: float) -> np.ndarray:
    """Share of the lines of each source to sample, for a total size of `limit` with the given shares, float64 [n].

    If a source has too little text, all of it is used, and its share is smaller.

    Args:
      sizes: of the sources, positive.
      shares: of the sources in the sample, float64 [n].
      limit: total size of the sample, in the unit of the sizes.
    """
    return np.minimum(1.0, limit * shares / np.asarray(sizes, np.float64))
