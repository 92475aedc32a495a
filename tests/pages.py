"""The commands that README.md and docs/ show, and how tests run them: small, and in this process where they can be.

Tests of pages share the session's corpora and trained run (tests/fixtures.py), and compiled programs in jax's cache.
"""

import contextlib
import gc
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
SMALL_PHASE = (
    "--phases.0.steps 3 --phases.0.seq-len 32 --phases.0.batch-size 8 --phases.0.accumulation 1 --evaluation.rows 8 "
    "--evaluation.batch-size 8"
)
SMALL_RUN = (
    "--model.vocab-size 120 --model.hidden-size 64 --model.num-layers 1 --model.num-heads 2 "
    f"--model.intermediate-size 96 --model.max-positions 64 {SMALL_PHASE}"
)
SECOND_PHASE = "--phases.1.steps 1 --phases.1.seq-len 32 --phases.1.batch-size 8 --phases.1.accumulation 1"
TWO_PHASES = ("words_10m_cpu", "bert_base", "bert_mini", "bert_large", "bert_large_76min", "bert_large_lamb")
SMALLER = {
    "pretrain": SMALL_RUN,
    "adapt": SMALL_PHASE,
    "doctor": SMALL_RUN,
    "plan": f"{SMALL_RUN} --topology v5e:2x2",
    "tokenizer": "--vocab-size 120",
    "build": "--workers 1 --validation-fraction 0.2",
    "finetune": "--steps 2 --batch-size 8",
    "compress distil": "--steps 2 --batch-size 8",
    "compress pretrain": SMALL_PHASE,
    "compress prune": "--examples 8 --iterations 2",
    "bench --serve": "--rounds 1 --seq-lens 8,16 --batch 2",
    "bench": "--budget 30 --seq-lens 16 --batch 2 --dropout 0.1 --rounds 1",
    "scripts/benchmarks/bench_loop.py": "--preset bert_tiny --seq-len 16 --batch 2 --steps 4 --rounds 1",
    "scripts/benchmarks/bench_stream.py": ("--rounds 1 --seconds 0.1 --seq-lens 32 --documents 1000 --tokens 100000"),
    "scripts/benchmarks/trace_step.py": "--presets bert_tiny --seq-len 16",
    "scripts/benchmarks/step_program.py": "--steps bert_tiny:128:8 --layers 2",
    "scripts/benchmarks/gpu_session.py": "--dry --stages device",
}
"""Flags that replace those of a command, by its second word, or its second and third."""

SHARING = ["README.md", "docs/ablation.md", "docs/report.md", "docs/pretrain.md", "docs/recipes.md"]
"""Pages whose commands run in one directory: what several of them show is executed once."""
TRAINING = ["docs/large_batch.md", "docs/monitoring.md", "docs/pods.md", "docs/slurm.md", "docs/stream.md"]
TRAINING += ["docs/tutorials/other_models.md", "docs/tutorials/own_text.md"]
TOOLS = ["docs/doctor.md", "docs/performance.md", "docs/tpu.md"]
ALONE = ["docs/conversion.md", "docs/kubernetes.md", "docs/object_stores.md", "docs/plan.md", "docs/reference.md"]
ALONE += ["docs/continued_pretraining.md", "docs/finetuning.md", "docs/multilingual.md", "docs/scaling.md"]
ALONE += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "compression").glob("*.md"))
"""Pages whose commands need something of their own."""
# docs/corpus.md has its own test beside the code it documents (tests/data_prep/test_cli.py).
ANALYSIS = ["docs/analysis.md"]
ANALYSIS += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "analysis").glob("*.md"))
PAGES = [*SHARING, *TRAINING, *TOOLS, *ALONE, *ANALYSIS]
WITH_PYTHON = [
    "README.md",
    "docs/analysis.md",
    "docs/analysis/cloze.md",
    "docs/analysis/viewer.md",
    "docs/conversion.md",
]
WITH_PYTHON += ["docs/tutorials/other_models.md"]
"""Pages whose Python blocks run after their commands."""


def code_of(page: str, language: str) -> str:
    """All code blocks of a language on a page, concatenated."""
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S))


def lines_of(page: str) -> list[str]:
    """The lines of all ```bash blocks, continued lines joined."""
    lines = code_of(page, "bash").replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.strip()]


def commands_of(page: str) -> list[str]:
    """The lines that tests can run."""
    return [line for line in lines_of(page) if line.startswith(("bert-jax ", "bert-data ", "python "))]


def shrink(line: str) -> list[str]:
    """The words of a command, with flags that make it small in place of its own."""
    words = shlex.split(line)
    smaller = shlex.split(SMALLER.get(" ".join(words[1:3]), SMALLER.get(words[1], "")))
    if words[1] == "tokenizer" and "--from" in words:  # trains nothing
        smaller = []
    if words[0] == "bert-jax" and words[1] in ("pretrain", "plan") and words[2] in TWO_PHASES:
        smaller += shlex.split(SECOND_PHASE)
    if "--phases.0.decay" in words and smaller:  # a schedule in steps, of which a fork names one
        at = smaller.index("--phases.0.steps")
        del smaller[at : at + 2]
    given = {flag for flag in smaller if flag.startswith("--")}
    kept, skip = [], False
    for word in words:
        skip = word in given or (skip and not word.startswith("--"))
        if not skip:
            kept.append(word)
    return kept + smaller


def load_script(path: Path):
    """The module of a script, imported as `python PATH` would: its directory is on sys.path."""
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))


@contextlib.contextmanager
def process_restored():
    """Undo what a command changes in this process: environment, cores, where jax keeps compiled programs."""
    environment, cores = dict(os.environ), os.sched_getaffinity(0)
    cache = jax.config.jax_compilation_cache_dir
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.sched_setaffinity(0, cores)
        jax.config.update("jax_compilation_cache_dir", cache)


def run(words: list[str]) -> None:
    """Run a command in this process and in the current directory; it must succeed."""
    from bert_jax.cli import main as bert_jax_cli
    from data_prep.cli import main as data_prep_cli

    program, *arguments = words[: words.index(">")] if ">" in words else words
    if "--cluster.processes" in words:  # about processes, so it gets one
        command = [sys.executable, "-m", "bert_jax", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr[-3000:]}"
        return
    if program == "python":
        main = load_script(ROOT / arguments.pop(0)).main
    else:
        main = {"bert-jax": bert_jax_cli, "bert-data": data_prep_cli}[program].main
    with process_restored():
        code = main(arguments)
    assert not code, f"exit code {code}: {shlex.join(words)}"


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, words_of=shrink, done=()) -> list[list[str]]:
    """Run the commands of a page in `folder`, then its Python blocks if they stand on their own.

    Args:
      page, folder, monkeypatch: as the names say.
      words_of: shrinks a command.
      done: commands of other pages that were run in the folder; they are not run again.

    Returns:
      these commands, and those of the page.
    """
    monkeypatch.chdir(folder)
    commands = [words_of(line) for line in commands_of(page)]
    assert commands, f"{page} shows no command"
    new = [words for words in commands if words not in done]
    for flag, made in (("--workdir runs/first ", "runs/first"), ("--out corpus ", "corpus")):
        if any(flag in f"{shlex.join(words)} " for words in new):
            shutil.rmtree(folder / made)
    for words in new:
        run(words)
    if page in WITH_PYTHON:
        with warnings.catch_warnings(action="ignore"):  # as in a session of a user
            exec(compile(code_of(page, "python"), page, "exec"), {"__name__": "__main__"})
            gc.collect()
    return [*done, *new]
