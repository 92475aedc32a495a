"""Sources of text: a SPEC such as `text:books/*.txt` specifies files and their format.

`parse` turns a SPEC into a source; base.py defines the interface of sources. A source is a class in a file of this
package, and a line in `_KINDS`.
"""

import dataclasses
import difflib
import importlib
import re

from bert_jax.errors import UserError, short_repr
from data_prep import languages, licenses
from data_prep.sources import encodings
from data_prep.sources.base import (
    BLOCK_BYTES,
    RANGE_BYTES,
    Document,
    Input,
    InputRecord,
    Skipped,
    Source,
    SourceBlock,
    field_name,
)

__all__ = [
    "BLOCK_BYTES",
    "KINDS",
    "KINDS_HELP",
    "RANGE_BYTES",
    "Document",
    "Input",
    "InputRecord",
    "Skipped",
    "Source",
    "SourceBlock",
    "parse",
]

_KINDS = {
    "text": ("text_files.TextSource", "text:GLOB (a blank line between documents)"),
    "text-files": ("text_files.WholeFileSource", "text-files:GLOB (a file is a document)"),
    "lines": (
        "text_files.SentencePerLineSource",
        "lines:GLOB (one sentence on each line, a blank line between documents)",
    ),
    "markdown": ("markdown.MarkdownSource", "markdown:GLOB[@LEVEL]"),
    "jsonl": ("jsonl.JsonLinesSource", "jsonl:GLOB@FIELD"),
    "parquet": ("parquet.ParquetSource", "parquet:GLOB@FIELD"),
    "wikiextractor": ("wikiextractor.WikiExtractorSource", "wikiextractor:GLOB"),
    "mediawiki": ("mediawiki.MediaWikiSource", "mediawiki:GLOB"),
    "tfds": ("tensorflow_dataset.TfdsSource", "tfds:NAME[/CONFIG]:SPLIT@FIELD"),
    "html": ("html.HtmlSource", "html:GLOB (a page is a document)"),
    "warc": ("warc.WarcSource", "warc:GLOB (web archives, and WET files)"),
    "hub": ("hub_folder.HubSplit", "hub:FOLDER[:CONFIG[:SPLIT]]@FIELD (of the Hugging Face Hub)"),
    "python-docs": ("python_docs.PythonDocsSource", "python-docs (the documentation installed with Python)"),
    "reference": ("synthetic_language.SyntheticSource", "reference (the text of the reference curves)"),
}
"""The class of each kind, in a module that is imported when it is needed (TFDS takes a second), and its SPEC."""

KINDS = tuple(_KINDS)
NO_SCORE = "none"
"""The setting of a source without scores, beside others that have them."""
KINDS_HELP = (
    f"What to read: {', '.join(usage for _, usage in _KINDS.values())}; files may be compressed (.gz, .bz2, .zst)."
)
"""Help text of `--source`."""


def parse(
    spec: str,
    workers: int = 1,
    language: str = languages.DEFAULT,
    encoding: str = encodings.UTF_8,
    license_id: str | None = None,
    source_name: str | None = None,
    score: str | None = None,
) -> Source:
    """The source of a SPEC; docs/corpus.md describes the kinds.

    Args:
      spec: `KIND:GLOB`, `KIND:GLOB@FIELD`, `tfds:NAME[/CONFIG]:SPLIT@FIELD`, `hub:FOLDER[:CONFIG[:SPLIT]]@FIELD`,
        `python-docs` or `reference`.
      workers: processes that `python-docs` may use.
      language: see `Source.language`.
      encoding: see `Source.encoding`.
      license_id: see `Source.license`.
      source_name: see `Source.source_name`.
      score: see `Source.score`, or NO_SCORE.

    Raises:
      UserError: the kind is unknown, a part of the SPEC is missing, or the language, encoding, license, name or score
        is not one.
    """
    kind, _, argument = spec.partition(":")
    if kind not in KINDS:
        if not re.fullmatch("[a-z][a-z-]*", kind) or argument.startswith("//"):
            raise UserError(f"source {spec}: say how to read it, e.g. `text-files:{spec}`. Kinds: {', '.join(KINDS)}")
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise UserError(f"source {spec}: unknown kind {kind!r}{hint} Kinds: {', '.join(KINDS)}")
    module, _, name = _KINDS[kind][0].partition(".")
    source = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    parsed = dataclasses.replace(
        source.from_spec(spec, argument, workers),
        language=languages.check_setting(language),
        encoding=encodings.check_setting(encoding),
        license=None if license_id is None else licenses.check_setting(license_id),
        source_name=source_name,
        score=None if score == NO_SCORE else score,
    )
    if source_name is not None and not re.fullmatch("[^\\0-\\x1f]{1,200}", source_name):
        raise UserError(
            f"--source-name {short_repr(source_name)}: write 1 to 200 characters without control characters"
        )
    if parsed.score is not None and not field_name(parsed.score):
        raise UserError(f"--score {score}: write @FIELD, a field of each record with a number, or {NO_SCORE}")
    if parsed.encoding not in (encodings.UTF_8, encodings.AUTO) and not parsed.has_encodings:
        raise UserError(f"--encoding {encoding}: source {spec} has no files of text; give it utf-8")
    for flag, setting, remedy in (
        ("--language", language, "a code such as de, or auto"),
        ("--source-name", source_name, "a name"),
        ("--score", parsed.score, NO_SCORE),
    ):
        if field_name(setting) and not parsed.has_fields:
            raise UserError(f"{flag} {setting}: source {spec} has no fields; write {remedy}")
    return parsed
