"""Run `bert-jax pretrain` as several processes with supervisors, as a launcher does; kill and stop them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.peers import free_port

ROOT = Path(__file__).parents[2]
STEPS = 90
FLAGS = (
    "--model.vocab-size 96 --model.hidden-size 64 --model.num-layers 2 --model.num-heads 2 "
    "--model.intermediate-size 128 --model.max-positions 64 --model.hidden-dropout 0.1 --phases.0.seq-len 48 "
    f"--phases.0.batch-size 16 --phases.0.accumulation 1 --phases.0.steps {STEPS} --phases.0.warmup-steps 2 "
    "--phases.0.learning-rate 1e-3 --evaluation.rows 10 --evaluation.batch-size 6 --evaluation.every 30 "
    "--log.every 1 --log.no-tensorboard --data.prefetch 2"
)
TIMEOUT_SECONDS = 240


class Job:
    """The processes of one start of a run."""

    def __init__(
        self,
        corpus: Path,
        workdir: Path,
        processes: int,
        *,
        devices: int = 1,
        checkpoint_every: int = 10,
        steps: int = STEPS,
        extra: dict | None = None,
        interpreters: dict | None = None,
    ):
        """Starts the processes.

        Args:
          corpus, workdir: of the run.
          processes: number of processes; one alone has no supervisor.
          devices: per process.
          checkpoint_every: steps between checkpoints.
          steps: of the run.
          extra: additional flags by process.
          interpreters: Python interpreters by process; others use this one.
        """
        self.workdir = workdir
        self.ready_before = self.ready_count()
        flags = FLAGS.replace(f"--phases.0.steps {STEPS}", f"--phases.0.steps {steps}").split()
        words = ["pretrain", "bert_tiny", "--corpus", str(corpus), "--workdir", str(workdir), *flags]
        words += ["--checkpoint.every", str(checkpoint_every), "--cluster.timeout", "120"]
        self.supervisors = start(words, processes, devices, extra or {}, interpreters or {})

    def wait_for(self, step: int) -> None:
        """Wait until the metrics have a line of this step or a later one."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(line["step"] >= step for line in lines(self.workdir)):
            assert time.monotonic() < deadline and self.supervisors[0].poll() is None, self.end()
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        """Wait until the parameters are initialized, and the first step is about to be compiled."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.ready_count() <= self.ready_before:
            assert time.monotonic() < deadline and self.supervisors[0].poll() is None, self.end()
            time.sleep(0.02)

    def ready_count(self) -> int:
        """Number of starts of the run that were ready to train; each writes its environment."""
        file = self.workdir / "goodput.jsonl"
        return file.read_text().count('"environment"') if file.exists() else 0

    def child(self, process: int) -> int | None:
        """Process id of a training process, if it runs."""
        supervisor = self.supervisors[process].pid
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return int(children[0]) if children else None

    def kill_child(self, process: int) -> None:
        """Send SIGKILL to a training process, as the out-of-memory killer does."""
        self.killed, self.ready_before = self.child(process), self.ready_count()
        os.kill(self.killed, signal.SIGKILL)
        self.killed_process = process

    def wait_for_restart(self) -> None:
        """Wait until another training process has the place of the one that was killed, and has started to compute."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.child(self.killed_process) in (None, self.killed):
            assert time.monotonic() < deadline and self.supervisors[0].poll() is None, self.end()
            time.sleep(0.02)
        self.wait_until_ready()

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each process."""
        return end(self.supervisors)


def start(
    words: list[str],
    processes: int,
    devices: int = 1,
    extra: dict[int, list[str]] | None = None,
    interpreters: dict[int, str] | None = None,
) -> list[subprocess.Popen]:
    """Start `bert-jax WORDS` in several processes, with `extra` flags and other interpreters by process."""
    port = free_port()
    quick_env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment, started = os.environ | quick_env | {"PYTHONPATH": str(ROOT)}, []
    for process in range(processes):
        command = [(interpreters or {}).get(process, sys.executable), "-m", "bert_jax", *words]
        command += ["--cluster.coordinator", f"127.0.0.1:{port}", "--cluster.processes", str(processes)]
        command += ["--cluster.process", str(process), *(extra or {}).get(process, [])]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return started


def faulty_python(directory: Path, fault: str, first: int, last: int) -> str:
    """An interpreter in a new file, whose training processes have a fault (faulty.py)."""
    script = directory / "python"
    command = f"{sys.executable} {ROOT / 'tests' / 'multi_process' / 'faulty.py'} {fault} {first} {last}"
    script.write_text(f'#!/bin/sh\nshift 2\nexec {command} "$@"\n')  # in place of -m bert_jax
    script.chmod(0o755)
    return str(script)


def end(supervisors: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process."""
    results = []
    try:
        for supervisor in supervisors:
            out, err = supervisor.communicate(timeout=TIMEOUT_SECONDS)
            stdout = "\n".join(line for line in out.splitlines() if not line.startswith("[Gloo]"))
            results.append((supervisor.returncode, stdout, err))
    finally:
        for supervisor in supervisors:
            supervisor.kill()
            supervisor.communicate()
    return results


def lines(workdir: Path) -> list[dict]:
    """Complete lines of the metrics, without timings."""
    file = workdir / "metrics.jsonl"
    complete = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [{name: value for name, value in json.loads(line).items() if name != "timing"} for line in complete]
