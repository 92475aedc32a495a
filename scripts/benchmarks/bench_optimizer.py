"""Time of an optimizer's update alone, compared with the bytes that it must move.

    python scripts/benchmarks/bench_optimizer.py --preset bert_base --json optimizer.json

Three optimizers update the same arrays in turn in every round, so that all see the same machine state: bare AdamW (no
clipping, norms or guard), AdamW and LAMB of bert_jax. An optimal AdamW reads gradient, moments and parameter once and
writes the last three in place: 28 bytes per parameter, which gives the bandwidth of an AdamW. LAMB's time is compared
with 40 bytes per parameter at this bandwidth: it reads moments and parameter twice.
Parameters and moments are donated, and all arrays were touched before. Temporary arrays are new allocations in every
call of a benchmark, while a training step reuses the memory of its activations; they are put on huge pages (glibc's
malloc), so that page faults do not dominate. On the CPU it takes 2.3 GB for bert_base. Needs jax, flax, optax and
numpy.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HUGE_PAGES = "glibc.malloc.hugetlb=1"
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts" / "benchmarks")) if path not in sys.path]

import bench_bert_jax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from bench_command import positive, stamped, write  # noqa: E402

from bert_jax.config import OptimizerConfig, presets  # noqa: E402
from bert_jax.model import bert  # noqa: E402
from bert_jax.model.heads import Heads  # noqa: E402
from bert_jax.training.optimizers.optimizer import make_optimizer  # noqa: E402

BARE_BYTES, LAMB_BYTES = 28, 40
"""Per parameter, in float32."""
BASELINES = ("bare adamw", "adamw")
TARGET = 1.8
"""Target for LAMB's time relative to the time of its bytes."""

Update = Callable[..., tuple[Any, Any, Any]]


def bare_adamw(gradients: Any, state: optax.ScaleByAdamState, params: Any, rate: Any, finite: Any) -> Any:
    """Plain AdamW: the baseline."""
    config, count = OptimizerConfig(), state.count + 1
    mu = jax.tree.map(lambda m, g: config.beta1 * m + (1 - config.beta1) * g, state.mu, gradients)
    nu = jax.tree.map(lambda v, g: config.beta2 * v + (1 - config.beta2) * g * g, state.nu, gradients)
    mean, square = 1 - config.beta1**count, 1 - config.beta2**count

    def move(w: Any, m: Any, v: Any) -> Any:
        return w - rate * (m / mean / (jnp.sqrt(v / square) + config.epsilon) + config.weight_decay * w)

    return jax.tree.map(move, params, mu, nu), optax.ScaleByAdamState(count, mu, nu), {}


def updates(shapes: Any) -> dict[str, Update]:
    """The timed optimizers."""
    library = {name: make_optimizer(OptimizerConfig(name=name), shapes).update for name in ("adamw", "lamb")}
    return {"bare adamw": bare_adamw, **library}


def draw(shapes: Any, seed: int) -> Any:
    """Random arrays with the shapes of the parameters."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = jax.jit(lambda keys: [0.02 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    return jax.tree.unflatten(structure, make(keys))


def compile_all(shapes: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
    """Every optimizer compiled, with parameters and moments donated."""

    def compiled(update: Update) -> Any:
        def step(params: Any, state: Any, gradients: Any, rate: Any, finite: Any) -> Any:
            return update(gradients, state, params, rate, finite)

        return jax.jit(step, donate_argnums=(0, 1)).lower(*arrays).compile()

    return {name: compiled(update) for name, update in updates(shapes).items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians in seconds, bandwidth and ratio, ready for JSON."""
    config = presets.load_config(options.preset).model
    shapes = bert.shapes(config, Heads(pair=True))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    params, gradients = draw(shapes, 0), draw(shapes, 1)
    state = jax.jit(optax.scale_by_adam().init)(params)
    rest = (gradients, jnp.float32(1e-4), jnp.bool_(True))
    programs = compile_all(shapes, (params, state, *rest))
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.rounds + 1):  # the first round is a warm-up
        for name, program in programs.items():
            start = time.perf_counter()
            params, state, _ = jax.block_until_ready(program(params, state, *rest))
            samples[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in samples.items()}
    fastest = {name: min(times[1:]) for name, times in samples.items()}
    return {
        **bench_bert_jax.describe_device(1),
        "preset": options.preset,
        "parameters": parameters,
        "rounds": options.rounds,
        "seconds": medians,
        "fastest": fastest,
        "temporary_bytes": {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()},
        "bytes_per_second": {name: BARE_BYTES * parameters / medians[name] for name in BASELINES},
        "lamb_over_its_bytes": {name: _lamb_over_bytes(medians, name) for name in BASELINES},
        "fastest_lamb_over_its_bytes": {name: _lamb_over_bytes(fastest, name) for name in BASELINES},
        "samples": samples,
    }


def _lamb_over_bytes(seconds: dict[str, float], baseline: str) -> float:
    """LAMB's time relative to that of its bytes at the bandwidth of the baseline."""
    return seconds["lamb"] / (LAMB_BYTES / BARE_BYTES * seconds[baseline])


def render(report: dict[str, Any]) -> str:
    """A line per optimizer, then the ratio."""
    lines = [
        f"{report['device']}, {report['threads']} threads; {report['preset']}, {report['parameters']:,} parameters"
    ]
    for name, seconds in report["seconds"].items():
        lines.append(
            f"{name:10} {1e3 * seconds:8.1f} ms, median of {report['rounds']} (fastest "
            f"{1e3 * report['fastest'][name]:.1f}), {report['temporary_bytes'][name] / 1e6:.0f} MB of temporaries"
        )
    for name, rate in report["bytes_per_second"].items():
        lines.append(
            f"at the {rate / 1e9:.1f} GB/s of {name} ({BARE_BYTES} bytes per parameter) LAMB takes "
            f"{report['lamb_over_its_bytes'][name]:.2f} times as long as {LAMB_BYTES} bytes per parameter "
            f"({report['fastest_lamb_over_its_bytes'][name]:.2f} by the fastest rounds)"
        )
    return "\n".join([*lines, f"target: at most {TARGET} times"])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=presets.preset_files(), default="bert_base", help="preset of the parameters"
    )
    parser.add_argument("--rounds", type=positive, default=9, help="number of rounds for the medians")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    report = stamped(measure(options), "bench_optimizer", arguments)
    write(report, options.json)
    print(render(report))
    return 0


if __name__ == "__main__":
    if HUGE_PAGES not in os.environ.get("GLIBC_TUNABLES", ""):
        # malloc reads it when the process starts.
        tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), HUGE_PAGES)))
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GLIBC_TUNABLES": tunables})
    raise SystemExit(main())
