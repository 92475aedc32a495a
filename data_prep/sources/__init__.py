"""Sources of text: a SPEC such as `text:books/*.txt` specifies files and their format.

`parse` turns a SPEC into a source; base.py defines the interface of sources.
"""

import difflib
import re
from collections.abc import Callable

from bert_jax.errors import UserError
from data_prep.sources.base import BLOCK_BYTES, Block, Document, Input, Skipped, Source
from data_prep.sources.jsonl import JsonLinesSource
from data_prep.sources.markdown import MarkdownSource
from data_prep.sources.mediawiki import MediaWikiSource
from data_prep.sources.parquet import ParquetSource
from data_prep.sources.python_docs import PythonDocsSource
from data_prep.sources.reference import ReferenceSource
from data_prep.sources.text_files import TextSource, WholeFileSource
from data_prep.sources.wikiextractor import WikiExtractorSource

_KIND = re.compile(r"[a-z][a-z-]*")
# A slice of a split may contain a colon: train[:10%].
_TFDS = re.compile(r"(?P<name>.+):(?P<split>[^:@\[\]]+(?:\[[^\[\]]*\])?)@(?P<field>[^@]+)")

__all__ = ["BLOCK_BYTES", "KINDS", "KINDS_HELP", "Block", "Document", "Input", "Skipped", "Source", "parse"]


def parse(spec: str, workers: int = 1) -> Source:
    """The source of a SPEC; docs/corpus.md describes the kinds.

    Args:
      spec: `KIND:GLOB`, `KIND:GLOB@FIELD`, `tfds:NAME[/CONFIG]:SPLIT@FIELD`, `python-docs` or
        `reference`.
      workers: processes that `python-docs` may use.

    Raises:
      UserError: the kind is unknown, or a part of the SPEC is missing.
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        if not _KIND.fullmatch(kind) or rest.startswith("//"):
            raise UserError(f"--source {spec}: say how to read it, e.g. `text-files:{spec}`. Kinds: {', '.join(KINDS)}")
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise UserError(f"--source {spec}: unknown kind {kind!r}{hint} Kinds: {', '.join(KINDS)}")
    if kind in ("python-docs", "reference") and rest:
        raise UserError(f"--source {spec}: {kind} takes no glob; write just `{kind}`")
    if kind == "python-docs":
        return PythonDocsSource(spec, workers)
    if kind == "reference":
        return ReferenceSource(spec)
    return KINDS[kind](spec, rest)


def _glob(spec: str, pattern: str) -> str:
    if not pattern:
        raise UserError(f"--source {spec}: say which files, e.g. `{spec.partition(':')[0]}:texts/*.txt`")
    return pattern


def _with_field(source: Callable[..., Source]) -> Callable[[str, str], Source]:
    def make(spec: str, rest: str) -> Source:
        pattern, _, field = rest.rpartition("@")
        if not pattern or not field:
            kind = spec.partition(":")[0]
            example = _glob(spec, rest).rstrip("@")
            raise UserError(f"--source {spec}: say which field holds the text, e.g. `{kind}:{example}@text`")
        return source(spec, pattern, field=field)

    return make


def _markdown(spec: str, rest: str) -> Source:
    pattern, at, level = rest.rpartition("@")
    if not at or "/" in level or "." in level:
        return MarkdownSource(spec, _glob(spec, rest))
    if level not in tuple("123456"):
        raise UserError(f"--source {spec}: after the @, give the level of a heading, 1 to 6, e.g. `markdown:*.md@2`")
    return MarkdownSource(spec, _glob(spec, pattern), level=int(level))


def _tfds(spec: str, rest: str) -> Source:
    from data_prep.sources.tensorflow_dataset import TfdsSource  # TFDS takes a second to import

    match = _TFDS.fullmatch(rest)
    if not match:
        raise UserError(f"--source {spec}: write tfds:NAME:SPLIT@FIELD, e.g. `tfds:lm1b:train@text`")
    return TfdsSource(spec, match["name"], match["split"], match["field"])


KINDS: dict[str, Callable[..., Source]] = {
    "text": lambda spec, rest: TextSource(spec, _glob(spec, rest)),
    "text-files": lambda spec, rest: WholeFileSource(spec, _glob(spec, rest)),
    "lines": lambda spec, rest: TextSource(spec, _glob(spec, rest), sentence_per_line=True),
    "markdown": _markdown,
    "jsonl": _with_field(JsonLinesSource),
    "parquet": _with_field(ParquetSource),
    "wikiextractor": lambda spec, rest: WikiExtractorSource(spec, _glob(spec, rest)),
    "mediawiki": lambda spec, rest: MediaWikiSource(spec, _glob(spec, rest)),
    "tfds": _tfds,
    "python-docs": PythonDocsSource,
    "reference": ReferenceSource,
}

KINDS_HELP = (
    "What to read: text:GLOB (a blank line between documents), text-files:GLOB (a file is a"
    " document), lines:GLOB (one sentence on each line, a blank line between documents), markdown:GLOB[@LEVEL],"
    " jsonl:GLOB@FIELD, parquet:GLOB@FIELD, wikiextractor:GLOB, mediawiki:GLOB, tfds:NAME[/CONFIG]:SPLIT@FIELD,"
    " python-docs (the documentation installed with Python), or reference (the text of the reference curves); files may"
    " be compressed (.gz, .bz2, .zst)."
)
"""Help text of `--source`."""
