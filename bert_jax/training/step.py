"""The compiled train step and evaluation step: ``train_step(state, batch, inputs) -> (state, metrics)``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.model.layers import DropoutKey, hash_combine
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Batch
from bert_jax.shapes import Array, Float
from bert_jax.training.divergence import update_divergence_state
from bert_jax.training.optimizers.optimizer import Optimizer, make_optimizer
from bert_jax.training.optimizers.param_rules import param_rules
from bert_jax.training.sharding import (
    DATA_AXES,
    gather_parameters,
    manual_specs,
    put_replicated,
    reduce_gradients,
    replicated,
    row_sharding,
    row_spec,
    sum_over_rows,
)
from bert_jax.training.state import TrainState
from bert_jax.training.task import Params, Task

Metrics = dict[str, Float[Array, ""]]
DROPOUT_STREAM = 0x0D0


class StepInputs(NamedTuple):
    """Inputs that the host sets for each step without recompilation: replicated scalars on the device."""

    learning_rate: Any
    """Of this step, float32."""
    micro_batches: Any
    """Number of the batch's micro-batches that hold rows, int32; fewer than all only during a batch ramp."""


def put_step_inputs(learning_rate: float, micro_batches: int, mesh: Mesh) -> StepInputs:
    """The inputs of one step, on the device."""
    return put_replicated(StepInputs(np.asarray(learning_rate, np.float32), np.asarray(micro_batches, np.int32)), mesh)


TrainStep = Callable[[TrainState, Batch, StepInputs], tuple[TrainState, Metrics]]


def task_optimizer(task: Task) -> Optimizer:
    """The optimizer of the task's config, in the task's phase."""
    config, params = task.config, jax.eval_shape(task.init_params, jax.random.key(0))
    frozen = config.phases[task.phase].frozen
    return make_optimizer(config.optimizer, params, frozen, layers=config.log.layers)


