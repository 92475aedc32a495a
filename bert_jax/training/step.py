"""One update and one evaluation, compiled: ``train_step(state, batch) -> (state, metrics)``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bert_jax.masking import Batch
from bert_jax.model.layers import Noise, fold
from bert_jax.objectives import Sum
from bert_jax.shapes import Array, Float
from bert_jax.training.schedules import learning_rate
from bert_jax.training.sharding import (
    DATA_AXES,
    gather_parameters,
    manual_specs,
    reduce_gradients,
    replicated,
    row_sharding,
    row_spec,
    sum_over_rows,
)
from bert_jax.training.state import TrainState, abstract_state, task_optimizer
from bert_jax.training.task import Params, Task

Metrics = dict[str, Float[Array, ""]]
DROPOUT_STREAM = 0x0D0


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(task: Task, mesh: Mesh, accumulation: int) -> TrainStep:
    """The compiled update. It donates the state: the one passed in must not be used again.

    Metrics, all global: for each of the task's sums its mean; `loss`; `tokens`, the number of real ones;
    `learning_rate`; and 2-norms over all parameters: `gradient_norm` (before clipping), `update_norm`,
    `parameter_norm`.

    Args:
      task: what is trained.
      mesh: where. Rows are split over data and fsdp.
      accumulation: micro-batches per update. Each device splits its own rows, and gradients cross devices
        once per update, not once per micro-batch.
    """
    abstract = abstract_state(task, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    optimizer = task_optimizer(task)
    schedule = learning_rate(task.config.phases)
    gradients_of = jax.shard_map(
        lambda params, step, batch: _local_gradients(task, mesh, shardings.params, accumulation, params, step, batch),
        mesh=mesh,
        in_specs=(manual_specs(shardings.params), replicated(mesh).spec, row_spec()),
        out_specs=(manual_specs(shardings.params), replicated(mesh).spec),
        axis_names=set(DATA_AXES),
        # With varying-axis checks on, jax would reduce the gradient of every replicated parameter inside
        # the backward pass, once per micro-batch; reduce_gradients does it once.
        check_vma=False,
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        gradients, metrics = gradients_of(state.params, state.step, batch)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {
            "learning_rate": schedule(state.step),
            "gradient_norm": optax.tree.norm(gradients),
            "update_norm": optax.tree.norm(updates),
            "parameter_norm": optax.tree.norm(params),
        }
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return jax.jit(
        train_step,
        in_shardings=(shardings, row_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def _local_gradients(
    task: Task, mesh: Mesh, shardings: Any, accumulation: int, shards: Params, step: Array, batch: Batch
) -> tuple[Any, Metrics]:
    """Gradient of the global loss from this device's rows, reduced over devices at the end."""
    params = gather_parameters(shards, shardings)
    batch = task.prepare(batch, evaluating=False)
    weights = sum_over_rows(task.loss_weights(batch), mesh)
    key = fold(jnp.uint32(task.config.seed), DROPOUT_STREAM, step)

    def micro_loss(params: Params, rows: Batch) -> tuple[Array, dict[str, Sum]]:
        sums = task.sums(params, rows, Noise(key, rows["row"]))
        return combine(sums, weights), sums

    def micro_step(rows: Batch) -> tuple[Params, dict[str, Sum]]:
        (_, sums), gradients = jax.value_and_grad(micro_loss, has_aux=True)(params, rows)
        return gradients, sums

    if accumulation == 1:  # no accumulators to fill and to add to
        gradients, sums = micro_step(batch)
    else:
        gradients, sums = _accumulate(micro_step, batch, accumulation)
    sums = sum_over_rows(sums, mesh)
    tokens = sum_over_rows((batch["segment_ids"] > 0).sum(), mesh)
    metrics = means(sums) | {"loss": combine(sums, weights), "tokens": tokens}
    return reduce_gradients(gradients, shardings), metrics


def _accumulate(micro_step: Callable[[Batch], Any], batch: Batch, accumulation: int) -> Any:
    """Sum of ``micro_step`` over equal parts of the rows, one part in memory at a time."""
    parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(micro_step, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(lambda sums, rows: (jax.tree.map(jnp.add, sums, micro_step(rows)), None), zeros, parts)
    return total


def combine(sums: dict[str, Sum], weights: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """The loss: each term's total over its global weight. A term that nothing counts for is 0."""
    return sum(sums[name].total / jnp.maximum(weight, 1.0) for name, weight in weights.items())


def means(sums: dict[str, Sum]) -> Metrics:
    """The one division of every summed quantity."""
    return {name: value.total / jnp.maximum(value.weight, 1.0) for name, value in sums.items()}


def make_eval_step(task: Task, mesh: Mesh) -> Callable[[Params, Batch], tuple[Batch, dict[str, Sum]]]:
    """Compiled scoring of one evaluation batch: the prepared rows and their global sums, without dropout."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(task, mesh).params)

    def eval_step(params: Params, batch: Batch) -> tuple[Batch, dict[str, Sum]]:
        batch = task.prepare(batch, evaluating=True)
        return batch, task.sums(params, batch, None)

    return jax.jit(eval_step, in_shardings=(shardings, row_sharding(mesh)), out_shardings=replicated(mesh))
