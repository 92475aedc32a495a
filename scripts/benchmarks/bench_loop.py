"""Costs of the training loop over the jitted step: metrics and hooks, and saving during training.

    python scripts/benchmarks/bench_loop.py hooks --preset bert_mini --json hooks.json
    python scripts/benchmarks/bench_loop.py checkpoint --preset bert_base --steps 50 --rounds 2 --out DIR

`hooks` runs the training loop (training/loop.py) on a stream that returns the same batch forever, so that reading costs
nothing. Before each window of steps, the stream blocks the loop and times the bare step, the same program, on a batch
that is already on the device. The target is at most 1 % over the bare step.

`checkpoint` times windows of bare steps, every other one with a save at its start. Such a window ends when the save is
committed, because the next save would wait for it. The target is at most 2 % of 50 steps.

`seconds` is wall-clock time; `cpu` is CPU time of all threads, which varies less on a busy machine (on a CPU that also
computes, it is the time taken from the step), and `main` that of the thread that runs the loop. The device is idle at
the start and end of every window. Needs the requirements of training.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from bert_jax.bench import harness, train_step
from bert_jax.bench.harness import CLOCKS, positive, timed
from bert_jax.bench.train_step import TrainStep
from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, presets
from bert_jax.data.batches import HostBatch
from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from bert_jax.training import loop
from bert_jax.training.micro_batch import check_run
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory.checkpoint import COMMIT_MARKER, Checkpoints, find_damage

NEVER = 10**9
"""More steps than any window has."""
WARM_UP = 2
"""Steps before the first window."""


def make_config(options: argparse.Namespace, log: LogConfig) -> Config:
    """The preset in the shapes of the options: one endless phase, without evaluation and checkpoints."""
    preset = presets.load_config(options.preset)
    shapes = {"steps": NEVER, "seq_len": options.seq_len, "batch_size": options.batch}
    return dataclasses.replace(
        preset,
        phases=(dataclasses.replace(preset.phases[0], **shapes),),
        optimizer=dataclasses.replace(preset.optimizer, name=options.optimizer),
        log=log,
        evaluation=EvaluationConfig(every=0, batch_size=options.batch),
        checkpoint=CheckpointConfig(every=NEVER),
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
            self.samples["bare"].append(timed(lambda: self.step.run(self.window), self.window)[1])
            with harness.clocked(self.window) as timing:
                yield from itertools.islice(batches, self.window)
                self.step.wait()
            self.samples["loop"].append(timing)

    def _endless(self, cursor: Cursor) -> Iterator[HostBatch]:
        phase = self.step.phase
        rows = train_step.synthetic_rows(phase.batch_size, phase.seq_len)
        while True:
            cursor = dataclasses.replace(cursor, step=cursor.step + 1, rows=cursor.rows + phase.batch_size)
            yield HostBatch(rows, phase.batch_size, cursor)


def bench_hooks(options: argparse.Namespace) -> dict[str, Any]:
    """The loop without and with TensorBoard events, each compared with bare steps."""
    every = max(1, options.steps // 4)
    step = TrainStep(make_config(options, LogConfig(every=every)))
    step.run(WARM_UP)
    report: dict[str, Any] = {"metrics": len(step.metrics), "samples": {}}
    for name, tensorboard in (("loop", False), ("loop with tensorboard", True)):
        config = make_config(options, LogConfig(every=every, tensorboard=tensorboard))
        sides = {"step": step, "window": options.steps, "rounds": options.rounds}
        task = OneBatchPretraining(config, step.task.vocabulary, **sides)
        with tempfile.TemporaryDirectory() as workdir:
            programs = Programs(task, step.mesh)
            programs.train_step = lambda *_: step  # compiled already; the bare side runs the same one
            loop.train(programs, check_run(programs, 1), Path(workdir), {})
        rows = harness.summary(task.samples, "bare", tuple(CLOCKS))
        main, bare = [one["main"] for one in task.samples["loop"]], [one["seconds"] for one in task.samples["bare"]]
        rows["loop"]["main / seconds of bare"] = harness.ratio(main, bare)
        report[name] = rows
        report["samples"][name] = task.samples
    return report


def bench_checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Windows without and with a save."""
    if options.out and not options.out.is_dir():
        raise UserError(f"--out {options.out}: there is no such directory")
    step, numbers, saves = TrainStep(make_config(options, LogConfig())), itertools.count(1), []
    step.run(WARM_UP)
    with (
        tempfile.TemporaryDirectory(dir=options.out) as directory,
        Checkpoints(Path(directory) / "checkpoints", keep=1) as checkpoints,
    ):

        def without() -> harness.Timing:
            os.sync()  # of an earlier save, which would slow this window down
            return timed(lambda: step.run(options.steps), options.steps)[1]

        def with_save() -> harness.Timing:
            saved, timing = timed(lambda: timed_save(checkpoints, step, next(numbers), options.steps), options.steps)
            saves.append(saved)
            return timing

        samples = harness.interleave({"without": without, "with a save": with_save}, options.rounds)
        (kept,) = checkpoints.directory.iterdir()
        damage, reading = timed(lambda: find_damage(kept))
        assert damage is None, damage
        size = sum(file.stat().st_size for file in Path(kept).rglob("*") if file.is_file())
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(step.state.params)),
        "bytes": size,
        "seconds of SHA-256": reading["seconds"],
        "windows": harness.summary(samples, "without", tuple(CLOCKS)),
        "saves": saves,
        "samples": samples,
    }


def timed_save(checkpoints: Checkpoints, step: TrainStep, number: int, steps: int) -> dict[str, float]:
    """Save, run `steps` steps, and wait for the commit.

    Returns:
      seconds: `blocked` in the call; from its start until the `committed` marker appeared, by its file time; and
      `waited` for the commit after the last step.
    """
    began = time.time()
    blocked = timed(lambda: checkpoints.save(number, step.state, {}))[1]["seconds"]
    step.run(steps)
    waited = timed(checkpoints.wait)[1]["seconds"]
    (marker,) = Path(checkpoints.directory).glob(f"*/{COMMIT_MARKER}")
    return {"blocked": blocked, "committed": marker.stat().st_mtime - began, "waited": waited}


CASES = {"hooks": bench_hooks, "checkpoint": bench_checkpoint}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("case", choices=CASES)
    add("--preset", choices=train_step.PRESETS, default="bert_mini")
    add("--seq-len", type=positive, default=128, help="tokens per row")
    add("--batch", type=positive, default=8, help="rows per step")
    add("--optimizer", choices=("adamw", "lamb"), default="adamw", help="optimizer of the saved moments")
    add("--rounds", type=positive, default=5, help="windows; medians are over them")
    add("--steps", type=positive, default=40, help="steps in a window; hooks: with four lines of metrics")
    add("--out", type=Path, help="checkpoint: parent directory of the saves; default: that of temporary files")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The results of a case."""
    return CASES[options.case](options)


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
