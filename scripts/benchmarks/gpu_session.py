"""What half an hour on one GPU is used for, in order of value: measured milliseconds beside predicted ones.

    python scripts/benchmarks/gpu_session.py OUT                           # everything, 30 minutes
    python scripts/benchmarks/gpu_session.py OUT --stages device,trace     # a part, where a command may take 10 minutes
    python scripts/benchmarks/gpu_session.py OUT --trees before=../before,without-norm=../without_norm
    python scripts/benchmarks/gpu_session.py OUT --dry                     # the same commands, tiny, on a CPU
    python scripts/benchmarks/gpu_session.py OUT --stages words --corpus CORPUS   # trains words_10m; twice

`words` trains the preset words_10m for 9 minutes in OUT/words and saves; the same command continues it
(docs/recipes.md). It is no part of a session unless it is named.

Each measurement is a process with a limit of time; the next one starts in any case. A tree is another checkout of
bert_jax, measured in turn with this one: the commit before a change, or this one with a commit reverted (`git worktree
add DIR`, `git -C DIR revert -n COMMIT`). OUT gets at most six files: report.json, written after every measurement, and
log.txt, target_config.txt (compare it with bert_jax/planning/gpus), autotune.pbtxt, errors.txt and tests.txt.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, one_of
from bert_jax.errors import require

ROOT = Path(__file__).resolve().parents[2]
STEPS = {"large": ("bert_large", 512, 32), "base": ("bert_base", 128, 256)}
OTHERS = {"large 128": ("bert_large", 128, 128), "base 512": ("bert_base", 512, 64)}
BEFORE = {"large": 104.6, "base": 55.3}
"""Milliseconds of a step measured on an H200 before the changes (docs/benchmarks/h200)."""
PREDICTED = {"large": 67.0, "base": 36.8, "large 128": 67.0, "base 512": 40.0}
"""Milliseconds of a step on an H200 after all planned changes: sums of estimates from bytes and instructions. Not made
yet: one backward kernel for short rows, and pairs of blocks without a mask."""
SAVED = {
    "attention": (14.0, 2.0),
    "in-place": (4.7, 3.5),
    "gradients": (3.0, 2.0),
    "norm": (1.9, 1.5),
    "gelu": (1.1, 0.9),
    "hash": (1.3, 1.0),
    "head": (1.2, 1.9),
    "classes": (0.15, 0.3),
    "bias": (0.6, 0.45),
    "lamb": (0.15, 0.05),
}
"""Milliseconds that a change is predicted to save of the large and of the base step; its tree is `without-NAME`: norm,
the kernel of dropout, residual and LayerNorm; head, the loss with fewer passes, and classes, its multiple of 128; bias,
the gradient of the projection's bias in the kernels of attention; lamb, its sums and corrections. Norm and the last
three are bytes / 4.0 TB/s of the compiled program."""
EDITS = {
    "bert_jax/config/sections.py": "GPU_ATTENTION_BLOCK, TPU_ATTENTION_BLOCK = {block}, 128",
    "bert_jax/model/gpu_attention.py": "num_warps={warps}, num_stages={stages}",
}
"""Where the tiles of attention are in the sources."""
TILES = [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3)]
"""Rows of a block of attention, warps and stages: those of the sources, and the others that are tried."""
WORDS_SECONDS = 540
"""Of one call that trains."""
DRY_SECONDS = {"words": 60}
"""Of a call on a CPU that ends before its work does."""
SAVING_SECONDS = 45
"""Between SIGTERM, at which a run saves and exits with 75, and the end of its time."""
DRY_WORDS = (
    "--phases.0.hours None --phases.0.steps 1000000 --phases.0.warmup-steps 1 --phases.0.seq-len 16 "
    "--phases.0.batch-size 2 --model.num-layers 1 --model.hidden-size 64 --model.num-heads 2 "
    "--model.intermediate-size 64 --model.compute-dtype float32"
)
"""A run that takes longer than a dry call."""
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


Tile = tuple[int, int, int]


class Command(NamedTuple):
    """One measurement."""

    what: str
    words: list[str]
    """Of Python."""
    predicted: float | None = None
    """Milliseconds."""
    flags: str = ""
    """XLA_FLAGS."""
    tree: Path = ROOT
    file: str | None = None
    """In OUT, for what it prints; default: only the log."""


class Setting(NamedTuple):
    """What all stages share."""

    out: Path
    scratch: Path
    trees: dict[str, Path]
    dry: bool
    corpus: Path | None = None

    def first(self, names: Iterable[Any]) -> list[Any]:
        """All of them, or the first."""
        return [*names][: 1 if self.dry else None]

    def bench(self, name: str, what: str, predicted: float | None = None, *more: str, **where: Any) -> Command:
        """Time the step `name`, or a tiny one."""
        preset, seq_len, rows = ("bert_tiny", 16, 2) if self.dry else (STEPS | OTHERS)[name]
        words = ["-m", "bert_jax", "bench", "--presets", preset, "--seq-lens", str(seq_len), "--batch", str(rows)]
        words += ["--dropout", "0.1", "--attention", "reference" if self.dry else "pallas_gpu", "--rounds", "1"]
        words += ["--budget", "110", "--optimizer", "lamb", *more]
        return Command(f"{name}: {what}", words, predicted, **where)


def device(at: Setting) -> Iterator[Command]:
    """Rates of the device, and its description."""
    yield Command("rates and description", [__file__, str(at.out), "--figures", *(["--dry"] if at.dry else [])])


def trace(at: Setting) -> Iterator[Command]:
    """Where the time of the unrolled step goes, with and without command buffers; choices of the autotuner."""
    for name in at.first(STEPS):
        preset, seq_len, rows = ("bert_tiny", 16, 2) if at.dry else STEPS[name]
        variants = {
            "command buffers": f"--xla_gpu_dump_autotune_results_to={at.out / 'autotune.pbtxt'}",
            "no command buffers": NO_COMMAND_BUFFERS,
        }
        for what, flags in at.first(variants.items()):
            words = ["--presets", preset, "--seq-len", str(seq_len), "--batch", str(rows)]
            script = ROOT / "scripts" / "benchmarks" / "trace_step.py"
            yield Command(f"{name}: trace, {what}", [str(script), *words], flags=flags)
            yield at.bench(name, what, PREDICTED[name], flags=flags)


def before(at: Setting) -> Iterator[Command]:
    """This tree and the one before, in turn."""
    for name in at.first(STEPS):
        for turn in (1, 2):
            yield at.bench(name, f"now, turn {turn}", PREDICTED[name])
            if "before" in at.trees:
                yield at.bench(name, f"before, turn {turn}", BEFORE[name], tree=at.trees["before"])


def tiles(at: Setting) -> Iterator[Command]:
    """Errors of attention beside the reference in float32, and blocks, warps and stages of its kernels."""
    lengths = "16" if at.dry else "128,512,1024"
    words = [str(ROOT / "scripts" / "benchmarks" / "attention_errors.py"), "--seq-lens", lengths]
    yield Command("errors of attention", words, file="errors.txt")
    for tile in at.first(TILES[1:]):
        name = "/".join(map(str, tile))
        yield at.bench("large", f"tiles {name}", tree=edited(at.scratch / name.replace("/", "_"), tile))


def without(at: Setting) -> Iterator[Command]:
    """Each change off alone."""
    for tree, path in at.trees.items():
        if tree.startswith("without-"):
            saved = dict(zip(STEPS, SAVED[tree.removeprefix("without-")], strict=True))
            for name in at.first(STEPS):
                yield at.bench(name, tree, PREDICTED[name] + saved[name], tree=path)


def shapes(at: Setting) -> Iterator[Command]:
    """The four shapes, beside transformers with torch.compile."""
    for name in at.first(STEPS | OTHERS):
        yield at.bench(name, "beside transformers", PREDICTED[name], *([] if at.dry else ["--peer", "transformers"]))


def tests(at: Setting) -> Iterator[Command]:
    """Quick tests of the model, objectives and training on the device."""
    paths = ["tests/test_chips.py"] if at.dry else ["tests/model", "tests/objectives", "tests/training"]
    words = ["-m", "pytest", "-q", "-m", "not slow", "--maxfail=20", *paths]
    yield Command("tests on the device", words, file="tests.txt")


def deterministic(at: Setting) -> Iterator[Command]:
    """The same losses twice."""
    words = [__file__, str(at.out), "--losses", *(["--dry"] if at.dry else [])]
    for turn in (1, 2):
        flags = "" if at.dry else "--xla_gpu_deterministic_ops=true"
        yield Command(f"deterministic losses, turn {turn}", words, flags=flags)


def float8(at: Setting) -> Iterator[Command]:
    """8-bit floats in dense layers."""
    yield at.bench("large", "float8", PREDICTED["large"], *([] if at.dry else ["--dense-dtype", "float8"]))


def words(at: Setting) -> Iterator[Command]:
    """Train words_10m until the time is up; the next call continues."""
    require(at.corpus is not None, "--stages words needs a corpus: give --corpus DIR")
    command = [
        "-m",
        "bert_jax",
        "pretrain",
        "words_10m",
        "--corpus",
        str(at.corpus),
        "--workdir",
        str(at.out / "words"),
    ]
    command += DRY_WORDS.split() if at.dry else ["--model.attention", "pallas_gpu"]
    yield Command("train words_10m", command, file="words.txt")


STAGES: dict[str, tuple[Callable[[Setting], Iterator[Command]], int]] = {
    "device": (device, 90),
    "trace": (trace, 330),
    "before": (before, 300),
    "tiles": (tiles, 240),
    "without": (without, 300),
    "shapes": (shapes, 300),
    "float8": (float8, 60),
    "tests": (tests, 120),
    "deterministic": (deterministic, 60),
    "words": (words, WORDS_SECONDS),
}
"""Measurements and seconds of each stage, in order."""


def edited(tree: Path, tile: Tile) -> Path:
    """A copy of bert_jax with other tiles of attention."""
    for part in ("bert_jax", "configs"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for file, pattern in EDITS.items():
        old, new = (
            pattern.format(**dict(zip(("block", "warps", "stages"), one, strict=True))) for one in (TILES[0], tile)
        )
        text = (tree / file).read_text()
        assert old in text, f"{file} has no {old}"
        (tree / file).write_text(text.replace(old, new))
    return tree


def run(command: Command, seconds: float, at: Setting, log: Any) -> dict[str, Any]:
    """The outcome of a measurement; what it prints goes to the log."""
    report = at.scratch / "measured.json"
    report.unlink(missing_ok=True)
    words = [sys.executable, *command.words]
    trains = "pretrain" in words
    if not (trains or "pytest" in words or __file__ in words):
        words += ["--json", str(report)]
    environment = os.environ | {"PYTHONPATH": str(command.tree), "JAX_COMPILATION_CACHE_DIR": str(at.scratch / "cache")}
    environment["JAX_PLATFORMS"] = "cpu" if at.dry else "cuda"  # tests choose the CPU otherwise
    if not at.dry:  # a CPU does not know the flags
        environment["XLA_FLAGS"] = command.flags
    started = time.monotonic()
    with subprocess.Popen(
        words, cwd=command.tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds - (SAVING_SECONDS if trains and not at.dry else 0))
            outcome = "done" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            (process.terminate if trains else process.kill)()
            printed, _ = process.communicate()
            outcome = "saved; repeat the command" if process.returncode == 75 else f"stopped after {seconds:.0f} s"
    log.write(f"== {command.what}: {outcome}\n{printed}\n")
    log.flush()
    if command.file:
        (at.out / command.file).write_text(printed)
    row = {"what": command.what, "outcome": outcome, "seconds": time.monotonic() - started}
    found = json.loads(report.read_text()) if report.exists() else {}
    cases = [case for case in found.get("cases", ()) if "seconds" in case]
    if cases:
        row |= {
            "predicted ms": command.predicted,
            "ms": 1000 * cases[0]["seconds"]["median"],
            "MFU": cases[0].get("MFU"),
        }
        row |= {"peer ms": 1000 * cases[1]["seconds"]["median"]} if len(cases) > 1 else {}
    elif "milliseconds" in found:
        row |= {"kernels ms": found["milliseconds"][0]}
    elif outcome == "done" and __file__ in words:
        row |= {"printed": printed.strip().splitlines()[-1]}
    return row


def figures(out: Path, dry: bool) -> str:
    """Copy rate and rates of products of the device; its description goes to OUT."""
    import jax
    import jax.numpy as jnp

    from bert_jax.bench.train_step import queued

    def rate(size: tuple[int, int, int], dtype: Any) -> float:
        m, k, n = size
        left, right = (jax.random.normal(jax.random.key(0), shape).astype(dtype) for shape in ((m, k), (k, n)))
        product = jax.jit(lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.bfloat16))
        return 2 * m * k * n / queued(lambda: product(left, right), 2 if dry else 20)["seconds"] / 1e12

    if not dry:
        from jax._src.lib import xla_client  # the only way to the description

        description = xla_client.get_topology_for_devices(jax.devices()).target_config
        (out / "target_config.txt").write_text(str(description))
    sizes = (
        [(64, 64, 64)] if dry else [(8192, 8192, 8192), (16384, 1024, 4096), (16384, 4096, 1024), (32768, 768, 3072)]
    )
    types = [jnp.bfloat16] if dry else [jnp.bfloat16, jnp.float8_e4m3fn]
    found = {f"TFLOP/s {dtype.__name__} {size}": rate(size, dtype) for size in sizes for dtype in types}
    x = jnp.ones(2**16 if dry else 2**30, jnp.bfloat16)
    found["copy TB/s"] = 4 * x.size / queued(functools.partial(jax.jit(lambda x: x + 1), x), 10)["seconds"] / 1e12
    return json.dumps(found)


def losses(dry: bool) -> str:
    """Losses of ten steps, exactly."""
    from bert_jax.bench.train_step import Case, TrainStep, config_of

    preset, seq_len, rows = ("bert_tiny", 16, 2) if dry else STEPS["base"]
    case = Case(
        preset, seq_len, rows, dtype="bfloat16", attention="reference" if dry else "pallas_gpu", optimizer="lamb"
    )
    step, found = TrainStep(config_of(case)), []
    for _ in range(10):
        step.time_steps(1)
        found.append(step.loss().hex())
    return " ".join(found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the stages."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.figures or options.losses:
        print(figures(options.out, options.dry) if options.figures else losses(options.dry))
        raise SystemExit(0)
    trees = {name: Path(path).resolve() for name, path in (one.partition("=")[::2] for one in options.trees)}
    for name, path in trees.items():
        known = name == "before" or name.removeprefix("without-") in SAVED
        require(known, f"--trees {name}: changes are {', '.join(SAVED)}: write before=DIR or without-CHANGE=DIR")
        require((path / "bert_jax").is_dir(), f"--trees {name}={path}: there is no bert_jax")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, (options.out / "log.txt").open("w") as log:
        at = Setting(options.out.resolve(), Path(scratch), trees, options.dry, options.corpus)
        for name in options.stages:
            stage, seconds = STAGES[name]
            end = time.monotonic() + (DRY_SECONDS.get(name, 100 * seconds) if at.dry else seconds)
            for command in stage(at):
                left = end - time.monotonic()
                harness.progress(f"{name}: {command.what}")
                skipped = {"what": command.what, "outcome": "no time left"}
                rows.append({"stage": name} | (run(command, left, at, log) if left > 5 else skipped))
                (options.out / "report.json").write_text(json.dumps(rows, indent=1))
    turns = [row.get("printed") for row in rows if row["stage"] == "deterministic"]
    return {"measurements": rows, "losses are equal": len(set(turns)) == 1 if turns else None}


def show(report: dict[str, Any]) -> Sequence[str]:
    """A row for each measurement."""
    shown = ("stage", "what", "outcome", "predicted ms", "ms", "peer ms", "MFU")
    rows = [{name: row.get(name) for name in shown} for row in report["measurements"]]
    return harness.report_lines(report | {"measurements": rows})


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("out", type=Path, metavar="OUT", help="directory for the files")
    usual = [name for name in STAGES if name != "words"]
    add("--stages", type=listed(one_of(*STAGES)), default=usual, help=f"default: {','.join(usual)}")
    add("--corpus", type=Path, metavar="DIR", help="of the stage words")
    add("--trees", type=listed(str), default=[], help="NAME=DIR,...: before, without-CHANGE")
    add("--dry", action="store_true", help="tiny, on a CPU")
    add("--figures", action="store_true", help=argparse.SUPPRESS)
    add("--losses", action="store_true", help=argparse.SUPPRESS)


main = functools.partial(harness.run, __doc__, flags, measure, show)


if __name__ == "__main__":
    raise SystemExit(main())
