"""The command `bert-data build`."""

import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro
from etils import epath

from bert_jax.command import flags
from bert_jax.command.flags import DirectoryArg
from bert_jax.data.corpus import Corpus
from bert_jax.data.manifest import MANIFEST, TOKENIZER
from bert_jax.errors import UserError, install_command
from bert_jax.field_validation import Count, Interval, check
from bert_jax.report import text
from bert_jax.storage.paths import is_remote
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep import languages, sources
from data_prep.build_options import BuildOptions, NearDuplicateOptions
from data_prep.clean import NORMALIZATIONS, CleaningOptions
from data_prep.cli.arguments import (
    Encodings,
    File,
    Fraction,
    Sources,
    Specs,
    Switch,
    Workers,
    damage_explained,
    lost_bytes_clause,
    parse_sources,
)
from data_prep.cli.filter_arguments import parse_masks, read_filters
from data_prep.filters.chain import Filters
from data_prep.filters.function import FilterFunction
from data_prep.sources.base import Source, field_name

_MANY_UNKNOWN = 0.01
"""Share of the bytes of the text."""
_MIN_WORKER_MB = 16
_RUNNER_FLAGS = "[-- FLAG ...]"
_NOT_IN_COMMAND = ("--name", "--workers", "--memory-mb", "--scratch", "--engine", "--runner", _RUNNER_FLAGS)
"""Flags that change no byte of the corpus, and its name, which is that of its directory in the command."""

