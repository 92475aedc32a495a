"""Overhead of the training loop over the jitted step: metrics and hooks, and saving during training.

    python scripts/benchmarks/bench_loop.py hooks --preset bert_mini --json hooks.json
    python scripts/benchmarks/bench_loop.py checkpoint --preset bert_base --out DIR --json checkpoint.json

`hooks` runs the training loop (training/loop.py) on a stream that returns the same batch forever, so that reading costs
nothing. After each window of steps, the stream blocks the loop and times the bare step, the same program, on a batch
that is already on the device. Each window of the loop is compared with the bare windows before and after it. Norms per
layer are computed inside the step; their cost is the difference to a program without them.

`checkpoint` times windows of bare steps, every other one with a save at its start. Such a window ends when the save is
committed, because the next save would wait for it.

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
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import train_step
from harness import CLOCKS, positive, timed
from train_step import TrainStep

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
DEFAULTS = {"hooks": ("bert_mini", 7), "checkpoint": ("bert_base", 2)}
"""Preset and rounds."""
HOOKS_TARGET, CHECKPOINT_TARGET = 0.01, 0.02
"""Targets for the overhead of metrics and hooks, and of asynchronous saves, as shares of the bare step time."""

Samples = dict[str, list[harness.Timing]]
"""By measured side: seconds per step by clock, one entry per window."""


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
    """Pretraining on one batch forever; between two windows, while the loop waits, it times the bare steps."""

    step: Any = None
    bare: Any = None
    window: int = 0
    rounds: int = 0
    samples: Samples = dataclasses.field(default_factory=lambda: collections.defaultdict(list))

    def batches(self, cursor: Cursor) -> Iterator[HostBatch]:
        """Batches of all windows. The loop requests the next one after a step."""
        batches = self._endless(cursor)
        yield from itertools.islice(batches, WARM_UP)
        self.step.wait()
        for _ in range(self.rounds):
            self._time_bare()
            with harness.clocked(self.window) as timing:
                yield from itertools.islice(batches, self.window)
                self.step.wait()
            self.samples["loop"].append(timing)
        self._time_bare()

    def _endless(self, cursor: Cursor) -> Iterator[HostBatch]:
        phase = self.step.phase
        rows = train_step.synthetic_rows(phase.batch_size, phase.seq_len)
        while True:
            cursor = dataclasses.replace(cursor, step=cursor.step + 1, rows=cursor.rows + phase.batch_size)
            yield HostBatch(rows, phase.batch_size, cursor)

    def _time_bare(self) -> None:
        for name, bare in self.bare.items():
            self.samples[name].append(time_steps(bare, self.window))


def time_steps(bare: TrainStep, steps: int) -> harness.Timing:
    """Seconds per step of the step alone, on a batch and inputs that are on the device already."""
    return timed(lambda: bare.run(steps), steps)[1]


class PrecompiledPrograms(Programs):
    """Programs whose step is already compiled; the bare side uses the same one."""

    def __init__(self, task: Pretraining, step: TrainStep):
        super().__init__(task, step.mesh)
        self.step = step

    def train_step(self, phase: int, accumulation: int) -> TrainStep:
        """The compiled step."""
        return self.step


def bench_hooks(options: argparse.Namespace) -> dict[str, Any]:
    """The loop without and with TensorBoard events, each compared with bare steps."""
    if options.steps % options.log_every:
        raise UserError(f"--steps {options.steps}: windows with equal numbers of lines need a multiple of --log-every")
    logs = {
        name: LogConfig(every=options.log_every, tensorboard=events)
        for name, events in (("loop", False), ("loop with tensorboard", True))
    }
    step = TrainStep(make_config(options, logs["loop"]))
    bare = {"bare": step, "bare without layers": TrainStep(make_config(options, LogConfig(layers=False)))}
    for side in bare.values():
        side.run(WARM_UP)
    variants = {}
    for name, log in logs.items():
        sides = {"step": step, "bare": bare, "window": options.steps, "rounds": options.rounds}
        task = OneBatchPretraining(make_config(options, log), step.task.vocabulary, **sides)
        with tempfile.TemporaryDirectory() as workdir:
            programs = PrecompiledPrograms(task, step)
            loop.train(programs, check_run(programs, 1), Path(workdir), {})
            lines = len((Path(workdir) / "metrics.jsonl").read_text().splitlines())
        variants[name] = {"lines": lines, **compare(task.samples, "loop", list(bare))}
    return {"metrics": len(step.metrics), "variants": variants}


def compare(samples: Samples, name: str, baselines: Sequence[str]) -> dict[str, Any]:
    """Medians, and the overhead of one side over each baseline, which was timed before and after it.

    A window is compared with the mean of the baseline's windows before and after it, which cancels a linear drift of
    the machine's speed. CPU seconds of the main thread are divided by the baseline's time.

    Args:
      samples: the baselines have one window more than the measured side.
      name: of the measured side.
      baselines: names of the sides that it is compared with.
    """
    overhead: dict[str, Any] = {}
    for baseline in baselines:
        pairs = list(itertools.pairwise(samples[baseline]))
        around = {clock: [(before[clock] + after[clock]) / 2 for before, after in pairs] for clock in CLOCKS}
        overhead[baseline] = {}
        for clock in CLOCKS:
            extra = [window[clock] - mean for window, mean in zip(samples[name], around[clock], strict=True)]
            whole = around["seconds" if clock == "main" else clock]
            shares = [seconds / mean for seconds, mean in zip(extra, whole, strict=True)]
            overhead[baseline][clock] = {"per_step": statistics.median(extra), "share": harness.spread(shares)}
    medians = {
        side: {clock: statistics.median(window[clock] for window in windows) for clock in CLOCKS}
        for side, windows in samples.items()
    }
    return {"medians": medians, "overhead": overhead, "samples": samples}


def bench_checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Windows without and with a save; and a save while nothing else runs."""
    if options.out and not options.out.is_dir():
        raise UserError(f"--out {options.out}: there is no such directory")
    bare, numbers, every = TrainStep(make_config(options, LogConfig())), itertools.count(1), options.every
    bare.run(WARM_UP)
    samples: Samples = {"without": [], "with a save": []}
    with (
        tempfile.TemporaryDirectory(dir=options.out) as directory,
        Checkpoints(Path(directory) / "checkpoints", keep=1) as checkpoints,
    ):
        saves = []
        alone = timed_save(checkpoints, bare, next(numbers), 0) | {"flush": flush(checkpoints)}
        for _ in range(options.rounds):
            samples["without"].append(time_steps(bare, every))
            save, timing = timed(lambda: timed_save(checkpoints, bare, next(numbers), every), every)
            samples["with a save"].append(timing)
            saves.append(save | {"flush": flush(checkpoints)})
        samples["without"].append(time_steps(bare, every))
        (kept,) = checkpoints.directory.iterdir()
        damage, reading = timed(lambda: find_damage(kept))
        assert damage is None, damage
        size = sum(file.stat().st_size for file in _files(checkpoints))
    seconds = {"alone": alone["written"], "training": saves[-1]["written"], "sha256": reading["seconds"]}
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(bare.state.params)),
        "bytes": size,
        "alone": alone,
        "saves": saves,
        "sha256_alone": reading["seconds"],
        "bytes_per_second": {name: size / taken for name, taken in seconds.items()},
        **compare(samples, "with a save", ["without"]),
    }


