"""Rows of validation splits: the same for every run, whatever its training data and schedule."""

from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.corpus_rows import CorpusRows
from bert_jax.data.cursor import CorpusPosition
from bert_jax.data.row_reader import Rows, SpecialIds, empty_rows

SEED = 0
"""Of examples and order: the same for every run, so that runs can be compared."""


class HeldOutRows:
    """Validation splits of a mixture, one after the other, with one example per row."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        data: DataConfig,
        special_ids: SpecialIds,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Plans nothing yet; only the format and the end of examples are read from `data`."""
        fixed = DataConfig(format=data.format, example_end=data.example_end, examples_per_row=1)
        self.corpora = [CorpusRows(corpus, fixed, special_ids, SEED) for corpus in corpora]
        self.special_ids, self.process_index, self.process_count = special_ids, process_index, process_count

    def count(self, corpus: CorpusRows, seq_len: int, limit: int) -> int:
        """Rows of a split, at most `limit`."""
        rows = 0
        for window in corpus.epoch_windows(seq_len, 0):
            rows += len(window)
            if rows >= limit:
                return limit
        return rows

    def batches(self, seq_len: int, limit: int, batch_size: int) -> Iterator[tuple[str, Rows]]:
        """This process's share of every batch, with the name of its corpus; rows after the last are empty.

        Args:
          seq_len: tokens per row.
          limit: rows of each corpus.
          batch_size: rows of a global batch; a multiple of the number of processes.
        """
        share = batch_size // self.process_count
        first = self.process_index * share
        for corpus in self.corpora:
            total, position = self.count(corpus, seq_len, limit), CorpusPosition()
            for start in range(0, total, batch_size):
                rows = empty_rows(share, seq_len, 1, self.special_ids.pad_id)
                rows["row"] = np.arange(first, first + share, dtype=np.int32)
                rows["mask_epoch"] = np.zeros(share, np.int32)
                used = min(max(total - start - first, 0), share)
                if used:
                    corpus.read_into(rows, np.arange(used), position, skip=first)
                yield corpus.corpus.name, rows
                position = corpus.advance(seq_len, position, min(batch_size, total - start))
