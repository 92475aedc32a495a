"""Collectives that tests search for in compiled programs, and the control program that has them."""

import re
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.planning.hlo import Collective
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import combine
from bert_jax.training.sharding import DATA_AXES

REDUCTIONS = ("all-reduce", "reduce-scatter")


def lower_naive(task: Pretraining, params: Any, rows: Any, accumulation: int) -> jax.stages.Lowered:
    """Gradients summed over micro-batches under automatic sharding: each micro-batch has its own reduction, and split
    parameters are gathered for each.

    Args:
      task: whose losses.
      params, rows: with shardings, abstract or real.
      accumulation: micro-batches.
    """
    mesh = rows["row"].sharding.mesh
    split = NamedSharding(mesh, PartitionSpec(None, DATA_AXES))

    def gradients_of(params, batch):
        batch = task.prepare(batch, jax.numpy.uint32(task.config.seed))
        weights = task.loss_weight_sums(batch)
        parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
        parts = jax.lax.with_sharding_constraint(parts, split)

        def add(total, part):
            gradients = jax.grad(lambda params: combine(task.sums(params, part, None), weights))(params)
            return jax.tree.map(lambda a, b: a + b, total, gradients), None

        return jax.lax.scan(add, jax.tree.map(lambda x: x * 0, params), parts)[0]

    shardings = jax.tree.map(lambda x: x.sharding, (params, rows))
    return jax.jit(gradients_of, in_shardings=shardings, out_shardings=shardings[0]).lower(params, rows)


def gradients_sent(collectives: list[Collective]) -> int:
    """Bytes that a device sends to sum gradients: 8 per parameter for all-reduce, 4 for reduce-scatter."""
    return sum(collective.bytes_sent for collective in collectives if collective.kind in REDUCTIONS)


def table_gathers(collectives: list[Collective], vocab_size: int, width: int) -> list[Collective]:
    """All-gathers whose result is the whole embedding table, in any type and layout."""

    def is_table(shape: str) -> bool:
        sizes = sorted(map(int, re.findall(r"\d+", shape.split("[")[1])))
        return [size for size in sizes if size > 1] == sorted((vocab_size, width))

    return [
        collective
        for collective in collectives
        if collective.kind == "all-gather" and any(map(is_table, collective.shapes))
    ]
