"""Rows of validation splits: always the same, whatever is trained on and how."""

from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.corpus_rows import CorpusRows
from bert_jax.data.cursor import Position
from bert_jax.data.row_reader import Marks, Rows, empty_rows

SEED = 0
"""Of examples and order: the same for every run, so that runs can be compared."""


class HeldOut:
    """Validation splits of a mixture, one after the other. One example in a row."""

    def __init__(self, corpora: Sequence[Corpus], data: DataConfig, marks: Marks, process: int = 0, processes: int = 1):
        """Plans nothing yet; of `data` only what an example is counts."""
        fixed = DataConfig(format=data.format, example_end=data.example_end, examples_per_row=1)
        self.corpora = [CorpusRows(corpus, fixed, marks, SEED) for corpus in corpora]
        self.marks, self.process, self.processes = marks, process, processes

    def count(self, corpus: CorpusRows, seq_len: int, limit: int) -> int:
        """Rows of a split, `limit` if there are more."""
        rows = 0
        for window in corpus.epoch(seq_len, 0):
            rows += len(window)
            if rows >= limit:
                return limit
        return rows

    def batches(self, seq_len: int, limit: int, batch_size: int) -> Iterator[tuple[str, Rows]]:
        """This process's share of every batch, with the name of its corpus; rows behind the last are empty.

        Args:
          seq_len: tokens per row.
          limit: rows of each corpus.
          batch_size: rows of a global batch; a multiple of the number of processes.
        """
        share = batch_size // self.processes
        first = self.process * share
        for corpus in self.corpora:
            total, position = self.count(corpus, seq_len, limit), Position()
            for start in range(0, total, batch_size):
                rows = empty_rows(share, seq_len, 1, self.marks.pad_id)
                rows["row"] = np.arange(first, first + share, dtype=np.int32)
                rows["mask_epoch"] = np.zeros(share, np.int32)
                here = min(max(total - start - first, 0), share)
                if here:
                    corpus.fill(rows, np.arange(here), position, before=first)
                yield corpus.corpus.name, rows
                position = corpus.advance(seq_len, position, min(batch_size, total - start))
