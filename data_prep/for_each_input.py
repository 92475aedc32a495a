"""Worker processes read the inputs of sources, clean their text, and apply a function to each input."""

import collections
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from data_prep.clean import DEFAULT, CleaningOptions, clean
from data_prep.parallel import SharedProgress, ordered_map
from data_prep.sources import encodings
from data_prep.sources.base import Input, InputRecord, Skipped, Source
from data_prep.sources.files import check_unchanged

InputFunction = Callable[[Iterator[list[str]]], Any]
"""A function of the text of an input: of the cleaned texts of each of its blocks, which are read while it runs. It uses
all of them, and is picklable."""


@dataclasses.dataclass
class Totals:
    """What was read of an input or of a source."""

    documents: int = 0
    """that begin in it"""
    text_bytes: int = 0
    """UTF-8 bytes of cleaned text"""
    kept_bytes: int = 0
    """of the sampled text"""
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """number of skipped items by reason"""
    lost_bytes: int = 0
    """of text that was skipped, and of damaged files"""
    encodings: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """number of files, by encoding"""
    first: Skipped | None = None
    """the first skipped item"""
    damaged: list[str] = dataclasses.field(default_factory=list)
    """with `Source.skip_damaged`, why text was left out"""

    def add(self, other: "Totals") -> None:
        """Adds what was read after it."""
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.kept_bytes += other.kept_bytes
        self.skipped += other.skipped
        self.lost_bytes += other.lost_bytes
        self.encodings += other.encodings
        self.first = self.first or other.first
        self.damaged += [message for message in other.damaged if message not in self.damaged]


def report_skipped(sources: Sequence[Source], totals: Sequence[Totals]) -> None:
    """Prints notes on what was skipped; raises the errors of `Source.check_not_empty`."""
    for source, total in zip(sources, totals, strict=True):
        damaged = collections.Counter({"damaged_file": len(total.damaged)} if total.damaged else {})
        source.check_not_empty(total.documents, total.skipped + damaged, total.first or next(iter(total.damaged), None))
        if total.first:
            counts = ", ".join(f"{count} x {reason}" for reason, count in total.skipped.items())
            print(f"note: source {source.spec}: skipped {counts}; the first: {total.first}", file=sys.stderr)
        if total.encodings.keys() - {encodings.UTF_8}:
            files = ", ".join(f"{name} ({count:,})" for name, count in total.encodings.most_common())
            print(f"note: source {source.spec}: files by encoding: {files}", file=sys.stderr)
        for message in total.damaged:
            print(f"note: source {source.spec}: left out {message}", file=sys.stderr)


def for_each_input(
    sources: Sequence[Source],
    function: InputFunction,
    on_result: Callable[[int, Any], None],
    workers: int,
    description: str,
    *,
    rates: Sequence[float] | None = None,
    cleaning: CleaningOptions = DEFAULT,
) -> list[Totals]:
    """Applies `function` to each input; calls `on_result` in the order of the text, for any number of workers.

    Args:
      sources: read one after the other.
      function: of the text of an input.
      on_result: called with the index of the source and the result.
      workers: processes that read; if there is one input, this process reads it.
      description: for the progress bar.
      rates: share of the lines of each source to sample. None: all.
      cleaning: of the text.

    Returns:
      totals of each source.

    Raises:
      UserError: a source cannot be read, or a file changes while it is read.
    """
    totals = [Totals() for _ in sources]
    tasks = [(index, part) for index, source in enumerate(sources) for part in source.inputs() if not part.hash_only]
    rates = tuple(rates) if rates is not None else (1.0,) * len(sources)
    progress = SharedProgress()
    state = _Reader(tuple(sources), function, rates, cleaning, progress)
    with progress.shown(description, sum(part.size for _, part in tasks)):
        results = ordered_map(_read, tasks, min(workers, len(tasks)), _name, _initialize, (state,))
        for (index, _), (read, result) in zip(tasks, results, strict=True):
            totals[index].add(read)
            on_result(index, result)
    return totals


_Task = tuple[int, Input]
"""Index of the source, and one of its inputs"""


@dataclasses.dataclass(frozen=True)
class _Reader:
    """What a worker needs to read inputs."""

    sources: tuple[Source, ...]
    function: InputFunction
    rates: tuple[float, ...]
    cleaning: CleaningOptions
    progress: SharedProgress

    def __call__(self, task: _Task) -> tuple[Totals, Any]:
        """What was read of an input, and the result of the function."""
        totals = Totals()
        return totals, self.function(self._texts(*task, totals))

    def _texts(self, index: int, part: Input, totals: Totals) -> Iterator[list[str]]:
        """The sampled texts of each block; adds to the totals."""
        source, rate, record = self.sources[index], self.rates[index], InputRecord()
        for block in source.read_blocks(part, record):
            kept = []
            for document in source.documents(block):
                if isinstance(document, Skipped):
                    totals.skipped[document.reason] += 1
                    totals.lost_bytes += document.size
                    totals.first = totals.first or document
                    continue
                totals.documents += document.begins
                text = clean(document.text, self.cleaning)
                size = len(text.encode())
                totals.text_bytes += size
                if sampled := _sample(text, rate):
                    totals.kept_bytes += size if sampled is text else len(sampled.encode())
                    kept.append(sampled)
            yield kept
            self.progress.add(block.size)
        totals.damaged += record.damaged
        totals.lost_bytes += record.damaged_bytes
        totals.encodings.update(record.encodings)
        check_unchanged(part)


_reader: _Reader | None = None


def _name(task: _Task) -> str:
    return task[1].origin


def _initialize(reader: _Reader) -> None:
    global _reader
    _reader = reader


def _read(task: _Task) -> tuple[Totals, Any]:
    return _reader(task)


def _sample(text: str, rate: float) -> str:
    """About a share of the lines of a text: a document can be a whole source. A hash decides for each line."""
    if rate >= 1:
        return text
    hashes = ((line, hashlib.blake2b(line.encode(), digest_size=8).digest()) for line in text.split("\n"))
    return "\n".join(line for line, digest in hashes if line and int.from_bytes(digest) < rate * 2**64)
