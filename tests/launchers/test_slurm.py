"""slurm.sbatch on a real one-node Slurm, if available: two tasks, preempted and requeued."""

import os
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.multi_process.commands import FLAGS, STEPS, Job, lines
from tests.multi_process.configs import build_corpora

ROOT = Path(__file__).parents[2]
SLURM_HERE = Path(__file__).parent / "slurm_here.sh"
SCRIPT = ROOT / "bert_jax" / "launchers" / "slurm.sbatch"
TIMEOUT_SECONDS = 240


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Environment in which sbatch uses it."""
    directory = tmp_path_factory.mktemp("slurm")
    settings = {"SLURM_HERE_GRACE": "60", "SLURM_HERE_INSTALL": os.environ.get("SLURM_HERE_INSTALL", "0")}
    started = subprocess.run(
        ["bash", SLURM_HERE, "start", directory],
        capture_output=True,
        text=True,
        env=os.environ | settings,
        timeout=TIMEOUT_SECONDS,
    )
    if started.returncode == 3:
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    tools = directory / "bin"
    tools.mkdir()
    command = tools / "bert-jax"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m bert_jax "$@"\n')
    command.chmod(0o755)
    yield {
        **os.environ,
        "SLURM_CONF": str(directory / "slurm.conf"),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    subprocess.run(["bash", SLURM_HERE, "stop", directory], check=True, capture_output=True)


def call(slurm: dict[str, str], *words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, env=slurm, check=True, timeout=60).stdout.strip()


def wait_until_ended(slurm: dict[str, str], job: str, log: Path) -> str:
    """Wait until a job has ended; return its state."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        info = call(slurm, "scontrol", "show", "job", job)
        state = info.partition("JobState=")[2].split()[0]
        if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"):
            return state
        assert time.monotonic() < deadline, info + (log.read_text()[-3000:] if log.exists() else "")
        time.sleep(0.3)


@pytest.mark.slow
def test_a_preempted_job_ends_as_an_undisturbed_one(slurm, tmp_path):
    corpus = build_corpora(tmp_path)[0]
    assert [code for code, _, _ in Job(corpus, tmp_path / "undisturbed", 2).end()] == [0, 0]
    workdir, log = tmp_path / "run", tmp_path / "log"
    words = ["bert_tiny", "--corpus", str(corpus), "--workdir", str(workdir), *FLAGS.split()]
    words += ["--checkpoint.every", "10"]
    submit = ["sbatch", "--parsable", "--ntasks", "2", "--partition", "low", "--output", str(log)]
    job = call(slurm, *submit, str(SCRIPT), *words)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any(line["step"] >= 20 for line in lines(workdir)):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else call(slurm, "squeue")
        time.sleep(0.02)
    call(
        slurm, "sbatch", "--parsable", "--ntasks", "2", "--partition", "high", "--output", "/dev/null", "--wrap", "true"
    )
    assert wait_until_ended(slurm, job, log) == "COMPLETED", log.read_text()[-5000:]
    text = log.read_text()
    assert "Restarts=1" in call(slurm, "scontrol", "show", "job", job)
    stopped = text.partition("stopped and saved at step ")[2].split()[0]
    assert 20 <= int(stopped) < STEPS and f"continuing from step {stopped}" in text
    assert text.count("srun ended with 75") == 1 and "srun ended with 0" in text
    assert lines(workdir) == lines(tmp_path / "undisturbed")


KILLED = """
def config():
    import os
    assert os.environ["NCCL_DEBUG"] == "INFO", "variables of the shell reach the tasks"
    from bert_jax.config import presets
    from bert_jax.training.reporter import Reporter
    Reporter.before_step = lambda self, step: os.kill(os.getpid(), 9)
    return presets.load_config("bert_tiny")
"""


@pytest.mark.slow
def test_retries_end_if_none_makes_a_checkpoint(slurm, tmp_path):
    """The supervisors start killed processes once more; then the job is requeued, and its third start is refused."""
    (tmp_path / "killed.py").write_text(KILLED)
    log, corpus = tmp_path / "log", build_corpora(tmp_path)[0]
    words = [str(tmp_path / "killed.py"), "--corpus", str(corpus), "--workdir", str(tmp_path / "run"), *FLAGS.split()]
    words += ["--checkpoint.every", "10"]
    submit = ["sbatch", "--parsable", "--ntasks", "2", "--cpus-per-task", "1", "--output", str(log), str(SCRIPT)]
    job = call(slurm | {"NCCL_DEBUG": "INFO"}, *submit, *words, "--recovery.max-starts", "2")
    assert wait_until_ended(slurm, job, log) == "FAILED"
    text = log.read_text()
    assert text.count("starts again, from the newest checkpoint") == 2, "in each of two tasks"
    assert "Restarts=1" in call(slurm, "scontrol", "show", "job", job) and "srun ended with 2" in text
    assert "the last 2 starts of this run made no checkpoint after step 0" in text


@pytest.mark.parametrize(
    ("minutes", "environment", "code", "message"),
    [
        (60, {}, 0, "srun --kill-on-bad-exit=0 bert-jax pretrain bert_tiny"),
        (60, {"SLURM_CPUS_PER_TASK": "7"}, 0, " --cpus-per-task=7 bert-jax"),
        (6, {}, 2, "error: the time limit is too short: Slurm sends SIGTERM 300 to 360 seconds before it"),
        (5, {"SBATCH_SIGNAL": "TERM@60"}, 0, "bert-jax pretrain"),
        (1, {"SBATCH_SIGNAL": "TERM"}, 2, "60 to 120 seconds"),
        (None, {}, 0, "bert-jax pretrain"),
        ("exit 1", {}, 0, "bert-jax pretrain"),
    ],
)
def test_how_tasks_are_started(minutes, environment, code, message, tmp_path):
    """With tools that stand for those of Slurm. A job without a time limit has no end; `squeue` may fail."""
    squeue = minutes or "echo NONE"
    if isinstance(minutes, int):
        squeue = f"echo {(datetime.now() + timedelta(minutes=minutes)).isoformat(timespec='seconds')}"
    for name, line in {"squeue": squeue, "srun": 'echo "srun $*"', "bert-jax": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1", **environment}
    done = subprocess.run(["bash", SCRIPT, "bert_tiny"], capture_output=True, text=True, env=settings)
    assert done.returncode == code and message in done.stdout + done.stderr, done
    assert len(done.stderr.splitlines()) == (code == 2)


@pytest.mark.parametrize(
    "words, message", [((), "give the config to train"), (("bert_tiny",), "bert-jax is not on PATH")]
)
def test_mistakes_get_one_line(words, message, tmp_path):
    tools = tmp_path / "bert-jax"
    tools.write_text("#!/bin/sh\n")
    tools.chmod(0o755)
    path = "/usr/bin:/bin" if words else f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, env={"PATH": path})
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
