"""The programs of a run: its abstract state, initial state, train steps and evaluations, each made once."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from bert_jax.errors import UserError
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.training.divergence import init_divergence_state, reset_for_phase
from bert_jax.training.param_paths import path_name
from bert_jax.training.sharding import put_rows, replicated, round_up_to_shards, row_sharding, state_shardings
from bert_jax.training.state import InitialParams, TrainState, repeat_layers, stack_depth
from bert_jax.training.step import StepInputs, TrainStep, make_eval_step, make_train_step, task_optimizer
from bert_jax.training.task import Params, Task

T = TypeVar("T")


class Programs:
    """A task on a mesh, and what is compiled for it. Every program is made at its first use.

    `phase` is the index of a phase of the task's config. On an abstract mesh, steps can be traced and not compiled.
    """

    def __init__(self, task: Task, mesh: Mesh | AbstractMesh):
        """Compiles nothing yet."""
        self.task, self.mesh = task, mesh
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The result of the first ``make()`` for this key. Subclasses can share results between runs."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def abstract_state(self, phase: int) -> TrainState:
        """Shapes, types and shardings of the state in a phase, without allocating it.

        Raises:
          UserError: a pattern of the config or of the phase matches no parameter.
        """

        def make() -> TrainState:
            shapes = jax.eval_shape(_initializer(self.task.at(phase)), jax.random.key(0))
            shardings = state_shardings(self.mesh, shapes)
            return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

        return self.once(("abstract state", phase), make)

    def init_state(self, phase: int = 0) -> TrainState:
        """A new state; each array is initialised in its sharding. The values are the same on every mesh."""
        initializer = self.once(
            ("initializer", phase),
            lambda: jax.jit(_initializer(self.task.at(phase)), out_shardings=self._shardings(phase)),
        )
        return initializer(jax.random.key(self.task.config.seed))

    def state_from_initial(self, initial: InitialParams, phase: int = 0) -> TrainState:
        """A state at step 0 with given parameters and, if there are any, given moments."""
        shardings = self._shardings(phase)
        params = jax.device_put(initial.params, shardings.params)
        state = jax.jit(_with_new_optimizer(self.task.at(phase)), out_shardings=shardings)(params)
        if initial.optimizer_state is None:
            return state
        if not isinstance(state.optimizer, optax.ScaleByAdamState):
            name = self.task.config.optimizer.name
            raise UserError(f"start.optimizer_state keep: {name} has no moments of Adam: set start.optimizer_state new")
        count, mu, nu = initial.optimizer_state
        moments = state.optimizer._replace(count=np.asarray(count, np.int32), mu=mu, nu=nu)
        return dataclasses.replace(state, optimizer=jax.device_put(moments, shardings.optimizer))

    def enter_phase(self, state: TrainState, phase: int) -> TrainState:
        """The state at the beginning of a phase, from the state at the end of the phase before.

        Layers, and moments that are kept, are repeated up to the phase's depth; moments and the optimizer's step count
        are reset if the phase's config says so; the loss average is reset.
        """
        settings = self.task.config.phases[phase]
        depth = stack_depth(self.abstract_state(phase).params)

        def enter(state: TrainState) -> TrainState:
            params, kept = (repeat_layers(tree, depth) for tree in (state.params, state.optimizer))
            new = task_optimizer(self.task.at(phase)).init(params)
            optimizer = jax.tree_util.tree_map_with_path(choose, kept, new)
            return TrainState(state.step, params, optimizer, reset_for_phase(state.divergence))

        def choose(path: tuple[Any, ...], kept: jax.Array, new: jax.Array) -> jax.Array:
            is_count = path_name(path).rpartition("/")[2] == "count"
            return new if (settings.step_count if is_count else settings.moments) == "reset" else kept

        program = self.once(("enter", phase), lambda: jax.jit(enter, out_shardings=self._shardings(phase)))
        return program(state)

    def step_arguments(self, phase: int) -> tuple[TrainState, Batch, StepInputs]:
        """Shapes, types and shardings of the arguments of a phase's train step."""
        size = self.task.config.phases[phase].batch_size
        rows, everywhere = row_sharding(self.mesh), replicated(self.mesh)
        batch = {
            name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype, sharding=rows)
            for name, array in self.task.at(phase).blank_row().items()
        }
        inputs = StepInputs(*(jax.ShapeDtypeStruct((), kind, sharding=everywhere) for kind in (jnp.float32, jnp.int32)))
        return self.abstract_state(phase), batch, inputs

    def trace_train_step(self, phase: int, accumulation: int) -> jax.stages.Traced:
        """The traced train step of a phase, to lower for any platform (`step.make_train_step`)."""
        step = make_train_step(self.task.at(phase), self.abstract_state(phase), accumulation)
        return step.trace(*self.step_arguments(phase))

    def train_step(self, phase: int, accumulation: int) -> TrainStep:
        """The compiled train step of a phase with this number of micro-batches."""
        return self.once(
            ("train step", phase, accumulation), lambda: self.trace_train_step(phase, accumulation).lower().compile()
        )

    def eval_step(self, phase: int) -> Callable[[Params, Batch], tuple[Batch, dict[str, WeightedSum]]]:
        """The jitted evaluation step for the depth of a phase (`step.make_eval_step`)."""
        return self.once(
            ("eval step", self.task.config.model_of(phase)),
            lambda: make_eval_step(self.task.at(phase), self.abstract_state(phase).params),
        )

    def evaluate(self, params: Params, phase: int) -> dict[str, float]:
        """Held-out metrics of parameters on the mesh, which have the depth of a phase."""
        rows, step = round_up_to_shards(self.task.config.evaluation.batch_size, self.mesh), self.eval_step(phase)
        return self.task.at(phase).evaluate(
            lambda batch: jax.device_get(step(params, put_rows(batch, self.mesh, rows))), rows
        )

    def _shardings(self, phase: int) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract_state(phase))


def _initializer(task: Task) -> Callable[[jax.Array], TrainState]:
    to_state = _with_new_optimizer(task)
    return lambda key: to_state(task.init_params(key))


def _with_new_optimizer(task: Task) -> Callable[[Params], TrainState]:
    optimizer = task_optimizer(task)
    return lambda params: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), init_divergence_state())
