"""The training state, and how it is made: abstractly, and for real on a mesh."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.schedules import learning_rate
from bert_jax.training.sharding import state_shardings
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
    """Moments and counts, as optax holds them."""


def task_optimizer(task: Task) -> optax.GradientTransformation:
    """The optimizer that the task's config asks for."""
    config = task.config
    params = jax.eval_shape(task.init_params, jax.random.key(0))
    return make_optimizer(config.optimizer, learning_rate(config.phases), params)


def abstract_state(task: Task, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the state, without making it."""
    shapes = jax.eval_shape(_initializer(task), jax.random.key(0))
    shardings = state_shardings(mesh, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def init_state(task: Task, mesh: Mesh) -> TrainState:
    """A fresh state, each array made where it lives. The same numbers on every mesh."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(task, mesh))
    return jax.jit(_initializer(task), out_shardings=shardings)(jax.random.key(task.config.seed))


def _initializer(task: Task):
    optimizer = task_optimizer(task)

    def initialize(key) -> TrainState:
        params = task.init_params(key)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return initialize
