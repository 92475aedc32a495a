"""Time of the train steps of several seeds: one seed after the other, vectorised over seeds, or in several processes.

    python scripts/benchmarks/bench_seeds.py --preset bert_tiny --vocab-size 8192 --json seeds.json

Every side takes `--steps` train steps of `--seeds` runs, with the preset's config and rows of synthetic tokens:

- one after the other: the compiled step of `bert-jax pretrain`, all steps of a seed and then those of the next;
- vectorised: the same step under `jax.vmap`, over a leading axis of states, batches and seeds;
- processes: as many processes as cores, pinned to one core each, which share the seeds.

The sides take turns in every round. Times are of steps only: no evaluation, no checkpoints. Needs jax and flax.
"""

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax import config as config_lib
from bert_jax.bench import harness
from bert_jax.bench.train_step import VOCABULARY, synthetic_rows
from bert_jax.config import presets
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs, make_train_step, put_step_scalars
from bert_jax.training.sharding import make_mesh, put_rows

LEARNING_RATE = 1e-3


class Seeds:
    """States and batches of several seeds, and their compiled steps."""

    def __init__(self, preset: str, vocab_size: int, seeds: int):
        """Compiles the step of one seed."""
        config = config_lib.replace(
            presets.load_config(preset), model={"vocab_size": vocab_size}, data={"examples_per_row": 1}
        )
        mesh, phase = make_mesh(config.mesh, jax.devices()[:1]), config.phases[0]
        self.programs = Programs(Pretraining(config, VOCABULARY._replace(size=vocab_size)), mesh)
        self.step = self.programs.train_step(0, 1)
        rows = [synthetic_rows(phase.batch_size, phase.seq_len, seed=seed) for seed in range(seeds)]
        rows = [row | {"input_ids": row["input_ids"] % vocab_size} for row in rows]
        self.inputs = [
            (put_rows(row, mesh, phase.batch_size), put_step_scalars(LEARNING_RATE, 1, seed, mesh))
            for seed, row in enumerate(rows)
        ]
        self.states = [self.programs.init_state() for _ in range(seeds)]

    def one_after_the_other(self, steps: int) -> None:
        """The steps of each seed."""
        for seed, inputs in enumerate(self.inputs):
            for _ in range(steps):
                self.states[seed], metrics = self.step(self.states[seed], *inputs)
            jax.block_until_ready(metrics)

    def vectorised(self) -> Callable[[int], None]:
        """A function that takes steps of all seeds at the same time."""
        step = make_train_step(self.programs.task.in_phase(0), self.programs.abstract_state(0), 1)
        stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
        state, inputs = stack(*self.states), stack(*self.inputs)
        compiled = jax.jit(jax.vmap(step), donate_argnums=0).lower(state, *inputs).compile()

        def take(steps: int) -> None:
            nonlocal state
            for _ in range(steps):
                state, metrics = compiled(state, *inputs)
            jax.block_until_ready(metrics)

        return take


class Workers:
    """Processes with the steps of one seed each, pinned to one core each."""

    def __init__(self, options: argparse.Namespace):
        """Waits until all have compiled their step."""
        self.processes = []
        for core in harness.usable_cores():
            command = [sys.executable, __file__, "--preset", options.preset, "--vocab-size", str(options.vocab_size)]
            self.processes.append(
                subprocess.Popen(
                    [*command, "--worker", str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        for process in self.processes:
            self._wait(process)

    def take(self, steps: int) -> None:
        """Steps of as many seeds as there are processes."""
        for process in self.processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        for process in self.processes:
            self._wait(process)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.communicate("0\n")

    @staticmethod
    def _wait(process: Any) -> None:
        if process.stdout.readline() != "done\n":
            raise RuntimeError(f"a worker has ended with exit code {process.wait()}")


def work(options: argparse.Namespace) -> None:
    """A worker: reads numbers of steps from stdin until 0."""
    os.sched_setaffinity(0, {options.worker})
    seeds = Seeds(options.preset, options.vocab_size, 1)
    seeds.one_after_the_other(1)
    print("done", flush=True)
    while steps := int(sys.stdin.readline() or 0):
        seeds.one_after_the_other(steps)
        print("done", flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step and seed of each side."""
    seeds, workers = Seeds(options.preset, options.vocab_size, options.seeds), Workers(options)
    vectorised, per_round = seeds.vectorised(), options.steps * options.seeds
    shared = -(-per_round // len(workers.processes))
    sides = {
        "one after the other": harness.timer(lambda: seeds.one_after_the_other(options.steps), per_round),
        "vectorised": harness.timer(lambda: vectorised(options.steps), per_round),
        "processes": harness.timer(lambda: workers.take(shared), shared * len(workers.processes)),
    }
    try:
        harness.interleave(sides, rounds=1)  # a warm-up
        samples = harness.interleave(sides, options.rounds)
    finally:
        workers.close()
    rows = [
        {"side": name, **harness.spread([one["seconds"] * 1e3 for one in timings])}
        | {"ratio": harness.ratio(*([one["seconds"] for one in side] for side in (timings, baseline)))["median"]}
        for baseline in [samples["one after the other"]]
        for name, timings in samples.items()
    ]
    phase = seeds.programs.task.config.phases[0]
    return {"tokens per step": phase.batch_size * phase.seq_len, "milliseconds per step and seed": rows}


def main(arguments: list[str] | None = None) -> int:
    """Measure, or work for another process."""

    def add_flags(add: Callable[..., Any]) -> None:
        add("--preset", default="bert_tiny", help="config of the runs")
        add("--vocab-size", type=harness.positive, default=8192, help="token ids")
        add("--seeds", type=harness.positive, default=3, help="seeds")
        add("--steps", type=harness.positive, default=20, help="steps of each seed in a round")
        add("--rounds", type=harness.positive, default=5, help="rounds")
        add("--worker", type=int, help=argparse.SUPPRESS)

    words = sys.argv[1:] if arguments is None else arguments
    if "--worker" in words:
        parser = argparse.ArgumentParser()
        add_flags(parser.add_argument)
        work(parser.parse_args(words))
        return 0
    return harness.run(__doc__, add_flags, measure, harness.tables, arguments)


if __name__ == "__main__":
    sys.exit(main())
