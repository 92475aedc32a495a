"""The compiled programs of a run: an update for each phase, and an evaluation for each depth."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, Phase
from bert_jax.training import micro_batch
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.sharding import put_rows, splittable
from bert_jax.training.step import TrainStep, abstract_arguments, make_eval_step, make_train_step
from bert_jax.training.task import Params, Task


class Programs:
    """Compiles what is needed when it is needed first; where memory is known, all updates before the first one."""

    def __init__(self, task: Task, mesh: Mesh, ledger: Ledger, asked: micro_batch.Asked):
        """Compiles nothing yet.

        Args:
          task, mesh: of the run.
          ledger: for what is found about memory.
          asked: micro-batch that the command gives.

        Raises:
          UserError: a phase's batches cannot be cut so.
        """
        self.task, self.mesh, self.ledger = task, mesh, ledger
        self.by_memory = asked == "auto" or micro_batch.device_memory(mesh.local_devices[0]) is not None
        self._accumulations = [
            micro_batch.given(phase, i, mesh, asked) or (None if self.by_memory else phase.fewest_micro_batches)
            for i, phase in enumerate(task.config.phases)
        ]
        self._updates: dict[int, tuple[TrainStep, int]] = {}
        self._evaluators: dict[ModelConfig, Callable[[Params], dict[str, float]]] = {}

    def fit_memory(self, first: int) -> None:
        """Compile the updates of all phases from `first` on, where the memory of the devices is known.

        Raises:
          UserError: a phase needs more than each device has.
        """
        if self.by_memory:
            for phase in range(first, len(self.task.config.phases)):
                self.update(phase)

    def update(self, phase: int) -> tuple[TrainStep, int]:
        """The update of a phase, and into how many micro-batches it cuts a full batch."""
        if phase not in self._updates:
            self._updates[phase] = self._compile(phase)
        return self._updates[phase]

    def _compile(self, index: int) -> tuple[TrainStep, int]:
        task = self.task.at(index)
        arguments = abstract_arguments(task, self.mesh)

        def compiled(accumulation: int) -> Any:
            return make_train_step(task, self.mesh, accumulation).lower(*arguments).compile()

        program, accumulation = None, self._accumulations[index]
        if accumulation is None:
            accumulation, program = micro_batch.fit(self.task.config, index, self.mesh, self.ledger, compiled)
        if program is None:
            program, needed = micro_batch.attempt(compiled, accumulation)
            micro_batch.check_fits(index, self.mesh, accumulation, needed)
        return program, accumulation

    def evaluator(self, phase: int) -> Callable[[Params], dict[str, float]]:
        """Held-out metrics as a function of parameters that are on the mesh, in a phase."""
        model = self.task.config.model_of(phase)
        if model not in self._evaluators:
            self._evaluators[model] = make_evaluator(self.task.at(phase), self.mesh)
        return self._evaluators[model]


def make_evaluator(task: Task, mesh: Mesh) -> Callable[[Params], dict[str, float]]:
    """Held-out metrics as a function of parameters that are on the mesh."""
    eval_step = make_eval_step(task, mesh)
    rows = splittable(task.config.evaluation.batch_size, mesh)

    def evaluate(params: Params) -> dict[str, float]:
        return task.evaluate(lambda batch: jax.device_get(eval_step(params, put_rows(batch, mesh, rows))), rows)

    return evaluate


def micro_batches_of(phase: Phase, size: int, accumulation: int) -> int:
    """Micro-batches that a batch of `size` rows fills, if the phase's largest is cut into `accumulation`."""
    return size * accumulation // phase.batch_size
