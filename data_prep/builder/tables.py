"""Columns with the properties of every part, document and paragraph, for phase 2.

The columns are memory-mapped files, written block by block, so memory does not grow with the corpus. Signatures and the
keys of paragraphs stay in the prepared blocks (`row_ranges`).
"""

import os
import pathlib
from collections.abc import Callable

import numpy as np

from data_prep.build_options import BuildOptions
from data_prep.duplicates import text_keys

BLOCK_ARRAYS = (
    "sentence_lengths",
    "paragraph_sentences",
    "part_begins",
    "part_ends",
    "part_characters",
    "part_bytes",
    "part_leaks",
    "part_paragraphs",
    "part_keys",
    "paragraph_bytes",
)
"""Arrays that are read from a prepared block."""


class DocumentTables:
    """Columns of all parts, documents and paragraphs, written block by block.

    There are at most as many documents as parts; only the first `num_documents` rows of document columns are used.
    """

    def __init__(self, directory: pathlib.Path, metadata: list[dict], options: BuildOptions):
        def new(name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
            return new_column(directory / f"{name}.npy", np.dtype(dtype), shape)

        self.part_offsets = np.cumsum([0, *(block["parts"] for block in metadata)])
        self.paragraph_offsets = np.cumsum([0, *(block["paragraphs"] for block in metadata)])
        parts, paragraphs = int(self.part_offsets[-1]), int(self.paragraph_offsets[-1])
        self.num_documents = 0
        self.starts = new("starts", np.uint8, (parts,))
        """whether a part begins a document"""
        self.first_part = new("first_part", np.int64, (parts + 1,))
        self.characters = new("characters", np.int64, (parts,))
        self.text_bytes = new("text_bytes", np.int64, (parts,))
        self.tokens = new("tokens", np.int64, (parts,))
        self.contaminated = new("contaminated", np.bool_, (parts,))
        self.keys = new("keys", np.uint64, (parts, 4))
        dedupe = options.drop_duplicate_paragraphs is not None
        self.paragraph_bytes = new("paragraph_bytes", np.uint32, (paragraphs,)) if dedupe else None
        self.paragraph_tokens = new("paragraph_tokens", np.uint32, (paragraphs,)) if dedupe else None
        self.paragraph_document = new("paragraph_document", np.int64, (paragraphs,)) if dedupe else None
        self._open = False

    def add_block(self, block: int, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Adds the arrays of a prepared block; blocks must be added in order.

        Returns:
          the index of the document of each part [num_parts].
        """
        first, last = self.part_offsets[block : block + 2]
        if first == last:
            return np.zeros(0, np.int64)
        open_before = np.concatenate([[self._open], arrays["part_ends"][:-1] == 0])
        starts = (arrays["part_begins"] == 1) | ~open_before
        self._open = arrays["part_ends"][-1] == 0
        self.starts[first:last] = starts
        documents = self.num_documents - 1 + np.cumsum(starts)
        self.first_part[documents[starts]] = first + np.flatnonzero(starts)
        paragraph_tokens = _sum_groups(arrays["sentence_lengths"], arrays["paragraph_sentences"])
        part_tokens = _sum_groups(paragraph_tokens, arrays["part_paragraphs"])
        for column, values in (
            (self.characters, arrays["part_characters"]),
            (self.text_bytes, arrays["part_bytes"]),
            (self.tokens, part_tokens),
        ):
            np.add.at(column, documents, values)
        np.logical_or.at(self.contaminated, documents, arrays["part_leaks"] > 0)
        combine_parts(self.keys, documents, starts, arrays["part_keys"], text_keys.combine_keys)
        if self.paragraph_bytes is not None:
            rows = slice(*self.paragraph_offsets[block : block + 2])
            self.paragraph_bytes[rows] = arrays["paragraph_bytes"]
            self.paragraph_tokens[rows] = paragraph_tokens
            self.paragraph_document[rows] = np.repeat(documents, arrays["part_paragraphs"])
        self.num_documents = int(documents[-1]) + 1
        self.first_part[self.num_documents] = last
        return documents


def combine_parts(
    rows: np.ndarray,
    documents: np.ndarray,
    starts: np.ndarray,
    values: np.ndarray,
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    """Adds the values of parts to the rows of their documents, in place.

    Args:
      rows: of documents.
      documents: of each part, as an index of `rows`.
      starts: whether each part begins its document.
      values: of each part.
      combine: returns the row of a document from its row so far and the values of its next part.
    """
    rows[documents[starts]] = values[starts]
    for part in np.flatnonzero(~starts):
        rows[documents[part]] = combine(rows[documents[part]], values[part])


def new_column(path: pathlib.Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A memory-mapped column of zeros."""
    if 0 in shape:
        return np.zeros(shape, dtype)  # an empty file cannot be mapped
    column = np.lib.format.open_memmap(path, "w+", dtype, shape)
    # A full disk raises an error here; later it would kill the process by a signal. macOS lacks this call.
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return column


def _sum_groups(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Sums of consecutive groups of the given sizes, which may be 0."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return np.diff(sums[np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])])
