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
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts" / "benchmarks")) if path not in sys.path]

import bench_bert_jax  # noqa: E402
import jax  # noqa: E402
from bench import PRESETS  # noqa: E402
from bench_command import positive, stamped, write  # noqa: E402

from bert_jax.config import (  # noqa: E402
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LogConfig,
    presets,
)
from bert_jax.data.batches import HostBatch  # noqa: E402
from bert_jax.data.cursor import Cursor  # noqa: E402
from bert_jax.errors import UserError  # noqa: E402
from bert_jax.training import loop  # noqa: E402
from bert_jax.training.pretraining_task import Pretraining  # noqa: E402
from bert_jax.training.programs import Programs  # noqa: E402
from bert_jax.training.run_directory.checkpoint import COMMIT_MARKER, Checkpoints, find_damage  # noqa: E402
from bert_jax.training.sharding import make_mesh, put_rows  # noqa: E402
from bert_jax.training.step import put_step_inputs  # noqa: E402

NEVER = 10**9
"""More steps than any window has."""
WARM_UP = 2
"""Steps before the first window."""
HOOKS_TARGET, CHECKPOINT_TARGET = 0.01, 0.02
"""Targets for the overhead of metrics and hooks, and of asynchronous saves, as shares of the bare step time."""

Samples = dict[str, dict[str, list[float]]]
"""By measured side and by clock: seconds per step, one number per window."""


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


