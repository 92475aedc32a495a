"""What the loop costs on top of the jitted step: metrics and hooks, and saving while training goes on.

    python scripts/benchmarks/bench_loop.py hooks --preset bert_mini --json hooks.json
    python scripts/benchmarks/bench_loop.py checkpoint --preset bert_base --out DIR --json checkpoint.json

`hooks` runs the real loop (training/loop.py) on a stream that hands out one batch for ever, so that reading costs
nothing. Whenever a window of updates is over, the stream keeps the loop waiting and times the bare step, the very
same program, on a batch that is on the device already. Each window of the loop is compared with the bare ones before
and behind it. Norms per layer are computed inside the step; what they cost is seen beside a program without them.

`checkpoint` times windows of bare updates, every other one with a save at its start. Such a window ends when the
save is committed too, as the next save would have to wait for it.

Seconds are of the clock; `cpu` are CPU seconds of all threads, which waver less on a busy machine (on a CPU that also
computes, they are what is taken away from the step), and `main` those of the thread that runs the loop. Every window
begins and ends with an idle device. Needs what training needs.
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
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts" / "benchmarks")) if path not in sys.path]

import bench_ours  # noqa: E402
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
from bert_jax.training.compiled_steps import CompiledSteps  # noqa: E402
from bert_jax.training.pretraining_task import Pretraining  # noqa: E402
from bert_jax.training.run_directory.checkpoint import COMMIT_MARKER, Checkpoints, find_damage  # noqa: E402
from bert_jax.training.sharding import put_rows  # noqa: E402
from bert_jax.training.state import abstract_state, init_state  # noqa: E402
from bert_jax.training.step import make_train_step, put_step_inputs  # noqa: E402

NEVER = 10**9
"""Updates that no window reaches."""
WARM_UP = 2
"""Updates before the first window."""
HOOKS_TARGET, CHECKPOINT_TARGET = 0.01, 0.02
"""Of a bare step's time: what metrics and hooks, and asynchronous saves, are meant to cost at most."""

Samples = dict[str, dict[str, list[float]]]
"""By what was timed and by the kind of second: seconds per update, a number for each window."""


def make_config(options: argparse.Namespace, log: LogConfig) -> Config:
    """The preset in the shapes that were asked for: one phase without end, nothing evaluated, nothing saved."""
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


class Update:
    """The compiled update of a config, which remembers the newest metrics, so that its end can be waited for."""

    def __init__(self, config: Config):
        self.task = Pretraining(config, bench_ours.VOCABULARY._replace(size=config.model.vocab_size))
        self.mesh = loop.checked_mesh(self.task)
        self.phase = config.phases[0]
        self.rows = bench_ours.synthetic_rows(self.phase.batch_size, self.phase.seq_len)
        batch = put_rows(self.rows, self.mesh, self.phase.batch_size)
        self.inputs = batch, put_step_inputs(self.phase.learning_rate, 1, self.mesh)
        step = make_train_step(self.task, self.mesh, self.phase.fewest_micro_batches)
        self.compiled = step.lower(abstract_state(self.task, self.mesh), *self.inputs).compile()
        self.metrics: dict[str, jax.Array] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
        """As the compiled step."""
        state, self.metrics = self.compiled(*inputs)
        return state, self.metrics

    def wait(self) -> None:
        """Until the newest update is done."""
        jax.block_until_ready(self.metrics)


class Bare:
    """The step alone, on a batch and inputs that are on the device already."""

    def __init__(self, update: Update):
        self.update, self.state = update, init_state(update.task, update.mesh)

    def run(self, updates: int) -> None:
        """So many updates, to their end."""
        for _ in range(updates):
            self.state, _ = self.update(self.state, *self.update.inputs)
        self.update.wait()


@contextlib.contextmanager
def timed(samples: Samples, name: str, updates: int) -> Iterator[None]:
    """Add what goes on in here, divided by the number of updates."""
    clocks = {"seconds": time.perf_counter, "cpu": time.process_time, "main": time.thread_time}
    start = {kind: clock() for kind, clock in clocks.items()}
    yield
    for kind, clock in clocks.items():
        samples.setdefault(name, {}).setdefault(kind, []).append((clock() - start[kind]) / updates)


