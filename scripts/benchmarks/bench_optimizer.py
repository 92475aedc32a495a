"""Time of an optimizer's update alone, compared with the bytes that it must move.

    python scripts/benchmarks/bench_optimizer.py --preset bert_base --json optimizer.json

Three optimizers update the same arrays in turn in every round, so that all see the same machine state: bare AdamW (no
clipping, norms or guard), AdamW and LAMB of bert_jax. An optimal AdamW reads gradient, moments and parameter once and
writes the last three in place: 28 bytes per parameter, which gives the bandwidth. LAMB's time is compared
with 40 bytes per parameter at this bandwidth (target: at most 1.8 times): it reads moments and parameter twice.
Parameters and moments are donated, and all arrays were touched before. Temporary arrays are new allocations in every
call of a benchmark, while a training step reuses the memory of its activations; they are put on huge pages (glibc's
malloc), so that page faults do not dominate. On the CPU it takes 2.3 GB for bert_base. Needs jax, flax, optax,
numpy and tyro.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bert_jax.bench import harness
from bert_jax.config import OptimizerConfig, presets
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.optimizers.optimizer import Optimizer

HUGE_PAGES = "glibc.malloc.hugetlb=1"
BARE_BYTES, LAMB_BYTES = 28, 40
"""Per parameter, in float32."""


def bare_adamw(gradients: Any, state: optax.ScaleByAdamState, params: Any, rate: Any, finite: Any) -> Any:
    """Plain AdamW: the baseline."""
    config = OptimizerConfig()
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    updates, state = adam.update(gradients, state)
    return jax.tree.map(lambda w, u: w - rate * (u + config.weight_decay * w), params, updates), state, {}


def draw(shapes: Any, seed: int) -> Any:
    """Random arrays with the shapes of the parameters."""
    return jax.tree.map(lambda leaf: 0.02 * jax.random.normal(jax.random.key(seed), leaf.shape), shapes)


def compiled(update: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """An optimizer compiled, with parameters and moments donated."""

    def step(params: Any, state: Any, gradients: Any, rate: Any, finite: Any) -> Any:
        return update(gradients, state, params, rate, finite)

    return jax.jit(step, donate_argnums=(0, 1)).lower(*arrays).compile()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each optimizer, and LAMB's relative to those of its bytes at the baselines' bandwidth."""
    shapes = bert.shapes(presets.load_config(options.preset).model, Heads(pair=True))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    params = draw(shapes, 0)
    newest = [params, jax.jit(optax.scale_by_adam().init)(params)]
    rest = (draw(shapes, 1), jnp.float32(1e-4), jnp.bool_(True))
    updates = {name: Optimizer(OptimizerConfig(name=name), shapes).update for name in ("adamw", "lamb")}
    updates["bare adamw"] = bare_adamw
    programs = {name: compiled(update, (*newest, *rest)) for name, update in updates.items()}

    def update(program: Any) -> None:
        newest[:] = jax.block_until_ready(program(*newest, *rest))[:2]

    sides = {name: harness.timer(functools.partial(update, program)) for name, program in programs.items()}
    harness.interleave(sides, rounds=1)  # a warm-up
    samples = harness.interleave(sides, options.rounds)
    rows = harness.summary(samples, "bare adamw", ("seconds",))
    for name, row in rows.items():
        row["temporary MB"] = programs[name].memory_analysis().temp_size_in_bytes / 1e6
    rows["bare adamw"]["GB/s"] = BARE_BYTES * parameters / rows["bare adamw"]["seconds"]["median"] / 1e9
    over_bare = rows["lamb"]["seconds / bare adamw"]
    rows["lamb"]["seconds / its bytes"] = {name: BARE_BYTES / LAMB_BYTES * over for name, over in over_bare.items()}
    return {"parameters": parameters, "optimizers": rows, "samples": samples}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--preset", choices=presets.preset_files(), default="bert_base", help="preset of the parameters")
    add("--rounds", type=harness.positive, default=9, help="number of rounds for the medians")


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    if HUGE_PAGES not in os.environ.get("GLIBC_TUNABLES", ""):
        # malloc reads it when the process starts.
        tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), HUGE_PAGES)))
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": tunables})
    raise SystemExit(main())