class CompiledStep:
    """The compiled step of a config; keeps the newest metrics, so that callers can wait for its end."""

    def __init__(self, config: Config):
        self.task = Pretraining(config, bench_bert_jax.VOCABULARY._replace(size=config.model.vocab_size))
        self.mesh = make_mesh(config.mesh)
        self.phase = config.phases[0]
        self.rows = bench_bert_jax.synthetic_rows(self.phase.batch_size, self.phase.seq_len)
        batch = put_rows(self.rows, self.mesh, self.phase.batch_size)
        self.inputs = batch, put_step_inputs(self.phase.learning_rate, 1, self.mesh)
        self.programs = Programs(self.task, self.mesh)
        self.compiled = self.programs.train_step(0, self.phase.fewest_micro_batches)
        self.metrics: dict[str, jax.Array] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Call the compiled step."""
        state, self.metrics = self.compiled(*inputs)
        return state, self.metrics

    def memory_analysis(self) -> Any:
        """Of the compiled step."""
        return self.compiled.memory_analysis()

    def wait(self) -> None:
        """Wait until the newest step is done."""
        jax.block_until_ready(self.metrics)


class BareStep:
    """The step alone, on a batch and inputs that are on the device already."""

    def __init__(self, step: CompiledStep):
        self.step, self.state = step, step.programs.init_state()

    def run(self, steps: int) -> None:
        """Run steps and wait for their end."""
        for _ in range(steps):
            self.state, _ = self.step(self.state, *self.step.inputs)
        self.step.wait()


@contextlib.contextmanager
def timed(samples: Samples, name: str, steps: int) -> Iterator[None]:
    """Append the seconds of the context, divided by the number of steps."""
    clocks = {"seconds": time.perf_counter, "cpu": time.process_time, "main": time.thread_time}
    start = {kind: clock() for kind, clock in clocks.items()}
    yield
    for kind, clock in clocks.items():
        samples.setdefault(name, {}).setdefault(kind, []).append((clock() - start[kind]) / steps)


class OneBatchStream:
    """A stream that repeats one batch forever; between two windows, while the loop waits, it times the bare steps."""

    def __init__(self, step: CompiledStep, bare: dict[str, BareStep], steps: int, rounds: int):
        self.step, self.bare, self.steps, self.rounds = step, bare, steps, rounds
        self.samples: Samples = {}

    def read(self, start: Cursor) -> Iterator[HostBatch]:
        """Batches of all windows. The loop requests the next one after a step."""
        batches = self._endless(start)
        yield from itertools.islice(batches, WARM_UP)
        self.step.wait()
        for _ in range(self.rounds):
            self._time_bare()
            with timed(self.samples, "loop", self.steps):
                yield from itertools.islice(batches, self.steps)
                self.step.wait()
        self._time_bare()

    def _endless(self, cursor: Cursor) -> Iterator[HostBatch]:
        size = self.step.phase.batch_size
        while True:
            cursor = dataclasses.replace(cursor, step=cursor.step + 1, rows=cursor.rows + size)
            yield HostBatch(self.step.rows, size, cursor)

    def _time_bare(self) -> None:
        for name, bare in self.bare.items():
            with timed(self.samples, name, self.steps):
                bare.run(self.steps)


@dataclasses.dataclass(frozen=True)
class OneBatchPretraining(Pretraining):
    """Pretraining on a `OneBatchStream`."""

    feed: Any = None

    def batches(self, cursor: Cursor) -> Any:
        """Batches of the stream."""
        return self.feed.read(cursor)


class PrecompiledPrograms(Programs):
    """Programs whose step is already compiled; the bare side uses the same one."""

    def __init__(self, task: Pretraining, step: CompiledStep):
        super().__init__(task, step.mesh)
        self.step = step

    def train_step(self, phase: int, accumulation: int) -> CompiledStep:
        """The compiled step."""
        return self.step


def bench_hooks(options: argparse.Namespace) -> dict[str, Any]:
    """The loop without and with TensorBoard events, each compared with bare steps."""
    logs = {
        name: LogConfig(every=options.log_every, tensorboard=events)
        for name, events in (("loop", False), ("loop with tensorboard", True))
    }
    step = CompiledStep(make_config(options, logs["loop"]))
    plain = CompiledStep(make_config(options, LogConfig(layers=False)))
    bare = {"bare": BareStep(step), "bare without layers": BareStep(plain)}
    for side in bare.values():
        side.run(WARM_UP)
    variants = {}
    for name, log in logs.items():
        feed = OneBatchStream(step, bare, options.steps, options.rounds)
        task = OneBatchPretraining(make_config(options, log), step.task.vocabulary, feed=feed)
        with tempfile.TemporaryDirectory() as workdir:
            programs = PrecompiledPrograms(task, step)
            loop.train(programs, loop.check_run(programs, 1), Path(workdir), {})
            lines = len((Path(workdir) / "metrics.jsonl").read_text().splitlines())
        variants[name] = {"lines": lines, **compare(feed.samples, "loop", list(bare))}
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
        pairs = {kind: itertools.pairwise(windows) for kind, windows in samples[baseline].items()}
        around = {kind: [statistics.mean(pair) for pair in neighbours] for kind, neighbours in pairs.items()}
        overhead[baseline] = {}
        for kind, windows in samples[name].items():
            extra = [window - mean for window, mean in zip(windows, around[kind], strict=True)]
            whole = around["seconds" if kind == "main" else kind]
            shares = [seconds / mean for seconds, mean in zip(extra, whole, strict=True)]
            overhead[baseline][kind] = {
                "per_step": statistics.median(extra),
                "share": statistics.median(shares),
                "share_range": [min(shares), max(shares)],
            }
    medians = {side: {k: statistics.median(v) for k, v in kinds.items()} for side, kinds in samples.items()}
    return {"medians": medians, "overhead": overhead, "samples": samples}


def bench_checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Windows without and with a save; and a save while nothing else runs."""
    step = CompiledStep(make_config(options, LogConfig()))
    bare, samples = BareStep(step), {}
    bare.run(WARM_UP)
    numbers = itertools.count(1)
    with (
        tempfile.TemporaryDirectory(dir=options.out) as directory,
        Checkpoints(Path(directory) / "checkpoints", keep=1) as checkpoints,
    ):

        def save(steps: int) -> dict[str, float]:
            return timed_save(checkpoints, next(numbers), bare, steps)

        alone, saves = save(0) | {"flush": flush(checkpoints)}, []
        for _ in range(options.rounds):
            with timed(samples, "without", options.every):
                bare.run(options.every)
            with timed(samples, "with a save", options.every):
                measured = save(options.every)
            saves.append(measured | {"flush": flush(checkpoints)})
        with timed(samples, "without", options.every):
            bare.run(options.every)
        (kept,) = checkpoints.directory.iterdir()
        start = time.perf_counter()
        damage = find_damage(kept)
        sha256 = time.perf_counter() - start
        assert damage is None, damage
        size = sum(file.stat().st_size for file in _files(checkpoints))
    compared = compare(samples, "with a save", ["without"])
    written = {name: size / seconds["written"] for name, seconds in {"alone": alone, "training": saves[-1]}.items()}
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(bare.state.params)),
        "bytes": size,
        "alone": alone,
        "saves": saves,
        "sha256_alone": sha256,
        "bytes_per_second": {**written, "sha256": size / sha256},
        **compared,
    }