Similarity = Annotated[
    Fraction,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[J]",
        instance_from_str=lambda words: float(*words) if words else NearDuplicateOptions.threshold,
        is_instance=lambda value: isinstance(value, float),
        str_from_instance=lambda value: [str(value)],
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cleaning:
    """Cleaning:"""

    normalization: Literal[NORMALIZATIONS] = CleaningOptions.normalization
    """Unicode normal form (default nfc; nfkc rewrites what authors wrote: x² becomes x2)."""
    keep_control_characters: Switch = False
    """Do not drop invisible control characters."""
    keep_whitespace: Switch = False
    """Do not collapse runs of spaces and blank lines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Filters:
    """Filters; corpus.json counts what they remove:"""

    filter: Annotated[Specs, tyro.conf.arg(metavar="NAME|FILE")] = ()
    """Remove documents by rules of gopher_repetition, gopher_quality, c4, fineweb or language; a JSON file has
    thresholds by name. Default: none."""
    keep_language: Annotated[Specs, tyro.conf.arg(metavar="CODE")] = ()
    """Remove documents in other languages, as CLD2 identifies them. Default: keep all."""
    filter_function: Annotated[Specs, tyro.conf.arg(metavar="MODULE:NAME")] = ()
    """Remove documents for which a Python function of text and language is False; or PATH.py:NAME. Default: none."""
    mask: Annotated[Specs, tyro.conf.arg(metavar="KIND")] = ()
    """Replace personal data by placeholders: email, phone or ip. Default: none."""
    min_characters: Count = BuildOptions.min_characters
    """Remove shorter documents."""
    drop_repeated_lines: Switch = False
    """Remove lines that occurred before in the document."""
    keep_duplicates: Switch = False
    """Keep documents that are equal to an earlier one."""
    drop_duplicate_paragraphs: Annotated[Count | None, tyro.conf.arg(metavar="BYTES")] = None
    """Remove paragraphs of at least this size that are equal to an earlier one. Default: keep them."""
    drop_near_duplicates: Annotated[Similarity | None, tyro.conf.arg(metavar="[J]")] = None
    """Remove documents whose Jaccard similarity with an earlier one is at least J, 0.5 if J is left out. Default: keep
    them."""
    shingle_words: Count | None = None
    """Words per shingle, for near-duplicates (default 3)."""
    permutations: Annotated[int, Interval("[1, 10000]")] | None = None
    """Length of a MinHash signature, for near-duplicates (default 128)."""
    decontaminate: Annotated[Specs, tyro.conf.arg(metavar="SPEC")] = ()
    """Evaluation texts, a SPEC as for --source; documents that overlap with them are removed."""
    decontamination_words: Count | None = None
    """Consecutive words that count as an overlap (default 13)."""

    def __post_init__(self) -> None:
        check(self, "--")

    @property
    def near_duplicates(self) -> NearDuplicateOptions | None:
        """How near-duplicates are found; None: they are kept."""
        given = {"shingle_words": self.shingle_words, "permutations": self.permutations}
        given = {name: value for name, value in given.items() if value is not None}
        if self.drop_near_duplicates is not None:
            return NearDuplicateOptions(threshold=self.drop_near_duplicates, **given)
        if given:
            raise UserError(
                "--shingle-words and --permutations apply to near-duplicates only; add --drop-near-duplicates"
            )
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build:
    """Build a corpus; started again after an interruption, it continues."""

    source: Sources
    tokenizer: File
    """tokenizer.json, vocab.txt, merges.txt, .model, or a directory that holds one."""
    out: DirectoryArg
    """Directory to write; must be empty or not exist. NAME/1.0.0: `tfds.data_source(NAME, data_dir=...)` finds it."""
    name: str | None = None
    """Name of the corpus. Default: from --out."""
    language: Annotated[Specs, tyro.conf.arg(metavar="CODE")] = ()
    """Language of the text: an ISO 639 code, @FIELD of each record (jsonl, parquet, tfds), or auto (identified for each
    document). One for all sources, or one for each --source and --validation-source, in their order (default en)."""
    encoding: Encodings = ()
    """Encoding of files of text, e.g. windows-1252, or auto (identified for each file). One for all sources, or one for
    each, as for --language (default utf-8)."""
    license: Annotated[Specs, tyro.conf.arg(metavar="ID")] = ()
    """License of the text, e.g. cc-by-sa-4.0, for README.md. One for all sources, or one for each, as for --language.
    Default: not stated."""
    source_name: Annotated[Specs, tyro.conf.arg(metavar="NAME")] = ()
    """Name of the text for weights of sampling, or @FIELD of each record. One for all sources, or one for each, as for
    --language. Default: the SPEC."""
    score: Annotated[Specs, tyro.conf.arg(metavar="@FIELD")] = ()
    """Number of each document for weights of sampling, such as its quality, or none. One for all sources, or one for
    each, as for --language. Default: none."""
    score_bounds: tuple[float, ...] = ()
    """Bounds between which scores are not distinguished, ascending. Default: all integers."""
    skip_damaged: Switch = False
    """Leave out files that cannot be read, are damaged or binary, and list them. Default: they are an error."""
    validation_fraction: Fraction | None = None
    """Share of documents held out; each split has at least two of four or more documents. Default: 0.01."""
    validation_documents: Count | None = None
    """Number of documents held out, instead of a share. Default: none."""
    validation_source: Annotated[Specs, tyro.conf.arg(metavar="SPEC")] = ()
    """Text that is held out, as for --source, instead of a part of each --source. Default: the validation splits of
    hub: sources, if nothing else says what is held out."""
    max_shard_mb: Count = 64
    """Shard size."""
    workers: Workers = dataclasses.field(default_factory=os.cpu_count)
    """Number of processes; the result does not depend on it. Default: one per core."""
    memory_mb: Annotated[int, Interval("[16, 16777216]")] | None = None
    """Memory to find duplicates with, of all workers together; the result does not depend on it. Default: 256 for each
    worker."""
    scratch: DirectoryArg | None = None
    """Directory for unfinished work. Default: corpus.incomplete in --out."""
    engine: Literal["local", "beam"] = "local"
    """Processes of this machine, or an Apache Beam runner."""
    runner: str | None = None
    """Beam's runner, e.g. DataflowRunner; flags after -- are passed to it. Default: Beam's."""
    cleaning: Annotated[_Cleaning, tyro.conf.arg(name="")] = dataclasses.field(default_factory=_Cleaning)
    filters: Annotated[_Filters, tyro.conf.arg(name="")] = dataclasses.field(default_factory=_Filters)
    runner_flags: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar=_RUNNER_FLAGS)] = ()
    """Flags of Beam's runner."""

    def run(self) -> None:
        """Build the corpus."""
        # Imported here: importing TFDS takes a second, and the other commands do not need it.
        from data_prep.builder.pipeline import BuildRequest, build
        from data_prep.builder.resume import scratch_place

        started = time.perf_counter()
        out = epath.Path(self.out)
        own_validation = not self._says_what_is_held_out()
        name, engine = self.name or self._default_name(out), self._engine()
        specs = (*self.validation_source, *self.source)
        if repeated := next((spec for spec in specs if specs.count(spec) > 1), None):
            raise UserError(f"{repeated} is given twice, as a --source or --validation-source: give it once")
        read = parse_sources(
            self.source,
            self.workers,
            self.language,
            self.encoding,
            self.license,
            self.source_name,
            self.score,
            held_out=self.validation_source,
            own_validation=own_validation,
        )
        options = self._options(validation_sources=len(read) - len(self.source))
        _note_languages(read, options.filters)
        evaluation = [sources.parse(spec, self.workers) for spec in self.filters.decontaminate]
        tokenizer = Tokenizer.load(self.tokenizer)
        if tokenizer.note:
            print(f"note: {tokenizer.note}", file=sys.stderr)
        request = BuildRequest(read, tokenizer, out, name, options, evaluation, self.scratch, self._command(name))
        inspect = f"`bert-data inspect {shlex.quote(os.fspath(out))}`"
        try:
            with damage_explained():
                manifest = build(request, engine)
            self._summarize(out, manifest)
            lost = sum(entry["bytes"] for entry in manifest["skipped"].values())
            without = lost_bytes_clause(lost, sum(source["text_bytes"] for source in manifest["sources"]))
            print(f"{out}: ready in {time.perf_counter() - started:.0f} s{without}; look at it with {inspect}")
        except KeyboardInterrupt:
            if not (out / MANIFEST).exists() or scratch_place(out, name, self.scratch).exists():
                raise
            print(f"{out}: ready; look at it with {inspect}", file=sys.stderr)

    def _command(self, name: str) -> str:
        """The command, with the name of the corpus as --out and its tokenizer, without flags that change no byte."""
        words = ["bert-data", "build"]
        for before, flag in zip(flags.list_flags(Build), flags.list_flags(Build, self), strict=True):
            (word, *_), value = flag.names, {"--out": name, "--tokenizer": TOKENIZER}.get(flag.names[0], flag.default)
            if word in _NOT_IN_COMMAND or value == before.default:
                continue
            for each in value if flag.is_repeatable else (value,):
                words += [word] if each is True else [word, *map(str, each if isinstance(each, tuple) else (each,))]
        return shlex.join(words)

    def _summarize(self, out: epath.Path, manifest: Mapping[str, Any]) -> None:
        """Print what was built, and notes on what may be unwanted."""
        from data_prep.inspection import corpus_statistics, filter_report, group_report, report

        print(text.render(report.summary_sections(manifest)))
        for note in (group_report.sentence_rules_note(manifest["splits"]), filter_report.lost_languages_note(manifest)):
            if note:
                print(f"note: {note}", file=sys.stderr)
        train = manifest["splits"]["train"]
        if train["unknown_bytes"] > _MANY_UNKNOWN * train["text_bytes"]:
            share = train["unknown_bytes"] / train["text_bytes"]
            print(
                f"note: {share:.1%} of the bytes of the text are unknown to {self.tokenizer}; train one on this text"
                " with `bert-data tokenizer`, with more --max-characters or --kind byte-bpe",
                file=sys.stderr,
            )
        corpus = Corpus.open(out)
        lengths, rows = corpus_statistics.measure_lengths(corpus), corpus_statistics.measure_rows(corpus)
        if rows:
            print(report.coverage_line(rows))
        few = report.few_documents_warning(manifest["splits"])
        for warning in (few, report.short_documents_warning(lengths, rows, self.source), report.coverage_warning(rows)):
            if warning:
                print(f"note: {warning}", file=sys.stderr)

    def _default_name(self, out: epath.Path) -> str:
        directory = (out if is_remote(out) else out.resolve()).name
        if re.fullmatch(r"\d+\.\d+\.\d+", directory):  # as TFDS lays datasets out
            directory = (out if is_remote(out) else out.resolve()).parent.name
        name = re.sub(r"[^a-z0-9]+", "_", directory.lower()).strip("_")
        if not name[:1].isalpha():
            raise UserError(f"--out {out}: no corpus name can be derived from it; give one with --name")
        return name

    def _says_what_is_held_out(self) -> bool:
        flags = {
            "--validation-fraction": self.validation_fraction is not None,
            "--validation-documents": self.validation_documents is not None,
            "--validation-source": bool(self.validation_source),
        }
        given = [flag for flag, is_given in flags.items() if is_given]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} all say what is held out: give one of them")
        return bool(given)

    def _options(self, validation_sources: int) -> BuildOptions:
        filters, words = self.filters, self.filters.decontamination_words
        if self.score_bounds and not self.score:
            raise UserError("--score-bounds has no effect by itself; add --score @FIELD")
        if words and not filters.decontaminate:
            raise UserError(
                "--decontamination-words has no effect by itself; add --decontaminate with evaluation texts"
            )
        fraction = BuildOptions.validation_fraction if self.validation_fraction is None else self.validation_fraction
        return BuildOptions(
            cleaning=CleaningOptions(
                normalization=self.cleaning.normalization,
                control_characters=not self.cleaning.keep_control_characters,
                whitespace=not self.cleaning.keep_whitespace,
            ),
            drop_repeated_lines=filters.drop_repeated_lines,
            filters=read_filters(filters.filter, filters.keep_language),
            filter_functions=tuple(map(FilterFunction.load, filters.filter_function)),
            masks=parse_masks(filters.mask),
            min_characters=filters.min_characters,
            drop_duplicate_documents=not filters.keep_duplicates,
            drop_duplicate_paragraphs=filters.drop_duplicate_paragraphs,
            near_duplicates=filters.near_duplicates,
            decontamination_words=words or BuildOptions.decontamination_words,
            score_bounds=self.score_bounds,
            skip_damaged=self.skip_damaged,
            validation_fraction=fraction,
            validation_documents=self.validation_documents,
            validation_sources=validation_sources,
            max_shard_bytes=self.max_shard_mb << 20,
        )

    def _engine(self):
        if self.engine == "local":
            if self.runner or self.runner_flags:
                raise UserError("--runner and flags after -- belong to Apache Beam; add --engine beam")
            from data_prep.builder.engines.local import LocalEngine

            self._check_memory()
            return LocalEngine(self.workers, self.memory_mb and self.memory_mb << 20)
        if self.memory_mb:
            raise UserError("--memory-mb is for processes of this machine; remove it, or --engine beam")
        try:
            from data_prep.builder.engines.beam import BeamEngine
        except ImportError as error:
            raise UserError(f"--engine beam needs Apache Beam, which is missing: {install_command('beam')}") from error

        return BeamEngine(self.runner, self.runner_flags, workers=self.workers)

    def _check_memory(self) -> None:
        megabytes, least = self.memory_mb, _MIN_WORKER_MB * self.workers
        if megabytes is None:
            return
        if megabytes < least:
            raise UserError(
                f"--memory-mb {megabytes} is less than {_MIN_WORKER_MB} for each of {self.workers} workers: give at"
                f" least {least}, or fewer --workers"
            )
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        if megabytes > available:
            raise UserError(f"--memory-mb {megabytes} is more than the {available} MB of this machine: give less")


def _note_languages(read: Sequence[Source], filters: Filters) -> None:
    """Print a note on sources in a language that is not kept: the filter identifies languages, other rules do not."""
    kept = {code.partition("-")[0] for code in filters.language.keep} if filters.language else set()
    for source in read if kept else ():
        fixed = source.language != languages.AUTO and not field_name(source.language)
        if fixed and source.language.partition("-")[0] not in kept:
            print(
                f"note: source {source.spec}: its documents count as {source.language} for all rules but "
                "--keep-language; add --language auto, or the code of their language",
                file=sys.stderr,
            )
