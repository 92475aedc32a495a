"""One update and one evaluation, compiled: ``train_step(state, batch, dials) -> (state, metrics)``."""

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
from bert_jax.training.divergence import observe
from bert_jax.training.optimizers.param_rules import treatments
from bert_jax.training.sharding import (
    DATA_AXES,
    gather_parameters,
    manual_specs,
    put_everywhere,
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


class Dials(NamedTuple):
    """What the host sets for each update without compiling anew. On the device: scalars, on all devices alike."""

    learning_rate: Any
    """Of this update, float32."""
    micro_batches: Any
    """How many of the batch's micro-batches hold rows, int32; fewer than all only while the batch size ramps up."""


def put_dials(learning_rate: float, micro_batches: int, mesh: Mesh) -> Dials:
    """The dials of one update, on the device."""
    return put_everywhere(Dials(np.asarray(learning_rate, np.float32), np.asarray(micro_batches, np.int32)), mesh)


def abstract_arguments(task: Task, mesh: Mesh | AbstractMesh) -> tuple[TrainState, Batch, Dials]:
    """What the train step of the task's phase is called with: shapes, types and shardings."""
    rows, size, everywhere = row_sharding(mesh), task.config.phases[task.phase].batch_size, replicated(mesh)
    batch = {
        name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype, sharding=rows)
        for name, array in task.blank_row().items()
    }
    dials = Dials(*(jax.ShapeDtypeStruct((), kind, sharding=everywhere) for kind in (jnp.float32, jnp.int32)))
    return abstract_state(task, mesh), batch, dials


TrainStep = Callable[[TrainState, Batch, Dials], tuple[TrainState, Metrics]]


def make_train_step(task: Task, mesh: Mesh | AbstractMesh, accumulation: int) -> TrainStep:
    """The compiled update of the task's phase. It donates the state: the one passed in must not be used again.

    Metrics, all global: for each of the task's sums its mean; `loss`; `tokens`, the number of real ones;
    `learning_rate`; the optimizer's (training/optimizer.py); and what is watched (training/divergence.py):
    `skipped_updates` since the start of the run, `skipped_in_a_row`, `loss_rise`.

    If the loss or the gradient is not finite, parameters and moments stay as they are, bit for bit.

    Args:
      task: what is trained, in the phase that is meant.
      mesh: where. Rows are split over data and fsdp. On an abstract mesh the program can be lowered, not run.
      accumulation: micro-batches per update. Each device splits its own rows, and gradients cross devices
        once per update, not once per micro-batch. In a phase with a batch ramp the number is a bound:
        `Dials.micro_batches` says how many are computed, and the other rows of the batch are padding.
    """
    abstract = abstract_state(task, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    optimizer = task_optimizer(task)
    config = task.config
    ramps = config.phases[task.phase].start_batch_size is not None

    def local_gradients(params: Params, step: Array, batch: Batch, turns: Array) -> tuple[Any, Metrics]:
        turns = turns if ramps else accumulation
        return _local_gradients(task, mesh, shardings.params, (turns, accumulation), params, step, batch)

    everywhere = replicated(mesh).spec
    gradients_of = jax.shard_map(
        local_gradients,
        mesh=mesh,
        in_specs=(manual_specs(shardings.params), everywhere, row_spec(), everywhere),
        out_specs=(manual_specs(shardings.params), everywhere),
        axis_names=set(DATA_AXES),
        # With varying-axis checks on, jax would reduce the gradient of every replicated parameter inside
        # the backward pass, once per micro-batch; reduce_gradients does it once.
        check_vma=False,
    )

    def train_step(state: TrainState, batch: Batch, dials: Dials) -> tuple[TrainState, Metrics]:
        gradients, metrics = gradients_of(state.params, state.step, batch, dials.micro_batches)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings.params)
        finite = jnp.isfinite(metrics["loss"])
        params, moments, norms = optimizer.update(gradients, state.optimizer, state.params, dials.learning_rate, finite)
        skipped = norms.pop("skipped") > 0
        watch, rise = observe(state.watch, metrics["loss"], skipped, config.rescue.calm_steps)
        metrics |= norms | {
            "learning_rate": dials.learning_rate,
            "skipped_updates": watch.skipped,
            "skipped_in_a_row": watch.in_a_row,
            "loss_rise": rise,
        }
        return TrainState(state.step + 1, params, moments, watch), metrics

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
    turns: tuple[Array | int, int],
    shards: Params,
    step: Array,
    batch: Batch,
) -> tuple[Any, Metrics]:
    """Gradient of the global loss from this device's rows, reduced over devices at the end."""
    params = gather_parameters(shards, shardings)
    batch = task.prepare(batch, evaluating=False)
    weights = sum_over_rows(task.loss_weights(batch), mesh)
    key = hash_combine(jnp.uint32(task.config.seed), DROPOUT_STREAM, step)
    treated = treatments(params, frozen=task.config.phases[task.phase].frozen)

    def micro_loss(params: Params, rows: Batch) -> tuple[Array, dict[str, WeightedSum]]:
        # What is frozen needs no backward pass.
        params = jax.tree.map(lambda x, t: jax.lax.stop_gradient(x) if t.frozen else x, params, treated)
        sums = task.sums(params, rows, DropoutKey(key, rows["row"]))
        return combine(sums, weights), sums

    def micro_step(rows: Batch) -> tuple[Params, dict[str, WeightedSum]]:
        (_, sums), gradients = jax.value_and_grad(micro_loss, has_aux=True)(params, rows)
        return gradients, sums

    if turns[1] == 1:  # no accumulators to fill and to add to
        gradients, sums = micro_step(batch)
    else:
        gradients, sums = _accumulate(micro_step, batch, *turns)
    sums = sum_over_rows(sums, mesh)
    tokens = sum_over_rows((batch["segment_ids"] > 0).sum(), mesh)
    metrics = means(sums) | {"loss": combine(sums, weights), "tokens": tokens}
    return reduce_gradients(gradients, shardings), metrics


def _accumulate(micro_step: Callable[[Batch], Any], batch: Batch, turns: Array | int, accumulation: int) -> Any:
    """Sum of ``micro_step`` over the first `turns` of equal parts of the rows, one part in memory at a time."""
    parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(micro_step, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(turn: Array, sums: Any) -> Any:
        rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, turn, keepdims=False), parts)
        return jax.tree.map(jnp.add, sums, micro_step(rows))

    return jax.lax.fori_loop(0, turns, add, zeros)


def combine(sums: dict[str, WeightedSum], weights: dict[str, Float[Array, ""]]) -> Float[Array, ""]:
    """The loss: each term's total over its global weight. A term that nothing counts for is 0."""
    return sum(sums[name].sum / jnp.maximum(weight, 1.0) for name, weight in weights.items())


def means(sums: dict[str, WeightedSum]) -> Metrics:
    """The one division of every summed quantity."""
    return {name: value.sum / jnp.maximum(value.weight, 1.0) for name, value in sums.items()}


def make_eval_step(task: Task, mesh: Mesh) -> Callable[[Params, Batch], tuple[Batch, dict[str, WeightedSum]]]:
    """Compiled scoring of one evaluation batch: the prepared rows and their global sums, without dropout."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(task, mesh).params)

    def eval_step(params: Params, batch: Batch) -> tuple[Batch, dict[str, WeightedSum]]:
        batch = task.prepare(batch, evaluating=True)
        return batch, task.sums(params, batch, None)

    return jax.jit(eval_step, in_shardings=(shardings, row_sharding(mesh)), out_shardings=replicated(mesh))