def timed_save(checkpoints: Checkpoints, bare: TrainStep, number: int, steps: int) -> dict[str, float]:
    """Save, run `steps` steps, and wait for the commit.

    Returns:
      seconds: `blocked` in the call; from its start until the arrays were `written` and until the `committed` marker
      appeared, by file times; and `waited` for the commit after the last step.
    """
    began = time.time()
    blocked = timed(lambda: checkpoints.save(number, bare.state, {}))[1]["seconds"]
    bare.run(steps)
    waited = timed(checkpoints.wait)[1]["seconds"]
    after = sorted((file.name == COMMIT_MARKER, file.stat().st_mtime - began) for file in _files(checkpoints))
    (_, written), (_, committed) = after[-2:]
    return {"blocked": blocked, "written": written, "committed": committed, "waited": waited}


def flush(checkpoints: Checkpoints) -> float:
    """Seconds to sync all files to disk, so that this does not slow down a window without a save."""
    start = time.perf_counter()
    for file in _files(checkpoints):
        with file.open("rb") as handle:
            os.fsync(handle)
    return time.perf_counter() - start


def _files(checkpoints: Checkpoints) -> list[Path]:
    return [path for path in Path(checkpoints.directory).rglob("*") if path.is_file()]


def render_hooks(report: dict[str, Any]) -> list[str]:
    """A table for each variant."""
    lines = [f"{report['metrics']} metrics of a step; a line every {report['log_every']} steps"]
    for name, variant in report["variants"].items():
        lines += ["", f"{name}: {report['steps']} steps a window, {report['rounds']} windows"]
        lines += render_comparison(variant, name="loop")
    return [*lines, "", f"target: at most {HOOKS_TARGET:.0%} over the bare step"]