def make_train_step(task: Task, abstract: TrainState, accumulation: int) -> jax.stages.Wrapped:
    """The jitted train step of the task's phase. It donates the state: the argument must not be used again.

    Metrics, all global: the mean of each of the task's sums; `loss`; `tokens`, the number of tokens without padding;
    `learning_rate`; those of the optimizer (training/optimizers/optimizer.py); and those of divergence detection
    (training/divergence.py): `skipped_steps` since the start of the run, `consecutive_skipped`, `loss_rise`.

    If the loss or the gradient is not finite, parameters and moments stay unchanged, bit for bit.

    Args:
      task: the task in the phase to compile.
      abstract: shapes and shardings of the state in that phase. The data and fsdp axes of its mesh split the rows.
      accumulation: micro-batches per step. Each device splits its rows, and gradients cross devices once per step. In
        a phase with a batch ramp, `StepInputs.micro_batches` of them are computed, and the other rows are padding.
    """
    mesh, shardings = abstract.step.sharding.mesh, jax.tree.map(lambda x: x.sharding, abstract)
    optimizer = task_optimizer(task)
    stable_steps = task.config.recovery.stable_steps
    ramps = task.config.phases[task.phase].start_batch_size is not None

    def local_gradients(params: Params, step: Array, batch: Batch, micro_batches: Array) -> tuple[Any, Metrics]:
        micro_batches = micro_batches if ramps else accumulation
        return _local_gradients(task, mesh, shardings.params, (micro_batches, accumulation), params, step, batch)

    everywhere = replicated(mesh).spec
    gradients_of = jax.shard_map(
        local_gradients,
        mesh=mesh,
        in_specs=(manual_specs(shardings.params), everywhere, row_spec(), everywhere),
        out_specs=(manual_specs(shardings.params), everywhere),
        axis_names=set(DATA_AXES),
        # With check_vma, jax would reduce the gradient of every replicated parameter inside
        # the backward pass, once per micro-batch; reduce_gradients does it once.
        check_vma=False,
    )

    def train_step(state: TrainState, batch: Batch, inputs: StepInputs) -> tuple[TrainState, Metrics]:
        gradients, metrics = gradients_of(state.params, state.step, batch, inputs.micro_batches)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings.params)
        finite = jnp.isfinite(metrics["loss"])
        rate = inputs.learning_rate
        params, moments, norms = optimizer.update(gradients, state.optimizer, state.params, rate, finite)
        skipped = norms.pop("skipped") > 0
        divergence, rise = update_divergence_state(state.divergence, metrics["loss"], skipped, stable_steps)
        metrics |= norms | {
            "learning_rate": rate,
            "skipped_steps": divergence.skipped_steps,
            "consecutive_skipped": divergence.consecutive_skipped,
            "loss_rise": rise,
        }
        return TrainState(state.step + 1, params, moments, divergence), metrics

    return jax.jit(
        train_step,
        in_shardings=(shardings, row_sharding(mesh), replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def _local_gradients(
    task: Task,
    mesh: Mesh | AbstractMesh,
    shardings: Any,
    micro_batches: tuple[Array | int, int],
    param_shards: Params,
    step: Array,
    batch: Batch,
) -> tuple[Any, Metrics]:
    """Gradient of the global loss from this device's rows, reduced over devices at the end.

    `micro_batches` are (how many to compute, how many the rows are split into).
    """
    params = gather_parameters(param_shards, shardings)
    batch = task.prepare(batch, evaluating=False)
    weights = sum_over_rows(task.loss_weights(batch), mesh)
    key = hash_combine(jnp.uint32(task.config.seed), DROPOUT_STREAM, step)
    rules = param_rules(params, frozen=task.config.phases[task.phase].frozen)

    def micro_loss(params: Params, rows: Batch) -> tuple[Array, dict[str, WeightedSum]]:
        # Frozen parameters need no backward pass.
        params = jax.tree.map(lambda x, rule: jax.lax.stop_gradient(x) if rule.frozen else x, params, rules)
        sums = task.sums(params, rows, DropoutKey(key, rows["row"]))
        return combine(sums, weights), sums

    def micro_step(rows: Batch) -> tuple[Params, dict[str, WeightedSum]]:
        (_, sums), gradients = jax.value_and_grad(micro_loss, has_aux=True)(params, rows)
        return gradients, sums

    if micro_batches[1] == 1:  # no accumulators needed
        gradients, sums = micro_step(batch)
    else:
        gradients, sums = _accumulate(micro_step, batch, *micro_batches)
    sums = sum_over_rows(sums, mesh)
    tokens = sum_over_rows((batch["segment_ids"] > 0).sum(), mesh)
    metrics = means(sums) | {"loss": combine(sums, weights), "tokens": tokens}
    return reduce_gradients(gradients, shardings), metrics


def _accumulate(micro_step: Callable[[Batch], Any], batch: Batch, micro_batches: Array | int, accumulation: int) -> Any:
    """Sum of ``micro_step`` over the first `micro_batches` of `accumulation` equal parts of the rows, one at a time."""
    parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(micro_step, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(index: Array, sums: Any) -> Any:
        rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), parts)
        return jax.tree.map(jnp.add, sums, micro_step(rows))

    return jax.lax.fori_loop(0, micro_batches, add, zeros)


def combine(sums: dict[str, WeightedSum], weights: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """The loss: the sum over terms of total / global weight. A term of weight 0 counts as 0."""
    return sum(sums[name].sum / jnp.maximum(weight, 1.0) for name, weight in weights.items())


def means(sums: dict[str, WeightedSum]) -> Metrics:
    """Mean of every summed quantity: total / weight."""
    return {name: value.sum / jnp.maximum(value.weight, 1.0) for name, value in sums.items()}


def make_eval_step(
    task: Task, abstract_params: Params
) -> Callable[[Params, Batch], tuple[Batch, dict[str, WeightedSum]]]:
    """The jitted evaluation step: the scored rows of a batch and their global sums (`Task.score`)."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_params)
    mesh = jax.tree.leaves(shardings)[0].mesh

    def eval_step(params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        return task.score(params, task.prepare(batch, evaluating=True))

    return jax.jit(eval_step, in_shardings=(shardings, row_sharding(mesh)), out_shardings=replicated(mesh))
