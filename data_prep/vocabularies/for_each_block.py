"""Reads sources, cleans their text, and applies a function to each block, in worker processes."""

import collections
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax.progress import progress_bar
from data_prep.clean import clean
from data_prep.parallel import ordered_map
from data_prep.sources.base import Block, InputRecord, Skipped, Source

BlockFunction = Callable[[list[str]], Any]
"""A function of the cleaned texts of a block; picklable."""


@dataclasses.dataclass
class Totals:
    """What was read of a block or of a source."""

    documents: int = 0
    """that begin in it"""
    text_bytes: int = 0
    """UTF-8 bytes of cleaned text"""
    kept_bytes: int = 0
    """of the sampled text"""
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """number of skipped items by reason"""
    first: Skipped | None = None
    """the first skipped item"""

    def add(self, other: "Totals") -> None:
        """Adds what was read after it."""
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.kept_bytes += other.kept_bytes
        self.skipped += other.skipped
        self.first = self.first or other.first


def report_skipped(sources: Sequence[Source], totals: Sequence[Totals]) -> None:
    """Prints notes on what was skipped; raises the errors of `Source.check_not_empty`."""
    for source, total in zip(sources, totals, strict=True):
        source.check_not_empty(total.documents, total.skipped, total.first)
        if total.first:
            counts = ", ".join(f"{count} x {reason}" for reason, count in total.skipped.items())
            print(f"note: source {source.spec}: skipped {counts}; the first: {total.first}", file=sys.stderr)


def for_each_block(
    sources: Sequence[Source],
    function: BlockFunction,
    on_result: Callable[[int, Any], None],
    workers: int,
    description: str,
    rates: Sequence[float] | None = None,
) -> list[Totals]:
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
    totals = [Totals() for _ in sources]
    parts = [
        (index, source, part) for index, source in enumerate(sources) for part in source.inputs() if not part.hash_only
    ]
    rates = tuple(rates) if rates is not None else (1.0,) * len(sources)
    with progress_bar(description, sum(part.size for _, _, part in parts), "B") as bar:
        state = tuple(sources), function, rates
        for index, size, block, result in ordered_map(_map_block, _tasks(parts), workers, _name, _initialize, state):
            totals[index].add(block)
            on_result(index, result)
            bar.update(size)
    return totals


_Task = tuple[int, Block]
_state: tuple[tuple[Source, ...], BlockFunction, tuple[float, ...]] | None = None


def _tasks(parts) -> Iterator[_Task]:
    for index, source, part in parts:
        for block in source.blocks(part, InputRecord()):
            yield index, block


def _name(task: _Task) -> str:
    return task[1].origin


def _initialize(*state) -> None:
    global _state
    _state = state


def _map_block(task: _Task) -> tuple[int, int, Totals, Any]:
    """Index of the source, size of the block, what was read of it, and the result of the function."""
    index, block = task
    sources, function, rates = _state
    totals, kept = Totals(), []
    for document in sources[index].documents(block):
        if isinstance(document, Skipped):
            totals.skipped[document.reason] += 1
            totals.first = totals.first or document
            continue
        totals.documents += document.begins
        text = clean(document.text)
        content = text.encode()
        totals.text_bytes += len(content)
        if _is_kept(content, rates[index]):
            totals.kept_bytes += len(content)
            kept.append(text)
    return index, block.size, totals, function(kept)


def _is_kept(content: bytes, rate: float) -> bool:
    if rate >= 1:
        return True
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) < rate * 2**64
