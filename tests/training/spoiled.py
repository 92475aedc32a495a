"""Rows of the training stream that make the loss go wrong, for runs that must survive it."""

import functools

import jax.numpy as jnp
import numpy as np

from bert_jax.data.batches import Stream
from bert_jax.objectives import Sum
from bert_jax.training.pretraining_task import Pretraining

SPOILED = -7
"""As a row's `mask_epoch`: the loss of its micro-batch is multiplied."""


def spoil(set_attribute, first: int, last: int, factor: float) -> None:
    """Multiply the loss of every micro-batch that holds one of the stream's rows [first, last).

    Args:
      set_attribute: `setattr`, or monkeypatch's.
      first, last: rows, counted as a cursor counts them.
      factor: e.g. NaN.
    """
    batch = Stream.batch

    def spoiled_batch(self, cursor):
        rows = batch(self, cursor)
        place = cursor.rows + rows["row"]
        rows["mask_epoch"] = np.where((place >= first) & (place < last), SPOILED, rows["mask_epoch"]).astype(np.int32)
        return rows

    set_attribute(Stream, "batch", spoiled_batch)
    set_attribute(Pretraining, "sums", _spoiled_sums(Pretraining.sums, factor))


@functools.lru_cache
def _spoiled_sums(sums, factor: float):
    """The same function for the same factor, so that compiled programs can be shared."""

    def spoiled_sums(self, params, rows, noise):
        found = sums(self, params, rows, noise)
        times = jnp.where((rows["mask_epoch"] == SPOILED).any(), factor, 1.0)
        return found | {"mlm_loss": Sum(found["mlm_loss"].total * times, found["mlm_loss"].weight)}

    return spoiled_sums
