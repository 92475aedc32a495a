"""The pipeline: sources -> units (prepare) -> plans (decide) -> shards (assemble) -> corpus.json.

What a build has done so far lies in its scratch directory. Started again with the same arguments after
whatever stopped it, it goes on from there and makes the same bytes as if nothing had happened.
"""

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence

from etils import epath

from bert_jax.data.corpus import INCOMPLETE, token_dtype
from bert_jax.errors import UserError
from bert_jax.tokenizer import Tokenizer
from data_prep import scratch, writer
from data_prep.assemble import Assembler
from data_prep.decide import Unit, decide
from data_prep.engines import Engine, PlacedInput
from data_prep.leaks import LeakIndex
from data_prep.options import Options
from data_prep.prepare import Job
from data_prep.sources.base import Document, Skipped, Source

_BEGUN = "build.json"


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
    marks = _claim(request, directory, inputs)
    leaks = _leak_index(request)
    job = Job(
        scratch=os.fspath(marks),
        sources=tuple(request.sources),
        tokenizer_json=request.tokenizer.to_json(),
        options=request.options,
        leaks=leaks,
    )
    with engine:
        engine.prepare(job, [place for place in inputs if not _is_prepared(marks, place)])
        plans, report = _decide(request, marks, inputs)
        engine.assemble(Assembler(job.scratch, os.fspath(directory), request.name, job.tokenizer_json), plans)
    report = _report(request, marks, inputs, report, leaks)
    manifest = writer.finish_corpus(directory, marks, request.name, request.tokenizer, report)
    marks.rmtree()
    if request.scratch is not None:
        (directory / INCOMPLETE).rmtree()
    return manifest


def _claim(request: Request, directory: epath.Path, inputs: list[PlacedInput]) -> epath.Path:
    """The scratch directory: new, or left by an earlier run from which this one can go on.

    Units are kept if what they depend on is the same; what was decided, only if all is.
    """
    marks = writer.claim_directory(directory)
    if request.scratch is not None:
        marks = epath.Path(request.scratch)
        marks.mkdir(parents=True, exist_ok=True)
    units = {
        "tokenizer": request.tokenizer.fingerprint,
        "sources": [source.spec for source in request.sources],
        "leak_check": [source.spec for source in request.leak_check],
        "files": _fingerprint(inputs),
        "leak_check_files": _fingerprint([source.inputs() for source in request.leak_check]),
        **request.options.of_units(),
    }
    rest = {"name": request.name, "out": os.fspath(directory), "settings": request.options.to_dict()}
    wanted = json.loads(json.dumps({"units": units, **rest}))
    begun = marks / _BEGUN
    if not begun.exists():
        if any(marks.iterdir()):
            raise UserError(f"{marks}: is not empty and was not left by a build; choose another directory")
        scratch.write_json(begun, wanted)
        return marks
    found = json.loads(begun.read_text())
    if found["units"] != wanted["units"]:
        different = ", ".join(key for key in units if found["units"].get(key) != wanted["units"][key])
        raise UserError(
            f"{marks}: left by an unfinished build with other arguments or input ({different});"
            f" repeat that one to finish it, or remove {directory} to start this one"
        )
    if found != wanted:
        for path in (*marks.glob("plan*"), *marks.glob("shard-*"), *directory.glob("*.array_record-*")):
            path.unlink()
        scratch.write_json(begun, wanted)
    return marks


def _fingerprint(inputs: list) -> str:
    """Of the names and sizes of files."""
    return hashlib.sha256(repr(inputs).encode()).hexdigest()


def _is_prepared(marks: epath.Path, place: PlacedInput) -> bool:
    source, number, _ = place
    done = marks / scratch.input_name(source, number)
    if not done.exists():
        return False
    blocks = json.loads(done.read_text())["blocks"]
    return all((marks / scratch.unit_name(source, number, block)).exists() for block in range(blocks))


def _decide(request: Request, marks: epath.Path, inputs: list[PlacedInput]) -> tuple[list[str], dict]:
    decided = marks / scratch.PLANS
    if decided.exists():
        content = json.loads(decided.read_text())
        return content["plans"], content["report"]
    units = []
    for source, number, _ in inputs:
        blocks = json.loads((marks / scratch.input_name(source, number)).read_text())["blocks"]
        names = [scratch.unit_name(source, number, block) for block in range(blocks)]
        units += [Unit(name, source, scratch.read_facts(marks / name)) for name in names]
    for index, source in enumerate(request.sources):
        _check_source(source, [unit.facts for unit in units if unit.source == index])
    token_bytes = token_dtype(request.tokenizer.vocab_size).itemsize
    # Columns are memory-mapped, so they need a local disk: the scratch directory's own where it is one.
    parent = None if "://" in os.fspath(marks) else os.fspath(marks)
    with tempfile.TemporaryDirectory(prefix="columns-", dir=parent) as local:
        return decide(marks, units, request.options, bool(request.leak_check), token_bytes, pathlib.Path(local))


def _check_source(source: Source, facts: list[dict]) -> None:
    """Raises UserError if nothing came out of a source."""
    skipped: collections.Counter[str] = collections.Counter()
    places = []
    for of_unit in facts:
        for reason, about in of_unit["skipped"].items():
            skipped[reason] += about["count"]
            places += [Skipped(reason, *about["first"][0])]
    source.check(sum(of_unit["parts"] for of_unit in facts), skipped, places[0] if places else None)


def _leak_index(request: Request) -> LeakIndex | None:
    if not request.leak_check:
        return None
    texts = (
        document.text
        for source in request.leak_check
        for part in source.inputs()
        for block in source.blocks(part, [])
        for document in source.documents(block)
        if isinstance(document, Document)
    )
    return LeakIndex.build(texts, request.options.leak_words)


def _report(
    request: Request, marks: epath.Path, inputs: list[PlacedInput], report: dict, leaks: LeakIndex | None
) -> dict:
    """What corpus.json says beside the counts: where the text came from and what became of it."""
    sources = []
    for index, source in enumerate(request.sources):
        numbers = [number for of, number, _ in inputs if of == index]
        notes = [json.loads((marks / scratch.input_name(index, number)).read_text()) for number in numbers]
        read = report["read"].get(str(index), {"documents": 0, "text_bytes": 0})
        sources.append({"spec": source.spec, **read, "files": [file for note in notes for file in note["files"]]})
    content = {key: report[key] for key in ("dropped", "cleaned", "skipped")}
    if leaks:
        content["leak_check"] = {
            "sources": [source.spec for source in request.leak_check],
            "ngrams": leaks.num_ngrams,
            "texts_too_short": leaks.too_short,
        }
    return {**content, "settings": request.options.to_dict(), "sources": sources}
