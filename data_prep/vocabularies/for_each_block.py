"""Reads sources, cleans their text, and applies a function to each block, in worker processes."""

import collections
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax.progress import progress
from data_prep.clean import clean
from data_prep.parallel import ordered_map
from data_prep.sources.base import Block, Skipped, Source

BlockFunction = Callable[[list[str]], Any]
"""A function of the cleaned texts of a block; picklable."""


@dataclasses.dataclass(frozen=True)
class BlockResult:
    """The result of one block.

    Attributes:
      source: index of the source.
      size: of the block, in units of progress.
      documents: that begin in the block.
      text_bytes: UTF-8 bytes of all cleaned text.
      kept_bytes: of the sampled text.
      skipped: counts by reason.
      first: the first skipped item.
      result: of the function, for the sampled texts.
    """

    source: int
    size: int
    documents: int
    text_bytes: int
    kept_bytes: int
    skipped: collections.Counter[str]
    first: Skipped | None
    result: Any


@dataclasses.dataclass
class SourceTotals:
    """Totals of a source.

    Attributes:
      text_bytes: UTF-8 bytes of cleaned text.
      kept_bytes: of the sampled text.
    """

    text_bytes: int = 0
    kept_bytes: int = 0
    _documents: int = 0
    _skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    _first: Skipped | None = None

    def add(self, result: BlockResult) -> None:
        """Adds the counts of a block."""
        self.text_bytes += result.text_bytes
        self.kept_bytes += result.kept_bytes
        self._documents += result.documents
        self._skipped += result.skipped
        self._first = self._first or result.first

    def report(self, source: Source) -> None:
        """Prints a note on what was skipped; raises the errors of `Source.check_not_empty`."""
        source.check_not_empty(self._documents, self._skipped, self._first)
        if self._first:
            counts = ", ".join(f"{count} x {reason}" for reason, count in self._skipped.items())
            first = f"{self._first.origin}: {self._first.detail}"
            print(f"note: --source {source.spec}: skipped {counts}; the first: {first}", file=sys.stderr)


def for_each_block(
    sources: Sequence[Source],
    function: BlockFunction,
    on_result: Callable[[int, Any], None],
    workers: int,
    description: str,
    rates: Sequence[float] | None = None,
) -> list[SourceTotals]:
    """Applies `function` to each block; calls `on_result` in the order of the text, for any number of workers.

    Args:
      sources: read one after the other.
      function: of the cleaned texts of a block.
      on_result: called with the index of the source and the result.
      workers: processes.
      description: for the progress bar.
      rates: share of each source's documents to sample; a hash of the text decides for each document, or part of a
        long one. None: all.

    Returns:
      totals of each source.

    Raises:
      UserError: a source cannot be read.
    """
    totals = [SourceTotals() for _ in sources]
    parts = [(index, source, part) for index, source in enumerate(sources) for part in source.inputs()]
    rates = tuple(rates) if rates is not None else (1.0,) * len(sources)
    with progress(description, sum(part.size for _, _, part in parts), "B") as bar:
        for result in ordered_map(
            _map_block, _tasks(parts), workers, _name, _initialize, (tuple(sources), function, rates)
        ):
            totals[result.source].add(result)
            on_result(result.source, result.result)
            bar.update(result.size)
    return totals


_Task = tuple[int, Block]
_state: tuple[tuple[Source, ...], BlockFunction, tuple[float, ...]] | None = None


def _tasks(parts) -> Iterator[_Task]:
    for index, source, part in parts:
        for block in source.blocks(part, []):
            yield index, block


def _name(task: _Task) -> str:
    return task[1].origin


def _initialize(*state) -> None:
    global _state
    _state = state


def _map_block(task: _Task) -> BlockResult:
    index, block = task
    sources, function, rates = _state
    documents, text_bytes, kept_bytes, first = 0, 0, 0, None
    skipped: collections.Counter[str] = collections.Counter()
    kept: list[str] = []
    for document in sources[index].documents(block):
        if isinstance(document, Skipped):
            skipped[document.reason] += 1
            first = first or document
            continue
        documents += document.begins
        text = clean(document.text)
        content = text.encode()
        text_bytes += len(content)
        if _is_kept(content, rates[index]):
            kept_bytes += len(content)
            kept.append(text)
    return BlockResult(index, block.size, documents, text_bytes, kept_bytes, skipped, first, function(kept))


def _is_kept(content: bytes, rate: float) -> bool:
    if rate >= 1:
        return True
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) < rate * 2**64
