"""Reads keys and signatures of documents and paragraphs from prepared blocks, in ranges.

A range is described by a file in the scratch directory, so that any worker can read it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath

from data_prep.builder import scratch
from data_prep.builder.tables import DocumentTables, combine_parts
from data_prep.duplicates import text_keys


@dataclasses.dataclass(frozen=True)
class RowRangeIndex:
    """Files that describe ranges of consecutive parts."""

    directory: str
    """the scratch directory"""
    starts: np.ndarray
    """first document (or paragraph) of each range, and the end of the last one, int64 [ranges + 1]"""

    def read_entry(self, index: int) -> tuple[np.ndarray, np.ndarray, list[tuple[str, int, int]]]:
        """(whether each part begins a document; is considered; [(prepared block, first part, end part)])."""
        path = epath.Path(self.directory) / scratch.row_range_name(index)
        arrays = scratch.read_arrays(path)
        return arrays["starts"] == 1, arrays["active"] == 1, scratch.read_metadata(path)["blocks"]

    def remove_files(self) -> None:
        """Removes the files; ranges cannot be read after it."""
        for index in range(len(self.starts) - 1):
            (epath.Path(self.directory) / scratch.row_range_name(index)).unlink(missing_ok=True)


def write_ranges(
    directory: epath.Path,
    tables: DocumentTables,
    blocks: Sequence[str],
    part_bounds: np.ndarray,
    row_bounds: np.ndarray,
    active: np.ndarray,
) -> RowRangeIndex:
    """Writes the description of ranges.

    Args:
      directory: the scratch directory.
      tables: of all documents.
      blocks: names of all prepared blocks.
      part_bounds: first part of each range, and the end of the last one.
      row_bounds: `starts` of `RowRangeIndex`.
      active: documents to consider, bool [num_documents].
    """
    document = np.append(np.searchsorted(tables.first_part[: tables.num_documents], part_bounds[:-1], "right") - 1, 0)
    for index, (first, end) in enumerate(zip(part_bounds[:-1].tolist(), part_bounds[1:].tolist(), strict=True)):
        first_block = int(np.searchsorted(tables.part_offsets, first, "right")) - 1
        end_block = int(np.searchsorted(tables.part_offsets, end, "left"))
        rows = []
        for block in range(first_block, end_block):
            offset, end_offset = tables.part_offsets[block : block + 2].tolist()
            if offset < end_offset:
                rows.append((blocks[block], max(first - offset, 0), min(end, end_offset) - offset))
        part_starts = np.array(tables.starts[first:end])
        # The first part of a block may continue the document before it.
        documents = document[index] + np.cumsum(part_starts, dtype=np.int64) - int(part_starts[0])
        arrays = {"starts": part_starts, "active": active[documents].astype(np.uint8)}
        scratch.write_arrays(directory / scratch.row_range_name(index), arrays, {"blocks": rows})
    return RowRangeIndex(str(directory), row_bounds)


@dataclasses.dataclass(frozen=True)
class _DocumentRows:
    """Reads a row for each document, combined from those of its parts; ranges must begin with documents."""

    ranges: RowRangeIndex

    @property
    def starts(self) -> np.ndarray:
        return self.ranges.starts

    def _read(self, index: int, name: str, combine) -> tuple[np.ndarray, np.ndarray]:
        starts, active, blocks = self.ranges.read_entry(index)
        documents = np.cumsum(starts) - 1
        rows, begin = None, 0
        for (_, first, end), (of_block,) in zip(blocks, _arrays(self.ranges, blocks, name), strict=True):
            values = of_block[first:end]
            if rows is None:
                rows = np.empty((documents[-1] + 1, *values.shape[1:]), values.dtype)
            parts = slice(begin, begin + len(values))
            combine_parts(rows, documents[parts], starts[parts], values, combine)
            begin += len(values)
        return active[starts], rows


class DocumentKeys(_DocumentRows):
    """A reader of the keys of documents, uint64 [n, 2]."""

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents to consider, keys) of a range."""
        active, keys = self._read(index, "part_keys", text_keys.combine_keys)
        return active, keys[:, :2]


class DocumentSignatures(_DocumentRows):
    """A reader of the signatures of documents, uint32 [n, permutations]."""

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents to consider, signatures) of a range."""
        return self._read(index, "part_signatures", np.minimum)


@dataclasses.dataclass(frozen=True)
class ParagraphKeys:
    """A reader of the keys of paragraphs, uint64 [n, 2]; ranges must be whole blocks."""

    ranges: RowRangeIndex
    min_bytes: int
    """shorter paragraphs are not considered"""

    @property
    def starts(self) -> np.ndarray:
        """First paragraph of each range."""
        return self.ranges.starts

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(paragraphs to consider, keys) of a range."""
        _, active, blocks = self.ranges.read_entry(index)
        considered, keys, begin = [np.zeros(0, bool)], [np.zeros((0, 2), np.uint64)], 0
        arrays = _arrays(self.ranges, blocks, "part_paragraphs", "paragraph_bytes", "paragraph_keys")
        for (_, first, end), (counts, sizes, of_block) in zip(blocks, arrays, strict=True):
            parts = active[begin : begin + end - first]
            considered.append(np.repeat(parts, counts) & (sizes >= self.min_bytes))
            keys.append(of_block)
            begin += end - first
        return np.concatenate(considered), np.concatenate(keys)


def _arrays(ranges: RowRangeIndex, blocks: list[tuple[str, int, int]], *names: str) -> Iterator[list[np.ndarray]]:
    directory = epath.Path(ranges.directory)
    for arrays in scratch.iterate_arrays([directory / block for block, _, _ in blocks], names):
        yield [arrays[name] for name in names]
