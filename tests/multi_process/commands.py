"""`bert-jax pretrain` as several processes with their supervisors, as a launcher starts them; killed and stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 90
FLAGS = (
    "--model.vocab-size 96 --model.hidden-size 64 --model.num-layers 2 --model.num-heads 2 "
    "--model.intermediate-size 128 --model.max-positions 64 --phases.0.seq-len 48 "
    f"--phases.0.batch-size 32 --phases.0.accumulation 1 --phases.0.steps {STEPS} --phases.0.warmup-steps 2 "
    "--phases.0.learning-rate 1e-3 --evaluation.rows 10 --evaluation.batch-size 6 --evaluation.every 30 "
    "--checkpoint.every 10 --log.every 1 --log.no-tensorboard --data.prefetch 2 --cluster.timeout 120"
)
SECONDS = 240


class Job:
    """The processes of one start."""

    def __init__(
        self,
        corpus: Path,
        workdir: Path,
        processes: int,
        *,
        devices: int = 1,
        extra: dict | None = None,
        interpreters: dict | None = None,
    ):
        """Starts them.

        Args:
          corpus, workdir: of the run.
          processes: how many; one has no supervisor.
          devices: of each process.
          extra: flags of single processes, by process.
          interpreters: of single processes, instead of this one.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.workdir, self.supervisors = workdir, []
        quick = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        environment = os.environ | quick | {"PYTHONPATH": str(ROOT)}
        for process in range(processes):
            seat = f"--cluster.coordinator 127.0.0.1:{port} --cluster.processes {processes} --cluster.process {process}"
            words = ["bert_tiny", "--corpus", str(corpus), "--workdir", str(workdir), *FLAGS.split(), *seat.split()]
            words += (extra or {}).get(process, [])
            command = [(interpreters or {}).get(process, sys.executable), "-m", "bert_jax", "pretrain", *words]
            self.supervisors.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )

    def wait_for(self, update: int) -> None:
        """Until the metrics have the line of an update."""
        end = time.monotonic() + SECONDS
        while not any(line["step"] >= update for line in lines(self.workdir)):
            assert time.monotonic() < end and self.supervisors[0].poll() is None, self.end()
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        """Until the parameters are there, and the first update is about to be compiled."""
        end, file = time.monotonic() + SECONDS, self.workdir / "goodput.jsonl"
        while (
            len({json.loads(line)["start_time"] for line in file.read_text().splitlines(True) if line[-1:] == "\n"}) < 2
        ):
            assert time.monotonic() < end and self.supervisors[0].poll() is None, self.end()
            time.sleep(0.02)

    def child(self, process: int) -> int:
        """The process that trains."""
        supervisor = self.supervisors[process].pid
        (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return int(child)

    def kill_child(self, process: int) -> None:
        """As the out-of-memory killer does."""
        os.kill(self.child(process), signal.SIGKILL)

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each process."""
        found = []
        try:
            for supervisor in self.supervisors:
                out, err = supervisor.communicate(timeout=SECONDS)
                said = "\n".join(line for line in out.splitlines() if not line.startswith("[Gloo]"))
                found.append((supervisor.returncode, said, err))
        finally:
            for supervisor in self.supervisors:
                supervisor.kill()
                supervisor.communicate()
        return found


def lines(workdir: Path) -> list[dict]:
    """Complete lines of the metrics, without their times."""
    file = workdir / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [{name: value for name, value in json.loads(line).items() if name != "timing"} for line in whole]
