"""Which documents the filters remove, and by source and language what they removed.

A long document is judged in parts of about 2 million characters. It is removed if the parts that a filter removes have
at least half of its characters; the rule of the first of them counts.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_prep.builder import tables
from data_prep.builder.groups import unpack_groups
from data_prep.filters.chain import merge_examples

BLOCK_ARRAYS = (*tables.BLOCK_ARRAYS, "part_rules", "part_groups", "groups")
"""Arrays that are read from a prepared block."""


class FilterTables:
    """Columns of the documents, written block by block, and the counts of what was removed."""

    def __init__(self, documents: tables.DocumentTables, directory: pathlib.Path, metadata: Sequence[Mapping]):
        parts = len(documents.starts)
        self._tables = documents
        self._metadata = [block["filtered"] for block in metadata]
        self._rules = sorted({rule for block in self._metadata for rule in block["rules"]})
        self._groups: dict[tuple[int, str], int] = {}
        self._rule = tables.new_column(directory / "rule.npy", np.dtype(np.uint16), (parts,))
        """1 + the index of the rule of the first removed part; 0: none"""
        self._group = tables.new_column(directory / "group.npy", np.dtype(np.uint32), (parts,))
        self._removed_characters = tables.new_column(directory / "removed_characters.npy", np.dtype(np.int64), (parts,))

    def add_block(self, index: int, source: int, documents: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Adds a prepared block, after it was added to the tables of documents; blocks must be added in order.

        Args:
          index: of the block.
          source: of the block.
          documents: the index of the document of each of its parts [num_parts].
          arrays: of the block.
        """
        if not len(documents):
            return
        names = [0, *(1 + self._rules.index(rule) for rule in self._metadata[index]["rules"])]
        rules = np.array(names, np.uint16)[arrays["part_rules"]]
        # Backwards, so that the first part of a document decides on its rule and its language.
        removed = np.flatnonzero(rules)[::-1]
        removed = removed[self._rule[documents[removed]] == 0]
        self._rule[documents[removed]] = rules[removed]
        np.add.at(self._removed_characters, documents, np.where(rules > 0, arrays["part_characters"], 0))
        codes = [group.language for group in unpack_groups(arrays["groups"])]
        groups = [self._groups.setdefault((source, code), len(self._groups)) for code in codes]
        begun = np.flatnonzero(self._tables.starts[slice(*self._tables.part_offsets[index : index + 2])])
        self._group[documents[begun]] = np.array(groups, np.uint32)[arrays["part_groups"][begun]]

    def removed(self) -> np.ndarray:
        """Whether each document is removed, bool [num_documents]."""
        count = self._tables.num_documents
        return (self._rule[:count] > 0) & (2 * self._removed_characters[:count] >= self._tables.characters[:count])

    def report(self) -> dict[str, Any]:
        """What was removed by rule, with examples, and read and removed by source and language; JSON values."""
        removed, text_bytes = self.removed(), self._tables.text_bytes[: self._tables.num_documents]
        rules = np.where(removed, self._rule[: len(removed)], 0).astype(np.int64)
        cells = self._group[: len(removed)] * np.int64(len(self._rules) + 1) + rules
        shape = (len(self._groups), len(self._rules) + 1)
        documents = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        sizes = np.bincount(cells, text_bytes, shape[0] * shape[1]).astype(np.int64).reshape(shape)

        def counts(which: tuple) -> dict[str, int]:
            return {"documents": int(documents[which].sum()), "text_bytes": int(sizes[which].sum())}

        examples = merge_examples(block["examples"] for block in self._metadata)
        lines = self._lines()
        return {
            "rules": {
                rule: counts((slice(None), 1 + index)) | {"examples": examples.get(rule, [])}
                for index, rule in enumerate(self._rules)
                if documents[:, 1 + index].any()
            },
            "line_rules": {rule: lines[rule] | {"examples": examples.get(rule, [])} for rule in sorted(lines)},
            "mixed_documents": sum(block["mixed_documents"] for block in self._metadata),
            "groups": [
                {
                    "source": source,
                    "language": language,
                    **counts((group,)),
                    "removed": {
                        rule: counts((group, 1 + index))
                        for index, rule in enumerate(self._rules)
                        if documents[group, 1 + index]
                    },
                }
                for (source, language), group in sorted(self._groups.items())
            ],
        }

    def removed_lines(self) -> dict[str, int]:
        """Number and bytes of the lines that were removed from documents."""
        counts = self._lines().values()
        return {name: sum(one[name] for one in counts) for name in ("lines", "text_bytes")}

    def _lines(self) -> dict[str, dict[str, int]]:
        """Number and bytes of removed lines by rule."""
        lines: dict[str, dict[str, int]] = {}
        for block in self._metadata:
            for rule, counted in block["lines"].items():
                total = lines.setdefault(rule, {"lines": 0, "text_bytes": 0})
                for name, count in counted.items():
                    total[name] += count
        return lines
