"""The training state, how it is made, abstractly and for real on a mesh, and what becomes of it in a new phase."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.training.divergence import Watch, new_phase, new_watch
from bert_jax.training.optimizers.optimizer import Optimizer, make_optimizer
from bert_jax.training.sharding import state_shardings
from bert_jax.training.stacking import repeat_layers, stack_depth
from bert_jax.training.task import Params, Task


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update reads and writes."""

    step: Any
    """Updates done, an int32 scalar. Any: jax also puts shapes, shardings and specs in the leaves' places."""
    params: Params
    """Nested dict of float32 arrays."""
    optimizer: Any
    """Moments, and the count that bias correction reads, as optax holds them."""
    watch: Watch
    """What guards against divergence."""


class Moments(NamedTuple):
    """Of Adam or LAMB, as trees of the parameters' shapes; numpy, float32."""

    step: int
    """Updates behind them: what bias correction counts."""
    mu: Params
    nu: Params


class InitialParams(NamedTuple):
    """What a run starts from, numpy arrays of the shapes of its first phase."""

    params: Params
    optimizer_state: Moments | None = None
    """None: new ones."""


def task_optimizer(task: Task) -> Optimizer:
    """The optimizer that the task's config asks for, in the task's phase."""
    config, params = task.config, jax.eval_shape(task.init_params, jax.random.key(0))
    frozen = config.phases[task.phase].frozen
    return make_optimizer(config.optimizer, params, frozen, layers=config.log.layers)


def abstract_state(task: Task, mesh: Mesh | AbstractMesh) -> TrainState:
    """Shapes, types and shardings of the state, without making it."""
    shapes = jax.eval_shape(_initializer(task), jax.random.key(0))
    shardings = state_shardings(mesh, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def init_state(task: Task, mesh: Mesh) -> TrainState:
    """A fresh state, each array made where it lives. The same numbers on every mesh."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(task, mesh))
    return jax.jit(_initializer(task), out_shardings=shardings)(jax.random.key(task.config.seed))


def state_from(task: Task, mesh: Mesh, start: InitialParams) -> TrainState:
    """A state at update 0 that starts from given parameters and, if there are any, moments."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(task, mesh))
    params = jax.device_put(start.params, shardings.params)
    state = jax.jit(_starter(task), out_shardings=shardings)(params)
    if start.optimizer_state is None:
        return state
    count, mu, nu = start.optimizer_state
    moments = state.optimizer._replace(count=np.asarray(count, np.int32), mu=mu, nu=nu)
    return dataclasses.replace(state, optimizer=jax.device_put(moments, shardings.optimizer))


def enter_phase(state: TrainState, task: Task, mesh: Mesh) -> TrainState:
    """The state with which the task's phase begins.

    Layers, and moments that are kept, are repeated up to the phase's depth; moments and the optimizer's count start
    anew if the phase says so; losses are watched anew.

    Args:
      state: at the end of the phase before.
      task: in the phase that begins.
      mesh: where.
    """
    phase, wanted = task.config.phases[task.phase], abstract_state(task, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, wanted)

    depth = stack_depth(wanted.params)

    def enter(state: TrainState) -> TrainState:
        params = repeat_layers(state.params, depth)
        moments = state.optimizer
        if phase.moments == "reset":
            mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        else:
            mu, nu = (repeat_layers(tree, depth) for tree in (moments.mu, moments.nu))
        count = jnp.zeros_like(moments.count) if phase.step_count == "reset" else moments.count
        return TrainState(state.step, params, moments._replace(count=count, mu=mu, nu=nu), new_phase(state.watch))

    return jax.jit(enter, out_shardings=shardings)(state)


def _initializer(task: Task) -> Callable[[jax.Array], TrainState]:
    start = _starter(task)
    return lambda key: start(task.init_params(key))


def _starter(task: Task) -> Callable[[Params], TrainState]:
    optimizer = task_optimizer(task)
    return lambda params: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), new_watch())
