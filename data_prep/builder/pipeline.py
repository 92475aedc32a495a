"""The pipeline: sources -> prepared blocks (prepare) -> plans (decide) -> shards (assemble) -> corpus.json.

The progress of a build is kept in its scratch directory. A build that is started again after an interruption continues
from there and writes the same bytes as an uninterrupted one. With other arguments, it prepares again what depends on
them.
"""

import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from etils import epath

from bert_jax.data.manifest import read_manifest, token_dtype
from bert_jax.errors import UserError
from bert_jax.storage.listing import file_sizes
from bert_jax.storage.paths import is_remote
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.build_options import BuildOptions
from data_prep.builder import resume, scratch, writer
from data_prep.builder.decide import PreparedBlock, decide, merge_skipped, sum_counts
from data_prep.builder.duplicate_finder import DuplicateFinder
from data_prep.builder.engines import Engine, IndexedInput
from data_prep.builder.prepare import FIRST_PLACES, PrepareJob, is_refused
from data_prep.builder.write_shards import Assembler
from data_prep.duplicates.decontamination import build_evaluation_index
from data_prep.inspection.datasheet import format_datasheet
from data_prep.sources.base import Source, field_name
from data_prep.sources.text_chunks import places_in_file


@dataclasses.dataclass(frozen=True)
class BuildRequest:
    """Arguments of a build."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    directory: os.PathLike | str
    """new, empty, or left by an unfinished build"""
    name: str
    """of the corpus; lower-case letters, digits and underscores"""
    options: BuildOptions = dataclasses.field(default_factory=BuildOptions)
    evaluation_texts: Sequence[Source] = ()
    """for decontamination: documents that overlap with them are removed"""
    scratch: os.PathLike | str | None = None
    """directory for unfinished work; the default is in `directory`"""
    command: str = ""
    """for the datasheet"""


def build(request: BuildRequest, engine: Engine) -> dict:
    """Builds a corpus; its bytes depend on the request but not on the engine.

    A hash of a document's cleaned text determines its split, so it stays in that split when other text is added.

    Returns:
      the content of corpus.json.

    Raises:
      UserError: a source cannot be read, the directory is in use, or a split would have no documents.
    """
    writer.check_name(request.name)
    directory = epath.Path(request.directory)
    sources = tuple(dataclasses.replace(one, skip_damaged=request.options.skip_damaged) for one in request.sources)
    inputs = [
        (index, number, part) for index, source in enumerate(sources) for number, part in enumerate(source.inputs())
    ]
    evaluation_ngrams, decontamination_report = build_evaluation_index(
        request.evaluation_texts, request.options, engine.workers
    )
    preparation = {
        "format": scratch.FORMAT_VERSION,
        "tokenizer": request.tokenizer.fingerprint,
        "leak_check": decontamination_report,
        **request.options.preparation_settings(bool(evaluation_ngrams)),
    }
    # If a file differs from that of an earlier run, its input is prepared again and all decisions are made again.
    identities = [
        (source.spec, source.language, source.encoding, source.source_name, source.score) for source in sources
    ]
    keys = tuple(scratch.fingerprint((*identity, preparation))[:16] for identity in identities)
    existed = is_remote(directory) or directory.exists()  # a store has no directories
    arguments = {"units": preparation, "decisions": {"sources": identities, **_other_arguments(request, inputs)}}
    scratch_dir = resume.scratch_place(directory, request.name, request.scratch)
    if resume.finish_removal(scratch_dir, directory, arguments):
        return read_manifest(directory)
    resume.make_scratch_directory(scratch_dir, directory)
    job = _prepare_job(request, sources, keys, scratch_dir, decontamination_report)
    with resume.exclusive_build(directory, scratch_dir, existed) as check_locks:
        resume.resume_or_start(scratch_dir, directory, arguments, keys)
        with resume.cleanup_on_early_failure(scratch_dir, directory, existed), engine:
            if job.evaluation_ngrams:
                scratch.write_array(scratch_dir / job.evaluation_ngrams, evaluation_ngrams.slots())
            engine.prepare(job, _unprepared(job, inputs))
            check_locks()
            notes = _read_notes(job, inputs)
            plans, report = _decide(job, inputs, notes, token_dtype(request.tokenizer.vocab_size).itemsize, engine)
            check_locks()
            ids = request.tokenizer.begins_word, request.tokenizer.unk_id
            engine.assemble(Assembler(job.scratch, os.fspath(directory), request.name, *ids), plans)
            content = _report(job, inputs, notes, report, decontamination_report), _source_files(inputs, notes)
            page = functools.partial(format_datasheet, directory, request.tokenizer, request.command)
            check_locks()
            manifest = writer.finish_corpus(directory, scratch_dir, request.name, request.tokenizer, *content, page)
            resume.remove_scratch(scratch_dir, directory)
    return manifest


def _other_arguments(request: BuildRequest, inputs: Sequence[IndexedInput]) -> dict:
    """Arguments that no prepared block depends on; JSON values."""
    directory = epath.Path(request.directory)
    return {
        "licenses": [source.license for source in request.sources],
        "command": request.command,
        "name": request.name,
        "out": os.fspath(directory if is_remote(directory) else directory.resolve()),
        "settings": request.options.to_dict(),
        "inputs": scratch.fingerprint(inputs),
    }


def _prepare_job(
    request: BuildRequest,
    sources: tuple[Source, ...],
    keys: tuple[str, ...],
    scratch_dir: epath.Path,
    decontamination_report: dict | None,
) -> PrepareJob:
    ngrams = None
    if decontamination_report:
        ngrams = scratch.ngrams_name(decontamination_report["sha256"], request.options.decontamination_words)
    return PrepareJob(
        scratch=os.fspath(scratch_dir),
        sources=sources,
        keys=keys,
        tokenizer_json=request.tokenizer.to_json(),
        options=request.options,
        evaluation_ngrams=ngrams,
    )


def _unprepared(job: PrepareJob, inputs: Sequence[IndexedInput]) -> list[IndexedInput]:
    """Inputs of which an earlier run has not prepared all blocks. Directories are listed, no block is opened."""
    notes, blocks = _read_notes(job, inputs), scratch.prepared_blocks(epath.Path(job.scratch))

    def is_prepared(place: IndexedInput) -> bool:
        source, number, part = place
        note = notes.get((source, number))
        if note is None or note["input"] != scratch.fingerprint(part):
            return False
        if note["damaged"] and not job.sources[source].skip_damaged:
            return False
        if any(is_refused(block, job.options) for block in note["blocks"]):
            return False
        return all(name in blocks for name in _block_names(job, source, number, note))

    return [place for place in inputs if not is_prepared(place)]


def _read_notes(job: PrepareJob, inputs: Sequence[IndexedInput]) -> dict[tuple[int, int], dict]:
    """By source and number, the files that record that all blocks of an input were read, if they exist."""
    scratch_dir = epath.Path(job.scratch)
    sizes = file_sizes(scratch_dir)
    names = {scratch.input_marker_name(job.keys[source], number): (source, number) for source, number, _ in inputs}
    contents = scratch.read_json_files(scratch_dir, {name: sizes[name] for name in names if name in sizes})
    return {names[name]: content for name, content in contents.items()}


def _block_names(job: PrepareJob, source: int, number: int, note: dict) -> list[str]:
    return [scratch.block_file_name(job.keys[source], number, block) for block in range(len(note["blocks"]))]


def _decide(
    job: PrepareJob,
    inputs: Sequence[IndexedInput],
    notes: Mapping[tuple[int, int], dict],
    token_bytes: int,
    engine: Engine,
) -> tuple[list[str], dict]:
    """Names of the plans, and the report for corpus.json, of this run or of an earlier one."""
    scratch_dir = epath.Path(job.scratch)
    decided = scratch_dir / scratch.PLANS
    if decided.exists():
        content = scratch.read_json(decided)
        return content["plans"], content["report"]
    blocks, damaged = _prepared_blocks(job, inputs, notes)
    for index, source in enumerate(job.sources):
        try:
            metadata = [block.metadata for block in blocks if block.source == index]
            _check_source(source, metadata, damaged[index], job.options.score_bounds)
        except UserError:
            for path in scratch.files_of_source(scratch_dir, job.keys[index]):  # they contain no document
                path.unlink()
            raise
    # Columns are memory-mapped, so they need a local disk: that of the scratch directory if it is local.
    parent = None if is_remote(scratch_dir) else job.scratch
    with tempfile.TemporaryDirectory(prefix="columns-", dir=parent) as name:
        local = pathlib.Path(name)
        run = functools.partial(engine.run_steps, scratch=job.scratch, local=local)
        finder = DuplicateFinder(scratch_dir, run, engine.memory_bytes)
        decontaminates = job.evaluation_ngrams is not None
        return decide(scratch_dir, blocks, job.options, decontaminates, token_bytes, local, finder)


def _prepared_blocks(
    job: PrepareJob, inputs: Sequence[IndexedInput], notes: Mapping[tuple[int, int], dict]
) -> tuple[list[PreparedBlock], list[list[str]]]:
    """The prepared blocks, with places in files instead of ranges; the damage in each source."""
    blocks: list[PreparedBlock] = []
    damaged: list[list[str]] = [[] for _ in job.sources]
    lines = text_bytes = 0
    for source, number, part in inputs:
        note = notes[source, number]
        if not part.start:
            lines = text_bytes = 0
        for name, metadata in zip(_block_names(job, source, number, note), note["blocks"], strict=True):
            if part.start:
                _correct_places(
                    metadata,
                    functools.partial(places_in_file, range_start=part.start, lines=lines, text_bytes=text_bytes),
                )
            blocks.append(PreparedBlock(name, source, metadata))
        lines, text_bytes = lines + note["lines"], text_bytes + note["text_bytes"]
        # Each range finds that a file is not text, and two may read the same damaged block.
        damaged[source] += [message for message in note["damaged"] if message not in damaged[source]]
    return blocks, damaged


def _correct_places(metadata: dict, in_file: Callable[[str], str]) -> None:
    """Changes the places in the metadata of a block of a later range of a file to places in the file."""
    for entry in metadata["skipped"].values():
        entry["first"] = list(map(in_file, entry["first"]))
    for examples in metadata["filtered"]["examples"].values() if "filtered" in metadata else ():
        for example in examples:
            example[1] = in_file(example[1])


def _check_source(source: Source, metadata: list[dict], damaged: list[str], bounds: tuple[float, ...]) -> None:
    """Raises UserError if a source gave no document, or none with a language or a score in the given field."""
    skipped = merge_skipped([*metadata, {"skipped": _skipped_files(damaged, 0)}])
    first = next((entry["first"][0] for entry in skipped.values()), None)
    counts = {reason: entry["count"] for reason, entry in skipped.items()}
    parts = sum(block["parts"] for block in metadata)
    source.check_not_empty(parts, counts, first)
    for flag, setting, what, reason in (
        ("--language", source.language, "an ISO 639 code", "undetermined"),
        ("--score", source.score, "a number" + " of the bounds" * bool(bounds), "unscored"),
    ):
        if not field_name(setting):
            continue
        without = sum(block[reason]["parts"] for block in metadata)
        values = list(dict.fromkeys(value for block in metadata for value in block[reason]["values"]))[:FIRST_PLACES]
        field = f"{what} in the field {field_name(setting)!r}" + f"; it has {', '.join(values)}" * bool(values)
        if parts == without:
            raise UserError(f"{flag} {setting}: no document of source {source.spec} has {field}")
        if without:
            print(f"note: {without:,} of {parts:,} texts of source {source.spec} do not have {field}", file=sys.stderr)


def _skipped_files(damaged: list[str], size: int) -> dict[str, dict]:
    """Damage in the form of skipped records; `size` in bytes on disk."""
    entry = {"count": len(damaged), "bytes": size, "first": damaged[:FIRST_PLACES]}
    return {"damaged_file": entry} if damaged else {}


def _source_files(inputs: Sequence[IndexedInput], notes: Mapping[tuple[int, int], dict]) -> Iterator[dict]:
    """The files that were read: number of the source, path, SHA-256 and bytes."""
    for source, number, _ in inputs:
        for file in notes[source, number]["files"]:
            yield {"source": source, **file}


def _report(
    job: PrepareJob,
    inputs: Sequence[IndexedInput],
    all_notes: Mapping[tuple[int, int], dict],
    report: dict,
    decontamination_report: dict | None,
) -> dict:
    """The content of corpus.json besides the counts: sources, settings, and what was removed."""
    sources = []
    for index, source in enumerate(job.sources):
        notes = [all_notes[of, number] for of, number, _ in inputs if of == index]
        read = report["read"].get(str(index), {"documents": 0, "text_bytes": 0})
        names = ("spec", "source_name", "license", "language", "score", "encoding")
        about = {name: getattr(source, name) for name in names}
        about["encodings"] = sum_counts(note["encodings"] for note in notes)
        sources.append({**about, **read, "files": sum(len(note["files"]) for note in notes)})
        if damaged := list(dict.fromkeys(message for note in notes for message in note["damaged"])):
            sources[-1]["damaged"] = damaged
    content = {key: report[key] for key in ("dropped", "cleaned", "skipped", "filters") if key in report}
    every = [message for source in sources for message in source.get("damaged", ())]
    lost = sum(note["damaged_bytes"] for note in all_notes.values())
    content["skipped"] = merge_skipped([{"skipped": content["skipped"]}, {"skipped": _skipped_files(every, lost)}])
    if decontamination_report:
        content["leak_check"] = decontamination_report
    return {**content, "settings": job.options.to_dict(), "sources": sources}
