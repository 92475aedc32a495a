"""Decontamination: an index of evaluation texts, to remove documents that overlap with them."""

import collections
import dataclasses
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence

from bert_jax.errors import UserError
from data_prep.build_options import BuildOptions
from data_prep.duplicates.ngram_index import NgramIndex
from data_prep.for_each_input import for_each_input
from data_prep.sources.base import DamagedFileError, Source


def build_evaluation_index(
    sources: Sequence[Source], options: BuildOptions, workers: int
) -> tuple[NgramIndex | None, dict | None]:
    """Indexes evaluation texts, cleaned in the same way as documents.

    Args:
      sources: of the texts.
      options: of the build.
      workers: processes that read; the result does not depend on it.

    Returns:
      the index, and its description for corpus.json; None, None without sources.

    Raises:
      UserError: a source gives no text, or no text is long enough.
    """
    if not sources:
        return None, None
    words, digest = options.decontamination_words, hashlib.sha256()
    indexes: list[NgramIndex] = []

    def add(_: int, result: tuple[NgramIndex, bytes]) -> None:
        indexes.append(result[0])
        digest.update(result[1])

    read = _IndexInput(words)
    try:
        totals = for_each_input(sources, read, add, workers, "reading evaluation texts", cleaning=options.cleaning)
    except DamagedFileError as error:  # `--skip-damaged` would leave out some of what to look for
        raise UserError(f"--decontaminate: {error}") from error
    for source, total in zip(sources, totals, strict=True):
        source.check_not_empty(total.documents, total.skipped, total.first)
    index = NgramIndex.merge(indexes, words)
    if not len(index.ngrams):
        raise UserError(
            f"--decontaminate: none of the {index.num_texts} evaluation texts has {words} words;"
            " give longer texts, or fewer --decontamination-words"
        )
    if index.too_short:
        print(
            f"note: {index.too_short} of {index.num_texts} evaluation texts have fewer than {words} words"
            " and are ignored; lower --decontamination-words to include them",
            file=sys.stderr,
        )
    return index, {
        "sources": [source.spec for source in sources],
        "sha256": digest.hexdigest(),
        "texts": index.num_texts,
        "texts_too_short": index.too_short,
        "skipped": dict(sum((total.skipped for total in totals), collections.Counter())),
        "ngrams": len(index.ngrams),
    }


@dataclasses.dataclass(frozen=True)
class _IndexInput:
    """The index of an input, and its texts, each followed by a NUL byte, for the digest."""

    words: int

    def __call__(self, blocks: Iterable[list[str]]) -> tuple[NgramIndex, bytes]:
        contents = bytearray()

        def texts() -> Iterator[str]:
            for block in blocks:
                for text in block:
                    contents.extend(text.encode() + b"\0")
                    yield text

        return NgramIndex.build(texts(), self.words), bytes(contents)