class Feed:
    """A stream of one batch for ever; while the loop waits for it between two windows, it times the bare steps."""

    def __init__(self, update: Update, bare: dict[str, Bare], updates: int, rounds: int):
        self.update, self.bare, self.updates, self.rounds = update, bare, updates, rounds
        self.samples: Samples = {}

    def read(self, start: Cursor) -> Iterator[HostBatch]:
        """Batches for all windows. The loop asks for the next one when it is through with an update."""
        batches = self._endless(start)
        yield from itertools.islice(batches, WARM_UP)
        self.update.wait()
        for _ in range(self.rounds):
            self._time_bare()
            with timed(self.samples, "loop", self.updates):
                yield from itertools.islice(batches, self.updates)
                self.update.wait()
        self._time_bare()

    def _endless(self, cursor: Cursor) -> Iterator[HostBatch]:
        size = self.update.phase.batch_size
        while True:
            cursor = dataclasses.replace(cursor, step=cursor.step + 1, rows=cursor.rows + size)
            yield HostBatch(self.update.rows, size, cursor)

    def _time_bare(self) -> None:
        for name, bare in self.bare.items():
            with timed(self.samples, name, self.updates):
                bare.run(self.updates)


@dataclasses.dataclass(frozen=True)
class Fed(Pretraining):
    """Pretraining on a `Feed`."""

    feed: Any = None

    def batches(self, cursor: Cursor) -> Any:
        """The feed's."""
        return self.feed.read(cursor)


class Ready(CompiledSteps):
    """Programs that hand out an update which is compiled already, the one that also runs bare."""

    def __init__(self, update: Update, *given: Any):
        super().__init__(*given)
        self.ready = update

    def train_step(self, phase: int) -> tuple[Update, int]:
        """The one there is."""
        return self.ready, self.ready.phase.fewest_micro_batches


def bench_hooks(options: argparse.Namespace) -> dict[str, Any]:
    """The loop without and with TensorBoard events, each beside bare steps."""
    logs = {
        name: LogConfig(every=options.log_every, tensorboard=events)
        for name, events in (("loop", False), ("loop with tensorboard", True))
    }
    update = Update(make_config(options, logs["loop"]))
    plain = Update(make_config(options, LogConfig(layers=False)))
    bare = {"bare": Bare(update), "bare without layers": Bare(plain)}
    for side in bare.values():
        side.run(WARM_UP)
    variants = {}
    for name, log in logs.items():
        feed = Feed(update, bare, options.updates, options.rounds)
        task = Fed(make_config(options, log), update.task.vocabulary, feed=feed)
        with tempfile.TemporaryDirectory() as workdir:
            with mock.patch.object(loop, "CompiledSteps", lambda *given: Ready(update, *given)):
                loop.train(task, Path(workdir), {})
            lines = len((Path(workdir) / "metrics.jsonl").read_text().splitlines())
        variants[name] = {"lines": lines, **compare(feed.samples, "loop", list(bare))}
    return {"metrics": len(update.metrics), "variants": variants}


def compare(samples: Samples, name: str, yardsticks: Sequence[str]) -> dict[str, Any]:
    """Medians, and by how much one thing takes longer than each of the others, which were timed around it.

    A window is compared with the mean of the yardstick's windows before and behind it, so that a machine that grows
    slower or faster evenly does not count. CPU seconds of the main thread are put over the yardstick's time.

    Args:
      samples: of the yardsticks one window more than of the thing.
      name: the thing.
      yardsticks: what it is compared with.
    """
    overhead: dict[str, Any] = {}
    for yardstick in yardsticks:
        pairs = {kind: itertools.pairwise(windows) for kind, windows in samples[yardstick].items()}
        around = {kind: [statistics.mean(pair) for pair in neighbours] for kind, neighbours in pairs.items()}
        overhead[yardstick] = {}
        for kind, windows in samples[name].items():
            extra = [window - mean for window, mean in zip(windows, around[kind], strict=True)]
            whole = around["seconds" if kind == "main" else kind]
            shares = [seconds / mean for seconds, mean in zip(extra, whole, strict=True)]
            overhead[yardstick][kind] = {
                "per_update": statistics.median(extra),
                "share": statistics.median(shares),
                "share_range": [min(shares), max(shares)],
            }
    medians = {side: {k: statistics.median(v) for k, v in kinds.items()} for side, kinds in samples.items()}
    return {"medians": medians, "overhead": overhead, "samples": samples}


