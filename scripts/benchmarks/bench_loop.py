"""Cost of the training loop over the jitted step: metrics, hooks and work of the host.

    python scripts/benchmarks/bench_loop.py --preset bert_mini --json hooks.json

It runs the training loop (training/loop.py) on a stream that returns the same batch forever, so that reading costs
nothing. Before each window of steps, the stream blocks the loop and times the bare step, the same program, on a batch
that is already on the device. The target is at most 1 % over the bare step.

`seconds` is wall-clock time; `cpu` is CPU time of all threads, which varies less on a busy machine (on a CPU that also
computes, it is the time taken from the step), and `main` that of the thread that runs the loop. The device is idle at
the start and end of every window. Needs the requirements of training.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert_jax.bench import harness, train_step
from bert_jax.bench.harness import CLOCKS, positive, timed
from bert_jax.bench.train_step import TrainStep
from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, presets
from bert_jax.data.batches import HostBatch
from bert_jax.data.cursor import Cursor
from bert_jax.training import loop
from bert_jax.training.micro_batch import choose_accumulations
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs

NEVER = 10**9
"""More steps than any window has."""
WARM_UP = 2
"""Steps before the first window."""
WATCHED = "loop with local copies and metrics for Prometheus"


def make_config(options: argparse.Namespace, log: LogConfig, local_directory: str | None = None) -> Config:
    """The preset in the shapes of the options: one endless phase, without evaluation and checkpoints on storage."""
    preset = presets.load_config(options.preset)
    shapes = {"steps": NEVER, "seq_len": options.seq_len, "batch_size": options.batch}
    return dataclasses.replace(
        preset,
        phases=(dataclasses.replace(preset.phases[0], **shapes),),
        optimizer=dataclasses.replace(preset.optimizer, name=options.optimizer),
        log=log,
        evaluation=EvaluationConfig(every=0, batch_size=options.batch),
        checkpoint=CheckpointConfig(every=NEVER, local_directory=local_directory, local_every=options.local_every),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class OneBatchPretraining(Pretraining):
    """Pretraining on one batch forever; before each window, while the loop waits, it times the bare steps."""

    step: Any = None
    window: int = 0
    rounds: int = 0
    samples: dict[str, list[harness.Timing]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))

    def batches(self, cursor: Cursor) -> Iterator[HostBatch]:
        """Batches of all windows. The loop requests the next one after a step."""
        batches = self._endless(cursor)
        yield from itertools.islice(batches, WARM_UP)
        self.step.wait()
        for _ in range(self.rounds):
            self.samples["bare"].append(timed(lambda: self.step.time_steps(self.window), self.window)[1])
            with harness.measure_seconds(self.window) as timing:
                yield from itertools.islice(batches, self.window)
                self.step.wait()
            self.samples["loop"].append(timing)

    def _endless(self, cursor: Cursor) -> Iterator[HostBatch]:
        phase = self.step.phase
        slots = self.config.data.max_examples_per_row(phase.seq_len)
        rows = train_step.synthetic_rows(phase.batch_size, phase.seq_len, slots=slots)
        while True:
            cursor = dataclasses.replace(cursor, step=cursor.step + 1, rows=cursor.rows + phase.batch_size)
            yield HostBatch(rows, phase.batch_size, cursor)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The loop alone, with TensorBoard events, and with copies and a page; each beside bare steps."""
    every = max(1, options.steps // 4)
    step = TrainStep(make_config(options, LogConfig(every=every)), options.devices)
    step.time_steps(WARM_UP)
    report: dict[str, Any] = {"metrics": len(step.metrics), "samples": {}}
    for name, tensorboard, port in (
        ("loop", False, None),
        ("loop with tensorboard", True, None),
        (WATCHED, False, options.port),
    ):
        sides = {"step": step, "window": options.steps, "rounds": options.rounds}
        with tempfile.TemporaryDirectory() as workdir, tempfile.TemporaryDirectory(dir=options.memory) as local:
            config = make_config(
                options,
                LogConfig(every=every, tensorboard=tensorboard, prometheus_port=port),
                local if name == WATCHED else None,
            )
            task = OneBatchPretraining(config, step.task.vocabulary, **sides)
            programs = Programs(task, step.mesh)
            programs.train_step = lambda *_: step  # compiled already; the bare side runs the same one
            loop.train(programs, choose_accumulations(programs, 1), Path(workdir), {})
        rows = harness.summary(task.samples, "bare", tuple(CLOCKS))
        main, bare = [one["main"] for one in task.samples["loop"]], [one["seconds"] for one in task.samples["bare"]]
        rows["loop"]["main / seconds of bare"] = harness.ratio(main, bare)
        report[name] = rows
        report["samples"][name] = task.samples
    return report


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--preset", choices=train_step.PRESETS, default="bert_mini")
    add("--seq-len", type=positive, default=128, help="tokens per row")
    add("--batch", type=positive, default=8, help="rows per step")
    add("--optimizer", choices=("adamw", "lamb"), default="adamw", help="default: adamw")
    add("--rounds", type=positive, default=5, help="windows; medians are over them")
    add("--devices", type=positive, default=1, help="on several, replicas are compared; CPUs: fewer than cores")
    add("--local-every", type=positive, default=100, help="steps between two local copies")
    add("--memory", default="/dev/shm", help="directory of local copies")
    add("--port", type=positive, default=9464, help="of the metrics for Prometheus")
    add("--steps", type=positive, default=40, help="steps in a window, with four lines of metrics")


main = functools.partial(harness.run, __doc__, flags, measure, harness.report_lines)


if __name__ == "__main__":
    raise SystemExit(main())
