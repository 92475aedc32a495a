"""The arrays of a batch on the host.

Shapes: B rows, S positions, K packed examples per row.
"""

from typing import NamedTuple

import numpy as np

Rows = dict[str, np.ndarray]
"""The arrays of `RowArrays` by name; `row`, the index of each row in the global batch, int32 [B]; and `mask_epoch`, the
epoch that masks depend on, int32 [B]."""


class SpecialIds(NamedTuple):
    """Ids of the special tokens of a row."""

    pad_id: int
    cls_id: int
    sep_id: int


class RowArrays(NamedTuple):
    """What is read from a corpus, all int32."""

    input_ids: np.ndarray
    """[B, S]"""
    token_type_ids: np.ndarray
    """[B, S]: 1 in the second segment of a pair"""
    segment_ids: np.ndarray
    """[B, S]: index of the packed example, from 1; 0 is padding"""
    position_ids: np.ndarray
    """[B, S]: offset in the example"""
    example_id: np.ndarray
    """[B, K]: -1 where there is no example"""
    pair_labels: np.ndarray
    """[B, K]: 1 for a random or swapped segment; -1 where there is no pair"""
    cls_positions: np.ndarray
    """[B, K]"""


def empty_rows(count: int, seq_len: int, slots: int, pad_id: int, first: int = 0) -> Rows:
    """Rows of padding.

    Args:
      count: number of rows, B.
      seq_len: tokens per row, S.
      slots: examples per row, K.
      pad_id: id of [PAD].
      first: index of the first row in the global batch.
    """
    rows = {name: np.zeros((count, seq_len), np.int32) for name in ("token_type_ids", "segment_ids", "position_ids")}
    rows["input_ids"] = np.full((count, seq_len), pad_id, np.int32)
    rows["example_id"] = np.full((count, slots), -1, np.int32)
    rows["pair_labels"] = np.full((count, slots), -1, np.int32)
    rows["cls_positions"] = np.zeros((count, slots), np.int32)
    rows["row"] = np.arange(first, first + count, dtype=np.int32)
    rows["mask_epoch"] = np.zeros(count, np.int32)
    return rows