def bench_checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Windows without and with a save; and a save while nothing else goes on."""
    update = Update(make_config(options, LogConfig()))
    bare, samples = Bare(update), {}
    bare.run(WARM_UP)
    numbers = itertools.count(1)
    with (
        tempfile.TemporaryDirectory(dir=options.out) as directory,
        Checkpoints(Path(directory) / "checkpoints", keep=1) as checkpoints,
    ):

        def save(updates: int) -> dict[str, float]:
            return timed_save(checkpoints, next(numbers), bare, updates)

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


def timed_save(checkpoints: Checkpoints, number: int, bare: Bare, updates: int) -> dict[str, float]:
    """Save, do so many updates, and wait for the commit.

    Returns:
      seconds: `blocked` in the call; from its start until the arrays were `written` and until it was `committed`, by
      the files' times; and `waited` for the commit behind the last update.
    """
    start, began = time.perf_counter(), time.time()
    checkpoints.save(number, bare.state, {})
    blocked = time.perf_counter() - start
    bare.run(updates)
    trained = time.perf_counter()
    checkpoints.wait()
    waited = time.perf_counter() - trained
    after = sorted((file.name == COMMIT_MARKER, file.stat().st_mtime - began) for file in _files(checkpoints))
    (_, written), (_, committed) = after[-2:]
    return {"blocked": blocked, "written": written, "committed": committed, "waited": waited}


def flush(checkpoints: Checkpoints) -> float:
    """Seconds until the system has written all files, which must not burden a window without a save."""
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
    lines = [f"{report['metrics']} metrics of an update; a line every {report['log_every']} updates"]
    for name, variant in report["variants"].items():
        lines += ["", f"{name}: {report['updates']} updates a window, {report['rounds']} windows"]
        lines += render_comparison(variant, name="loop")
    return [*lines, "", f"target: at most {HOOKS_TARGET:.0%} over the bare step"]


def render_checkpoint(report: dict[str, Any]) -> list[str]:
    """Windows, saves, rates."""
    lines = [f"{report['parameters']:,} parameters, {report['bytes'] / 1e6:,.1f} MB a checkpoint"]
    lines += [f"a save every {report['every']} updates, {report['rounds']} windows with one"]
    lines += render_comparison(report, name="with a save")
    for name, save in [("alone", report["alone"]), *(("while training", save) for save in report["saves"])]:
        lines.append(f"save {name}: " + ", ".join(f"{what} {seconds:.3f} s" for what, seconds in save.items()))
    rates = ", ".join(f"{what} {rate / 1e6:,.0f} MB/s" for what, rate in report["bytes_per_second"].items())
    lines.append(f"SHA-256 alone {report['sha256_alone']:.3f} s; {rates}")
    return [*lines, f"target: at most {CHECKPOINT_TARGET:.0%} of the step time"]


def render_comparison(compared: dict[str, Any], name: str) -> list[str]:
    """Medians per update, then what is on top."""
    lines = [f"{'':22}{'seconds':>12}{'cpu':>12}{'main':>12}   ms per update"]
    for side, kinds in compared["medians"].items():
        lines.append(f"{side:22}" + "".join(f"{1e3 * kinds[kind]:12.2f}" for kind in ("seconds", "cpu", "main")))
    for yardstick, kinds in compared["overhead"].items():
        lines.append(f"{name} over {yardstick}:")
        for kind, extra in kinds.items():
            low, high = extra["share_range"]
            lines.append(
                f"  {kind:8}{extra['share']:+7.2%} ({low:+.2%} to {high:+.2%}), ms {1e3 * extra['per_update']:+.3f}"
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
        case.add_argument("--batch", type=positive, default=8, help="rows per update")
        case.add_argument("--optimizer", choices=("adamw", "lamb"), default="adamw", help="whose moments")
        case.add_argument("--rounds", type=positive, default=rounds, help="windows; medians are over them")
        case.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    hooks.add_argument("--updates", type=positive, default=40, help="updates in a window")
    hooks.add_argument("--log-every", type=positive, default=10, help="updates between lines of metrics")
    checkpoint.add_argument("--every", type=positive, default=50, help="updates in a window")
    checkpoint.add_argument("--out", type=Path, help="where to save, below it; default: where temporary files go")
    options = parser.parse_args(arguments)
    if options.case == "hooks" and options.updates % options.log_every:
        parser.error(f"--updates {options.updates}: windows with equal numbers of lines need a multiple of --log-every")
    if options.case == "checkpoint" and options.out and not options.out.is_dir():
        parser.error(f"--out {options.out}: there is no such directory")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0, or 2 for a mistake of the user."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    cases = {"hooks": (bench_hooks, render_hooks), "checkpoint": (bench_checkpoint, render_checkpoint)}
    measure, render = cases[options.case]
    asked = {name: value for name, value in vars(options).items() if name not in ("json", "out")}
    try:
        report = bench_ours.describe_device(1) | asked | measure(options)
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
