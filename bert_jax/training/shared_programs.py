"""Compiled programs that several runs of one process share: those of other seeds, data and schedules."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from bert_jax.training.programs import Programs
from bert_jax.training.task import Task

T = TypeVar("T")
MakePrograms = Callable[[Task, Mesh], Programs]


class SharedPrograms(Programs):
    """Programs that are shared with the other runs of the same `made`."""

    def __init__(self, task: Task, mesh: Mesh, made: dict[Any, Any]):
        """Compiles nothing yet."""
        super().__init__(task, mesh)
        self._made, config = made, task.config
        # All that programs depend on but for the phase. Tests change the vocabulary and the sums of tasks.
        self._same = (
            *(config.model, config.objective, config.optimizer, config.data.examples_per_row),
            config.finetune and (config.finetune.head, config.finetune.class_weights, config.finetune.label_smoothing),
            *(config.recovery.stable_steps, config.log.layers, mesh, getattr(task, "vocabulary", None)),
            *(type(task).sums, jax.config.read("jax_disable_most_optimizations")),
        )

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result of the first ``make()`` for this key in any run with the same programs."""
        return super().once((*key, self._same), make)


def share_programs() -> MakePrograms:
    """A `make_programs` for `pretraining.pretrain` and `evaluate`: the programs of all its runs are shared."""
    made: dict[Any, Any] = {}
    return lambda task, mesh: SharedPrograms(task, mesh, made)
