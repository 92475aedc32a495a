"""Evaluation texts, of which no document of a corpus may hold a part."""

import collections
import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence

from bert_jax.errors import UserError
from data_prep.clean import clean
from data_prep.duplicates.ngram_index import LeakIndex
from data_prep.options import Options
from data_prep.sources.base import Document, Skipped, Source


@contextlib.contextmanager
def named_flag() -> Iterator[None]:
    """Errors of sources name the flag that their SPEC was given with: --leak-check."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--source", "--leak-check", 1)) from error


def leak_check(sources: Sequence[Source], options: Options) -> tuple[LeakIndex | None, dict | None]:
    """Reads evaluation texts, cleaned as documents are; the index, and what corpus.json says of it.

    Raises:
      UserError: nothing came out of a source, or no text is long enough.
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

    with named_flag():
        index = LeakIndex.build(texts(), options.leak_words)
    if not index.num_ngrams:
        raise UserError(
            f"--leak-check: none of the {index.num_texts} evaluation texts has {index.ngram_words} words;"
            " give longer texts, or fewer --leak-words"
        )
    if index.too_short:
        print(
            f"note: {index.too_short} of {index.num_texts} evaluation texts have fewer than {index.ngram_words} words"
            " and are not looked for; --leak-words would change that",
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
    documents, of_source, first = 0, collections.Counter(), None
    for part in source.inputs():
        for block in source.blocks(part, []):
            for item in source.documents(block):
                if isinstance(item, Document):
                    documents += 1
                    yield item.text
                elif isinstance(item, Skipped):
                    of_source[item.reason] += 1
                    first = first or item
    source.check(documents, of_source, first)
    skipped.update(of_source)
