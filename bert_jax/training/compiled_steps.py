"""The compiled steps of a run: a train step for each phase, and an evaluation step for each depth."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, Phase
from bert_jax.training import micro_batch
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.sharding import put_rows, round_up_to_shards
from bert_jax.training.step import TrainStep, abstract_step_arguments, make_eval_step, make_train_step
from bert_jax.training.task import Params, Task


class CompiledSteps:
    """Compiles steps at first use; if device memory is known, compiles all train steps before the first step."""

    def __init__(self, task: Task, mesh: Mesh, ledger: Ledger, request: micro_batch.MicroBatchRequest):
        """Compiles nothing yet.

        Args:
          task, mesh: of the run.
          ledger: keeps the numbers of micro-batches that fit into memory.
          request: micro-batch from the command line.

        Raises:
          UserError: a phase's batches cannot be split into micro-batches of this size.
        """
        self.task, self.mesh, self.ledger = task, mesh, ledger
        self.memory_known = request == "auto" or micro_batch.device_memory(mesh.local_devices[0]) is not None
        self._accumulations = [
            micro_batch.requested_accumulation(phase, i, mesh, request)
            or (None if self.memory_known else phase.fewest_micro_batches)
            for i, phase in enumerate(task.config.phases)
        ]
        self._train_steps: dict[int, tuple[TrainStep, int]] = {}
        self._evaluators: dict[ModelConfig, Callable[[Params], dict[str, float]]] = {}

    def compile_ahead(self, first: int) -> None:
        """Compile the train steps of all phases from `first` on, if the memory of the devices is known.

        Raises:
          UserError: a phase needs more memory than a device has.
        """
        if self.memory_known:
            for phase in range(first, len(self.task.config.phases)):
                self.train_step(phase)

    def train_step(self, phase: int) -> tuple[TrainStep, int]:
        """The compiled train step of a phase, and the number of micro-batches of a full batch."""
        if phase not in self._train_steps:
            self._train_steps[phase] = self._compile(phase)
        return self._train_steps[phase]

    def _compile(self, index: int) -> tuple[TrainStep, int]:
        task = self.task.at(index)
        arguments = abstract_step_arguments(task, self.mesh)

        def compile_step(accumulation: int) -> Any:
            return make_train_step(task, self.mesh, accumulation).lower(*arguments).compile()

        program, accumulation = None, self._accumulations[index]
        if accumulation is None:
            accumulation, program = micro_batch.fit_to_memory(
                self.task.config, index, self.mesh, self.ledger, compile_step
            )
        if program is None:
            program, needed = micro_batch.try_compile(compile_step, accumulation)
            micro_batch.check_fits(index, self.mesh, accumulation, needed)
        return program, accumulation

    def evaluator(self, phase: int) -> Callable[[Params], dict[str, float]]:
        """A function from parameters on the mesh to held-out metrics, for a phase."""
        model = self.task.config.model_of(phase)
        if model not in self._evaluators:
            self._evaluators[model] = make_evaluator(self.task.at(phase), self.mesh)
        return self._evaluators[model]


def make_evaluator(task: Task, mesh: Mesh) -> Callable[[Params], dict[str, float]]:
    """A function from parameters on the mesh to held-out metrics."""
    eval_step = make_eval_step(task, mesh)
    rows = round_up_to_shards(task.config.evaluation.batch_size, mesh)

    def evaluate(params: Params) -> dict[str, float]:
        return task.evaluate(lambda batch: jax.device_get(eval_step(params, put_rows(batch, mesh, rows))), rows)

    return evaluate


def micro_batches_of(phase: Phase, size: int, accumulation: int) -> int:
    """Micro-batches of a batch of `size` rows, if the phase's full batch has `accumulation`."""
    return size * accumulation // phase.batch_size
