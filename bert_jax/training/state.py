"""The training state: its shapes and shardings, its initialisation on a mesh, and its change at a new phase."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.training.divergence import DivergenceState, init_divergence_state, reset_for_phase
from bert_jax.training.optimizers.optimizer import Optimizer, make_optimizer
from bert_jax.training.sharding import state_shardings
from bert_jax.training.stacking import repeat_layers, stack_depth
from bert_jax.training.task import Params, Task


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a train step reads and writes."""

    step: Any
    """Steps done, an int32 scalar. Any: the leaves can also be shapes, shardings or specs."""
    params: Params
    """Nested dict of float32 arrays."""
    optimizer: Any
    """Moments, and the step count for bias correction: an optax.ScaleByAdamState."""
    divergence: DivergenceState
    """Loss average and counts of skipped steps."""


class Moments(NamedTuple):
    """Optimizer state of Adam or LAMB: trees with the shapes of the parameters; numpy, float32."""

    step: int
    """Steps done, for bias correction."""
    mu: Params
    nu: Params


class InitialParams(NamedTuple):
    """Initial parameters and optimizer state of a run: numpy arrays with the shapes of its first phase."""

    params: Params
    optimizer_state: Moments | None = None
    """None: a new one."""


def task_optimizer(task: Task) -> Optimizer:
    """The optimizer of the task's config, in the task's phase."""
    config, params = task.config, jax.eval_shape(task.init_params, jax.random.key(0))
    frozen = config.phases[task.phase].frozen
    return make_optimizer(config.optimizer, params, frozen, layers=config.log.layers)


def abstract_state(task: Task, mesh: Mesh | AbstractMesh) -> TrainState:
    """Shapes, types and shardings of the state, without allocating it."""
    shapes = jax.eval_shape(_initializer(task), jax.random.key(0))
    shardings = state_shardings(mesh, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def init_state(task: Task, mesh: Mesh) -> TrainState:
    """A new state; each array is initialised in its sharding. The values are the same on every mesh."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(task, mesh))
    return jax.jit(_initializer(task), out_shardings=shardings)(jax.random.key(task.config.seed))


def state_from_initial(task: Task, mesh: Mesh, initial: InitialParams) -> TrainState:
    """A state at step 0 with given parameters and, if there are any, given moments."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(task, mesh))
    params = jax.device_put(initial.params, shardings.params)
    state = jax.jit(_with_new_optimizer(task), out_shardings=shardings)(params)
    if initial.optimizer_state is None:
        return state
    count, mu, nu = initial.optimizer_state
    moments = state.optimizer._replace(count=np.asarray(count, np.int32), mu=mu, nu=nu)
    return dataclasses.replace(state, optimizer=jax.device_put(moments, shardings.optimizer))


def adapt_state_to_phase(state: TrainState, task: Task, mesh: Mesh) -> TrainState:
    """The state at the beginning of the task's phase.

    Layers, and moments that are kept, are repeated up to the phase's depth; moments and the optimizer's step count are
    reset if the phase's config says so; the loss average is reset.

    Args:
      state: at the end of the phase before.
      task: in the phase that begins.
      mesh: of the run.
    """
    phase, abstract = task.config.phases[task.phase], abstract_state(task, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    depth = stack_depth(abstract.params)

    def enter(state: TrainState) -> TrainState:
        params = repeat_layers(state.params, depth)
        moments = state.optimizer
        if phase.moments == "reset":
            mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        else:
            mu, nu = (repeat_layers(tree, depth) for tree in (moments.mu, moments.nu))
        count = jnp.zeros_like(moments.count) if phase.step_count == "reset" else moments.count
        moments = moments._replace(count=count, mu=mu, nu=nu)
        return TrainState(state.step, params, moments, reset_for_phase(state.divergence))

    return jax.jit(enter, out_shardings=shardings)(state)


def _initializer(task: Task) -> Callable[[jax.Array], TrainState]:
    to_state = _with_new_optimizer(task)
    return lambda key: to_state(task.init_params(key))


def _with_new_optimizer(task: Task) -> Callable[[Params], TrainState]:
    optimizer = task_optimizer(task)
    return lambda params: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), init_divergence_state())
