"""Decontamination: an index of evaluation texts, to remove documents that overlap with them."""

import collections
import hashlib
import sys
from collections.abc import Iterator, Sequence

from bert_jax.errors import UserError
from data_prep.clean import clean
from data_prep.duplicates.ngram_index import NgramIndex
from data_prep.options import BuildOptions
from data_prep.sources.base import Document, InputRecord, Skipped, Source


def build_evaluation_index(sources: Sequence[Source], options: BuildOptions) -> tuple[NgramIndex | None, dict | None]:
    """Indexes evaluation texts, cleaned in the same way as documents.

    Returns:
      the index, and its description for corpus.json; None, None without sources.

    Raises:
      UserError: a source gives no text, or no text is long enough.
    """
    if not sources:
        return None, None
    skipped: collections.Counter[str] = collections.Counter()
    digest = hashlib.sha256()

    def texts() -> Iterator[str]:
        for source in sources:
            for text in _texts(source, skipped):
                cleaned = clean(text, options.cleaning)
                digest.update(cleaned.encode() + b"\0")
                yield cleaned

    index = NgramIndex.build(texts(), options.decontamination_words)
    if not index.num_ngrams:
        raise UserError(
            f"--decontaminate: none of the {index.num_texts} evaluation texts has {index.ngram_words} words;"
            " give longer texts, or fewer --decontamination-words"
        )
    if index.too_short:
        print(
            f"note: {index.too_short} of {index.num_texts} evaluation texts have fewer than {index.ngram_words} words"
            " and are ignored; lower --decontamination-words to include them",
            file=sys.stderr,
        )
    return index, {
        "sources": [source.spec for source in sources],
        "sha256": digest.hexdigest(),
        "texts": index.num_texts,
        "texts_too_short": index.too_short,
        "skipped": dict(skipped),
        "ngrams": index.num_ngrams,
    }


def _texts(source: Source, skipped: collections.Counter[str]) -> Iterator[str]:
    documents, source_skipped, first = 0, collections.Counter(), None
    for part in source.inputs():
        if part.hash_only:
            continue
        for block in source.blocks(part, InputRecord()):
            for item in source.documents(block):
                if isinstance(item, Document):
                    documents += 1
                    yield item.text
                elif isinstance(item, Skipped):
                    source_skipped[item.reason] += 1
                    first = first or item
    source.check_not_empty(documents, source_skipped, first)
    skipped.update(source_skipped)
