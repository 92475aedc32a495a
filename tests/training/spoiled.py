"""Rows of the training stream that make the loss go wrong, for runs that must survive it."""

import functools

import jax.numpy as jnp
import numpy as np

from bert_jax.data.batches import TrainingStream
from bert_jax.objectives.losses import WeightedSum
from bert_jax.training.pretraining_task import Pretraining

FACTORS = {-7: float("nan"), -8: float("inf"), -9: 3.0}
"""By a row's `mask_epoch`: what the loss of its micro-batch is multiplied with. One program has all of them: runs that
are compared must not differ in how they were compiled."""


def spoil(set_attribute, first: int, last: int, factor: float) -> None:
    """Multiply the loss of every micro-batch that holds one of the stream's rows [first, last); none if it is empty.

    Args:
      set_attribute: `setattr`, or monkeypatch's.
      first, last: rows, counted as a cursor counts them.
      factor: one of `FACTORS`.
    """
    batch = TrainingStream.batch
    code = next(code for code, known in FACTORS.items() if repr(known) == repr(factor))

    def spoiled_batch(self, cursor):
        rows = batch(self, cursor)
        place = cursor.rows + rows["row"]
        rows["mask_epoch"] = np.where((place >= first) & (place < last), code, rows["mask_epoch"]).astype(np.int32)
        return rows

    set_attribute(TrainingStream, "batch", spoiled_batch)
    set_attribute(Pretraining, "sums", _spoiled_sums(Pretraining.sums))


@functools.lru_cache
def _spoiled_sums(sums):
    """The same function each time, so that compiled programs can be shared."""

    def spoiled_sums(self, params, rows, dropout_key):
        found, times = sums(self, params, rows, dropout_key), 1.0
        for code, factor in FACTORS.items():
            times = jnp.where((rows["mask_epoch"] == code).any(), factor, times)
        return found | {"mlm_loss": WeightedSum(found["mlm_loss"].sum * times, found["mlm_loss"].weight)}

    return spoiled_sums
