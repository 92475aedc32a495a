"""Trains the small model of tests/training/optimizer_oracle.py with sharded arrays on 8 fake CPU devices; prints
the results as JSON.

Run by test_optimizer_sharded.py in a process of its own, because the number of devices is fixed when jax starts.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import MeshConfig, OptimizerConfig
from bert_jax.training.optimizers.optimizer import make_optimizer
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.sharding import make_mesh, replicated, state_shardings
from tests.training import optimizer_oracle as oracle

FROZEN = ("encoder/layers/down/kernel",)


def run(kind: dict, frozen: tuple[str, ...]) -> dict:
    config = OptimizerConfig(**kind)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    shapes = oracle.nest(oracle.start())
    optimizer = make_optimizer(config, shapes, frozen)
    shardings = state_shardings(mesh, (shapes, jax.eval_shape(optimizer.init, shapes)))
    params, state = jax.device_put((shapes, optimizer.init(shapes)), shardings)
    scalar = replicated(mesh)
    program = jax.jit(
        lambda params, state, gradients, rate, finite: optimizer.update(gradients, state, params, rate, finite),
        in_shardings=(*shardings, shardings[0], scalar, scalar),
        out_shardings=(*shardings, scalar),
        donate_argnums=(0, 1),
    )
    records = []
    for step in range(oracle.STEPS):
        gradients = jax.device_put(oracle.nest(oracle.gradients_of(step)), shardings[0])
        rate, finite = jnp.float32(oracle.learning_rate_of(step)), jnp.bool_(True)
        params, state, metrics = program(params, state, gradients, rate, finite)
        records.append({name: float(value) for name, value in metrics.items()})
    before = jax.tree.map(np.asarray, (params, state))
    spoiled = jax.tree.map(np.copy, oracle.nest(oracle.gradients_of(0)))
    spoiled["encoder"]["embeddings"]["word"][-1, -1] = np.nan  # one device's
    gradients = jax.device_put(spoiled, shardings[0])
    *after, metrics = program(params, state, gradients, jnp.float32(0.01), jnp.bool_(True))
    expected, expected_records = oracle.train(config, oracle.start(), frozen=frozen)
    leaves = name_leaves(before[0])
    return {
        "shards": {name: list(leaf.addressable_shards[0].data.shape) for name, leaf in name_leaves(after[0]).items()},
        "moment_shards": {
            name: list(leaf.addressable_shards[0].data.shape) for name, leaf in name_leaves(after[1].nu).items()
        },
        "distances": oracle.distances(leaves, expected),
        "records": records,
        "expected_records": expected_records,
        "moved": {name: float(np.abs(leaf - oracle.start()[name]).max()) for name, leaf in leaves.items()},
        "skipped": float(metrics["skipped"]),
        "unchanged": all(
            a.tobytes() == np.asarray(b).tobytes()
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(tuple(after)), strict=True)
        ),
    }


def main() -> None:
    assert len(jax.devices()) == 8
    print(json.dumps([run(kind, FROZEN if frozen else ()) for kind, frozen in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