def timed_save(checkpoints: Checkpoints, number: int, bare: BareStep, steps: int) -> dict[str, float]:
    """Save, run `steps` steps, and wait for the commit.

    Returns:
      seconds: `blocked` in the call; from its start until the arrays were `written` and until the `committed` marker
      appeared, by file times; and `waited` for the commit after the last step.
    """
    start, began = time.perf_counter(), time.time()
    checkpoints.save(number, bare.state, {})
    blocked = time.perf_counter() - start
    bare.run(steps)
    trained = time.perf_counter()
    checkpoints.wait()
    waited = time.perf_counter() - trained
    after = sorted((file.name == COMMIT_MARKER, file.stat().st_mtime - began) for file in _files(checkpoints))
    (_, written), (_, committed) = after[-2:]
    return {"blocked": blocked, "written": written, "committed": committed, "waited": waited}


def flush(checkpoints: Checkpoints) -> float:
    """Seconds to sync all files to disk, so that this does not slow down a window without a save."""
    start = time.perf_counter()
    for file in _files(checkpoints):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
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
    lines = [f"{'':22}{'seconds':>12}{'cpu':>12}{'main':>12}   ms per step"]
    for side, kinds in compared["medians"].items():
        lines.append(f"{side:22}" + "".join(f"{1e3 * kinds[kind]:12.2f}" for kind in ("seconds", "cpu", "main")))
    for baseline, kinds in compared["overhead"].items():
        lines.append(f"{name} over {baseline}:")
        for kind, extra in kinds.items():
            low, high = extra["share_range"]
            lines.append(
                f"  {kind:8}{extra['share']:+7.2%} ({low:+.2%} to {high:+.2%}), ms {1e3 * extra['per_step']:+.3f}"
            )
    return lines


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = parser.add_subparsers(dest="case", required=True, metavar="hooks|checkpoint")
    hooks, checkpoint = cases.add_parser("hooks"), cases.add_parser("checkpoint")
    for case, preset, rounds in ((hooks, "bert_mini", 7), (checkpoint, "bert_base", 2)):
        case.add_argument("--preset", choices=PRESETS, default=preset, help=f"default {preset}")
        case.add_argument("--seq-len", type=positive, default=128, help="tokens per row")
        case.add_argument("--batch", type=positive, default=8, help="rows per step")
        case.add_argument(
            "--optimizer", choices=("adamw", "lamb"), default="adamw", help="optimizer of the saved moments"
        )
        case.add_argument("--rounds", type=positive, default=rounds, help="windows; medians are over them")
        case.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    hooks.add_argument("--steps", type=positive, default=40, help="steps in a window")
    hooks.add_argument("--log-every", type=positive, default=10, help="steps between lines of metrics")
    checkpoint.add_argument("--every", type=positive, default=50, help="steps in a window")
    checkpoint.add_argument("--out", type=Path, help="parent directory of the saves; default: that of temporary files")
    options = parser.parse_args(arguments)
    if options.case == "hooks" and options.steps % options.log_every:
        parser.error(f"--steps {options.steps}: windows with equal numbers of lines need a multiple of --log-every")
    if options.case == "checkpoint" and options.out and not options.out.is_dir():
        parser.error(f"--out {options.out}: there is no such directory")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0, or 2 for a mistake of the user."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    cases = {"hooks": (bench_hooks, render_hooks), "checkpoint": (bench_checkpoint, render_checkpoint)}
    measure, render = cases[options.case]
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "out")}
    try:
        report = bench_bert_jax.describe_device(1) | settings | measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = stamped(report, "bench_loop", arguments)
    write(report, options.json)
    shapes = f"{report['preset']}, {report['optimizer']}, {report['batch']} x {report['seq_len']}"
    print("\n".join([f"{report['device']}, {report['threads']} threads; {shapes}", *render(report)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
