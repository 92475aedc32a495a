"""Time of an optimizer's update alone, compared with the bytes that it must move.

    python scripts/benchmarks/bench_optimizer.py --preset bert_base --json optimizer.json

Three optimizers update the same arrays in turn in every round, so that all see the same machine state: bare AdamW (no
clipping, norms or guard), AdamW and LAMB of bert_jax. An optimal AdamW reads gradient, moments and parameter once and
writes the last three in place: 28 bytes per parameter, which gives the bandwidth of an AdamW. LAMB's time is compared
with 40 bytes per parameter at this bandwidth: it reads moments and parameter twice.
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

import harness
import jax
import jax.numpy as jnp
import optax

from bert_jax.config import OptimizerConfig, presets
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.optimizers.optimizer import Optimizer

HUGE_PAGES = "glibc.malloc.hugetlb=1"
BARE_BYTES, LAMB_BYTES = 28, 40
"""Per parameter, in float32."""
BASELINES = ("bare adamw", "adamw")
TARGET = 1.8
"""Target for LAMB's time relative to the time of its bytes."""


def bare_adamw(gradients: Any, state: optax.ScaleByAdamState, params: Any, rate: Any, finite: Any) -> Any:
    """Plain AdamW: the baseline."""
    config, count = OptimizerConfig(), state.count + 1
    mu = jax.tree.map(lambda m, g: config.beta1 * m + (1 - config.beta1) * g, state.mu, gradients)
    nu = jax.tree.map(lambda v, g: config.beta2 * v + (1 - config.beta2) * g * g, state.nu, gradients)
    mean, square = 1 - config.beta1**count, 1 - config.beta2**count

    def move(w: Any, m: Any, v: Any) -> Any:
        return w - rate * (m / mean / (jnp.sqrt(v / square) + config.epsilon) + config.weight_decay * w)

    return jax.tree.map(move, params, mu, nu), optax.ScaleByAdamState(count, mu, nu), {}


def draw(shapes: Any, seed: int) -> Any:
    """Random arrays with the shapes of the parameters."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = jax.jit(lambda keys: [0.02 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    return jax.tree.unflatten(structure, make(keys))


def compiled(update: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """An optimizer compiled, with parameters and moments donated."""

    def step(params: Any, state: Any, gradients: Any, rate: Any, finite: Any) -> Any:
        return update(gradients, state, params, rate, finite)

    return jax.jit(step, donate_argnums=(0, 1)).lower(*arrays).compile()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each optimizer, bandwidths and ratios."""
    shapes = bert.shapes(presets.load_config(options.preset).model, Heads(pair=True))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    params = draw(shapes, 0)
    newest = [params, jax.jit(optax.scale_by_adam().init)(params)]
    rest = (draw(shapes, 1), jnp.float32(1e-4), jnp.bool_(True))
    updates = {name: Optimizer(OptimizerConfig(name=name), shapes).update for name in ("adamw", "lamb")}
    programs = {
        name: compiled(update, (*newest, *rest)) for name, update in {"bare adamw": bare_adamw, **updates}.items()
    }

    def update(program: Any) -> float:
        results, timing = harness.timed(lambda: jax.block_until_ready(program(*newest, *rest)))
        newest[:] = results[:2]
        return timing["seconds"]

    sides = {name: lambda program=program: update(program) for name, program in programs.items()}
    harness.interleave(sides, rounds=1)  # a warm-up
    samples = harness.interleave(sides, options.rounds)
    seconds = {name: harness.spread(times) for name, times in samples.items()}

    def over_its_bytes(which: str) -> dict[str, float]:
        """LAMB's time relative to that of its bytes at the bandwidth of each baseline."""
        scale = LAMB_BYTES / BARE_BYTES
        return {name: seconds["lamb"][which] / (scale * seconds[name][which]) for name in BASELINES}

    return {
        "preset": options.preset,
        "parameters": parameters,
        "rounds": options.rounds,
        "seconds": seconds,
        "temporary_bytes": {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()},
        "bytes_per_second": {name: BARE_BYTES * parameters / seconds[name]["median"] for name in BASELINES},
        "lamb_over_its_bytes": over_its_bytes("median"),
        "fastest_lamb_over_its_bytes": over_its_bytes("min"),
        "samples": samples,
    }


def render(report: dict[str, Any]) -> list[str]:
    """A line per optimizer, then the ratio."""
    lines = [f"{harness.header(report)}; {report['preset']}, {report['parameters']:,} parameters"]
    for name, seconds in report["seconds"].items():
        lines.append(
            f"{name:10} {1e3 * seconds['median']:8.1f} ms, median of {report['rounds']} (fastest "
            f"{1e3 * seconds['min']:.1f}), {report['temporary_bytes'][name] / 1e6:.0f} MB of temporaries"
        )
    for name, rate in report["bytes_per_second"].items():
        lines.append(
            f"at the {rate / 1e9:.1f} GB/s of {name} ({BARE_BYTES} bytes per parameter) LAMB takes "
            f"{report['lamb_over_its_bytes'][name]:.2f} times as long as {LAMB_BYTES} bytes per parameter "
            f"({report['fastest_lamb_over_its_bytes'][name]:.2f} by the fastest rounds)"
        )
    return [*lines, f"target: at most {TARGET} times"]


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--preset", choices=presets.preset_files(), default="bert_base", help="preset of the parameters")
    add("--rounds", type=harness.positive, default=9, help="number of rounds for the medians")


main = functools.partial(harness.run, __doc__, flags, measure, render)


if __name__ == "__main__":
    if HUGE_PAGES not in os.environ.get("GLIBC_TUNABLES", ""):
        # malloc reads it when the process starts.
        tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), HUGE_PAGES)))
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": tunables})
    raise SystemExit(main())
