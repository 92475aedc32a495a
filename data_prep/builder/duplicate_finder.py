"""Finds duplicates in phase 2, with the workers of an engine."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath

from data_prep.build_options import NearDuplicateOptions
from data_prep.builder.row_ranges import DocumentKeys, DocumentSignatures, ParagraphKeys, RowRangeIndex, write_ranges
from data_prep.builder.tables import DocumentTables
from data_prep.duplicates import near_duplicates
from data_prep.duplicates.grouped_steps import RunSteps
from data_prep.duplicates.repeated_keys import find_repeats

_KEY_BYTES = 64
"""Memory for the key of a document or paragraph while a range of them is read and sent"""


@dataclasses.dataclass(frozen=True)
class DuplicateFinder:
    """Finds duplicates among the documents of prepared blocks. The result does not depend on engine and memory."""

    directory: epath.Path
    """the scratch directory"""
    run: RunSteps
    memory_bytes: int
    """of one worker"""

    def documents(self, tables: DocumentTables, blocks: Sequence[str], active: np.ndarray) -> np.ndarray:
        """Which documents are equal to an earlier one, bool [n].

        Args:
          tables: of all documents.
          blocks: names of the prepared blocks.
          active: documents to consider, bool [n].
        """
        with self._document_ranges(tables, blocks, active, self._keys_per_range()) as ranges:
            return find_repeats(DocumentKeys(ranges), self.run, self.memory_bytes)

    def near(
        self, tables: DocumentTables, blocks: Sequence[str], active: np.ndarray, options: NearDuplicateOptions
    ) -> np.ndarray:
        """Which documents are similar to an earlier one that is kept, bool [n]; arguments as in `documents`."""
        per_range = near_duplicates.documents_per_range(options.permutations, self.memory_bytes)
        with self._document_ranges(tables, blocks, active, per_range) as ranges:
            reader = DocumentSignatures(ranges)
            repeated = near_duplicates.find_repeated_signatures(reader, self.run, self.memory_bytes)
        with self._document_ranges(tables, blocks, active & ~repeated, per_range) as ranges:
            return repeated | near_duplicates.near_duplicate_mask(
                DocumentSignatures(ranges), self.run, options.permutations, options.threshold, self.memory_bytes
            )

    def paragraphs(
        self, tables: DocumentTables, blocks: Sequence[str], active: np.ndarray, min_bytes: int
    ) -> np.ndarray:
        """Which paragraphs of at least `min_bytes` are equal to an earlier one, bool [num_paragraphs].

        `active` documents are considered; other arguments as in `documents`.
        """
        offsets = tables.paragraph_offsets
        if not offsets[-1]:
            return np.zeros(0, bool)
        # As many whole blocks as fit, at least one.
        bounds, per_range = [0], self._keys_per_range()
        while bounds[-1] < len(blocks):
            fitting = int(np.searchsorted(offsets, offsets[bounds[-1]] + per_range, "right")) - 1
            bounds.append(max(fitting, bounds[-1] + 1))
        first_parts = tables.part_offsets[bounds]
        has_parts = np.append(np.diff(first_parts) > 0, True)
        ranges = write_ranges(
            self.directory, tables, blocks, first_parts[has_parts], offsets[bounds][has_parts], active
        )
        try:
            return find_repeats(ParagraphKeys(ranges, min_bytes), self.run, self.memory_bytes)
        finally:
            ranges.remove_files()

    def _keys_per_range(self) -> int:
        return int(min(max(self.memory_bytes // 4 // _KEY_BYTES, 1), near_duplicates.MAX_RANGE))

    @contextlib.contextmanager
    def _document_ranges(
        self, tables: DocumentTables, blocks: Sequence[str], active: np.ndarray, per_range: int
    ) -> Iterator[RowRangeIndex]:
        starts = np.append(np.arange(0, tables.num_documents, per_range), tables.num_documents)
        ranges = write_ranges(self.directory, tables, blocks, tables.first_part[starts], starts, active)
        try:
            yield ranges
        finally:
            ranges.remove_files()
