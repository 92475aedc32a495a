"""The pipeline: sources -> units (prepare) -> plans (decide) -> shards (assemble) -> corpus.json.

What a build has done so far is kept in its scratch directory. Started again after whatever stopped it, it continues
from there and makes the same bytes as if nothing had happened. With other arguments, it prepares again what depends on
them.
"""

import collections
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Sequence

from etils import epath

from bert_jax.data.corpus import token_dtype
from bert_jax.errors import UserError
from bert_jax.storage import is_remote
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.build import claim, scratch, writer
from data_prep.build.assemble import Assembler
from data_prep.build.decide import Unit, decide
from data_prep.build.engines import Engine, PlacedInput
from data_prep.build.prepare import Job
from data_prep.duplicates.decontamination import leak_check
from data_prep.options import Options
from data_prep.sources.base import Skipped, Source


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be built."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    directory: os.PathLike | str
    """new, empty, or left by an unfinished build"""
    name: str
    """of the corpus; lower-case letters, digits and underscores"""
    options: Options = dataclasses.field(default_factory=Options)
    leak_check: Sequence[Source] = ()
    """evaluation texts; documents that overlap with them are left out"""
    scratch: os.PathLike | str | None = None
    """where to keep what is not finished; the default is in `directory`"""


def build(request: Request, engine: Engine) -> dict:
    """Builds a corpus; its bytes depend on the request but not on the engine.

    A document goes to the validation split if a hash of its cleaned text says so: it stays where it is
    when other text is added.

    Returns:
      the content of corpus.json.

    Raises:
      UserError: a source cannot be read, the directory is taken, or a split would have no documents.
    """
    writer.check_name(request.name)
    directory = epath.Path(request.directory)
    inputs = [
        (index, number, part)
        for index, source in enumerate(request.sources)
        for number, part in enumerate(source.inputs())
    ]
    leaks, leak_report = leak_check(request.leak_check, request.options)
    units = {
        "tokenizer": request.tokenizer.fingerprint,
        "leak_check": leak_report,
        **request.options.of_units(bool(leaks)),
    }
    # Where a file is another one than in an earlier run, its input is prepared and all is decided again.
    keys = tuple(scratch.fingerprint((source.spec, units))[:16] for source in request.sources)
    decisions = {
        "sources": [source.spec for source in request.sources],
        "name": request.name,
        "out": os.fspath(directory if is_remote(directory) else directory.resolve()),
        "settings": request.options.to_dict(),
        "inputs": scratch.fingerprint(inputs),
    }
    existed = is_remote(directory) or directory.exists()  # a store has no directories
    marks = claim.scratch_directory(directory, request.name, request.scratch)
    job = Job(
        scratch=os.fspath(marks),
        sources=tuple(request.sources),
        keys=keys,
        tokenizer_json=request.tokenizer.to_json(),
        options=request.options,
        leaks=leaks,
    )
    with claim.only_one(directory, marks):
        claim.go_on(marks, directory, {"units": units, "decisions": decisions}, keys)
        with claim.nothing_left(marks, directory, existed), engine:
            engine.prepare(job, [place for place in inputs if not _is_prepared(marks, keys, place)])
            plans, report = _decide(request, marks, keys, inputs, leaks is not None)
            ids = request.tokenizer.vocab_size, request.tokenizer.unk_id
            assembler = Assembler(job.scratch, os.fspath(directory), request.name, *ids)
            engine.assemble(assembler, plans)
            report = _report(request, marks, keys, inputs, report, leak_report)
            manifest = writer.finish_corpus(directory, marks, request.name, request.tokenizer, report)
            claim.clear(marks, directory)
    return manifest


def _is_prepared(marks: epath.Path, keys: Sequence[str], place: PlacedInput) -> bool:
    source, number, part = place
    done = marks / scratch.input_name(keys[source], number)
    if not done.exists():
        return False
    note = scratch.read_json(done)
    names = (scratch.unit_name(keys[source], number, block) for block in range(note["blocks"]))
    return note["input"] == scratch.fingerprint(part) and all((marks / name).exists() for name in names)


def _decide(
    request: Request, marks: epath.Path, keys: Sequence[str], inputs: list[PlacedInput], has_leaks: bool
) -> tuple[list[str], dict]:
    decided = marks / scratch.PLANS
    if decided.exists():
        content = scratch.read_json(decided)
        return content["plans"], content["report"]
    units = []
    for source, number, _ in inputs:
        blocks = scratch.read_json(marks / scratch.input_name(keys[source], number))["blocks"]
        names = [scratch.unit_name(keys[source], number, block) for block in range(blocks)]
        units += [Unit(name, source, scratch.read_facts(marks / name)) for name in names]
    for index, source in enumerate(request.sources):
        try:
            _check_source(source, [unit.facts for unit in units if unit.source == index])
        except UserError:
            for path in scratch.of_source(marks, keys[index]):  # they hold no document
                path.unlink()
            raise
    token_bytes = token_dtype(request.tokenizer.vocab_size).itemsize
    # Columns are memory-mapped, so they need a local disk: the scratch directory's own where it is one.
    parent = None if is_remote(marks) else os.fspath(marks)
    with tempfile.TemporaryDirectory(prefix="columns-", dir=parent) as local:
        return decide(marks, units, request.options, has_leaks, token_bytes, pathlib.Path(local))


def _check_source(source: Source, facts: list[dict]) -> None:
    """Raises UserError if nothing came out of a source."""
    skipped: collections.Counter[str] = collections.Counter()
    places = []
    for of_unit in facts:
        for reason, about in of_unit["skipped"].items():
            skipped[reason] += about["count"]
            places += [Skipped(reason, *about["first"][0])]
    source.check(sum(of_unit["parts"] for of_unit in facts), skipped, places[0] if places else None)


def _report(
    request: Request,
    marks: epath.Path,
    keys: Sequence[str],
    inputs: list[PlacedInput],
    report: dict,
    leak_report: dict | None,
) -> dict:
    """What corpus.json says beside the counts: where the text came from and what became of it."""
    sources = []
    for index, source in enumerate(request.sources):
        numbers = [number for of, number, _ in inputs if of == index]
        notes = [scratch.read_json(marks / scratch.input_name(keys[index], number)) for number in numbers]
        read = report["read"].get(str(index), {"documents": 0, "text_bytes": 0})
        sources.append({"spec": source.spec, **read, "files": [file for note in notes for file in note["files"]]})
    content = {key: report[key] for key in ("dropped", "cleaned", "skipped")}
    if leak_report:
        content["leak_check"] = leak_report
    return {**content, "settings": request.options.to_dict(), "sources": sources}