def render_checkpoint(report: dict[str, Any]) -> list[str]:
    """Windows, saves, rates."""
    lines = [f"{report['parameters']:,} parameters, {report['bytes'] / 1e6:,.1f} MB a checkpoint"]
    lines += [f"a save every {report['every']} steps, {report['rounds']} windows with one"]
    lines += render_comparison(report, name="with a save")
    for name, save in [("alone", report["alone"]), *(("while training", save) for save in report["saves"])]:
        lines.append(f"save {name}: " + ", ".join(f"{what} {seconds:.3f} s" for what, seconds in save.items()))
    rates = ", ".join(f"{what} {rate / 1e6:,.0f} MB/s" for what, rate in report["bytes_per_second"].items())
    lines.append(f"SHA-256 alone {report['sha256_alone']:.3f} s; {rates}")
    return [*lines, f"target: at most {CHECKPOINT_TARGET:.0%} of the step time"]


def render_comparison(compared: dict[str, Any], name: str) -> list[str]:
    """Medians per step, then the overhead."""
    lines = [f"{'':22}{''.join(f'{clock:>12}' for clock in CLOCKS)}   ms per step"]
    for side, medians in compared["medians"].items():
        lines.append(f"{side:22}" + "".join(f"{1e3 * medians[clock]:12.2f}" for clock in CLOCKS))
    for baseline, clocks in compared["overhead"].items():
        lines.append(f"{name} over {baseline}:")
        for clock, extra in clocks.items():
            lines.append(f"  {clock:8}{harness.show(extra['share'], '+.2%')}, ms {1e3 * extra['per_step']:+.3f}")
    return lines


CASES = {"hooks": (bench_hooks, render_hooks), "checkpoint": (bench_checkpoint, render_checkpoint)}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("case", choices=CASES)
    add("--preset", choices=train_step.PRESETS, help="default: bert_mini for hooks, bert_base for checkpoint")
    add("--seq-len", type=positive, default=128, help="tokens per row")
    add("--batch", type=positive, default=8, help="rows per step")
    add("--optimizer", choices=("adamw", "lamb"), default="adamw", help="optimizer of the saved moments")
    add("--rounds", type=positive, help="windows; medians are over them; default: 7 for hooks, 2 for checkpoint")
    add("--steps", type=positive, default=40, help="hooks: steps in a window")
    add("--log-every", type=positive, default=10, help="hooks: steps between lines of metrics")
    add("--every", type=positive, default=50, help="checkpoint: steps in a window")
    add("--out", type=Path, help="checkpoint: parent directory of the saves; default: that of temporary files")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The results of a case, with the options."""
    preset, rounds = DEFAULTS[options.case]
    options.preset, options.rounds = options.preset or preset, options.rounds or rounds
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "out", "rest")}
    return settings | CASES[options.case][0](options)


def render(report: dict[str, Any]) -> list[str]:
    """The report of a case."""
    shapes = f"{report['preset']}, {report['optimizer']}, {report['batch']} x {report['seq_len']}"
    return [f"{harness.header(report)}; {shapes}", *CASES[report["case"]][1](report)]


main = functools.partial(harness.run, __doc__, flags, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
