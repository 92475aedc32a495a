"""The protocol of a training job. Pretraining is one Task; fine-tuning, distillation and probing are others."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from bert_jax.array_types import Array, Float, Int, Key, UInt32
from bert_jax.config import Config
from bert_jax.data.cursor import Cursor
from bert_jax.model.bert import Params
from bert_jax.model.dropout import DropoutKey
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch

if TYPE_CHECKING:
    # A step can be compiled and timed where no reader (grain, numba) is installed.
    from bert_jax.data.batches import HostBatch

Score = Callable[[dict[str, np.ndarray]], tuple[dict[str, np.ndarray], dict[str, tuple[float, float]]]]
"""Scores one evaluation batch: (scored rows, {name: (total, weight)})."""


@runtime_checkable
class Task(Protocol):
    """A training job. jax traces `init_params`, `prepare`, `loss_weight_sums`, `sums` and `score`."""

    config: Config
    phase: int
    """Phase of the run, which determines the model's depth; the last one unless `in_phase` was called."""

    def in_phase(self, phase: int) -> "Task":
        """The same task in another phase."""
        ...

    def init_params(self, key: Key[Array, ""]) -> Params:
        """New parameters."""
        ...

    def prepare(
        self, batch: Batch, seed: UInt32[Array, ""] | None, mask_counts: Int[Array, " n"] | None = None
    ) -> Batch:
        """Transform a device's rows before they are split into micro-batches, e.g. masking.

        `seed` is that of the run; None: the rows are held-out rows, which are the same for all runs. `mask_counts` are
        the step's predictions by length of example (`masked_lm.mask_counts_at`).
        """
        ...

    def loss_weight_sums(self, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Weight of each loss term over prepared rows. The loss is the sum over terms of total / global weight."""
        ...

    def sums(self, params: Params, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, WeightedSum]:
        """Sums of all quantities over prepared rows, at least of the terms of `loss_weight_sums`.

        A quantity with the path of a parameter that is not trained, e.g. running statistics, is no metric: its mean is
        the parameter's value after the step, unless the step is skipped.
        """
        ...

    def score(self, params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        """Prepared rows, with what `evaluate` needs of the model's output, and their sums, without dropout."""
        ...

    def blank_row(self) -> dict[str, np.ndarray]:
        """One row of padding, [1, ...]: names, types and shapes as in `batches` in the phase."""
        ...

    def batches(self, cursor: Cursor) -> Generator["HostBatch", None, None]:
        """The stream from `cursor` to the end of the run; closing it stops its readers."""
        ...

    def evaluate(self, score: Score, batch_size: int) -> dict[str, float]:
        """Held-out metrics, from global sums."""
        ...

    def step_flops(self, step: int) -> float:
        """Floating-point operations of the model in step `step`, counted analytically."""
        ...
