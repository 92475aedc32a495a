"""A run that is killed and started again ends bit-identical to one that was left alone."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_jax.config.presets import load_config
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.run_directory.commit import COMMIT_MARKER
from tests.runs import assert_same_run, committed, numbers

HERE = Path(__file__).parent
CONFIG = HERE / "killed_config.py"


@pytest.fixture(scope="module")
def config():
    return load_config(str(CONFIG))


@pytest.fixture(scope="module")
def run(config, train):
    """Trains in a directory, with hooks of `runs.share_programs`."""
    return functools.partial(train, config)


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory) -> tuple[Path, Path]:
    """A whole run, and a directory with copies of it at some moments: what a kill at that moment leaves."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    workdir, copies, write_commit = directory / "run", directory / "copies", checkpoint.write_commit

    def copy(name: str) -> Path:
        while True:
            try:
                return Path(shutil.copytree(workdir, copies / name))
            except shutil.Error:  # a thread renamed files of a checkpoint meanwhile
                shutil.rmtree(copies / name)

    def spy(path, *rest):
        step = int(path.name)
        if step == 20:
            copy("before the commit")
            (written,) = copy("while arrays are written").glob("checkpoints/00000020/state")
            data = max(written.rglob("d/*"), key=lambda path: path.stat().st_size)
            data.write_bytes(data.read_bytes()[:-9])
            written.rename(written.with_name("state.orbax-checkpoint-tmp-1"))
        write_commit(path, *rest)
        if step == 10:
            marker = copy("in the first commit") / "checkpoints" / path.name / COMMIT_MARKER
            marker.write_bytes(marker.read_bytes()[: marker.stat().st_size // 2])
            marker.rename(marker.with_name(f"{COMMIT_MARKER}.partial"))
        elif step == 40:
            copy("after a commit")

    def copy_lines(step: int, _) -> None:
        if step == 41:
            with (copy("in a line") / "metrics.jsonl").open("a") as file:
                file.write('{"step": 25, "split": "tra')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_commit", spy)
        progress = run(workdir, before_step=copy_lines)
    assert progress.cursor.step == 60 and progress.cursor.phase == 1 and progress.cursor.positions[0].epoch > 2
    return workdir, copies


COMMITTED = {
    "before the commit": [10],
    "while arrays are written": [10],
    "in the first commit": [],  # half a marker must not count: there is no other checkpoint to go back to
    "after a commit": [40, 30, 20],  # at the phase switch, before the oldest goes
    "in a line": None,
}


def test_the_run_grows_learns_and_logs(uninterrupted):
    lines = numbers(uninterrupted[0], "train")
    assert [("gradient_norm/layer_01" in line) for line in lines] == [line["step"] > 40 for line in lines]
    assert lines[0]["mlm_loss"] - lines[-1]["mlm_loss"] > 0.5 and len({line["loss"] for line in lines}) == len(lines)
    assert [line["step"] for line in numbers(uninterrupted[0], "validation")] == [15, 30, 45, 60]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "number"), [(14, signal.SIGINT), (40, signal.SIGTERM)])
def test_a_signal_saves_and_the_same_command_continues(uninterrupted, run, config, tmp_path, step, number):
    """Within a phase and at the switch; the second call must start where the first one stopped."""

    def terminate(count: int, _) -> None:
        if count == step:
            os.kill(os.getpid(), number)

    if number == signal.SIGTERM:
        assert run(tmp_path / "run", before_step=terminate).cursor.step == step
    else:
        with pytest.raises(KeyboardInterrupt, match=f"stopped and saved at step {step} of 60; the same command"):
            run(tmp_path / "run", before_step=terminate)
    assert committed(tmp_path / "run")[0] == step
    assert run(tmp_path / "run").cursor.step == 60
    assert_same_run(tmp_path / "run", uninterrupted[0], config)


QUICK_MOMENTS = ("before the commit",)


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if name in QUICK_MOMENTS else pytest.mark.slow) for name in COMMITTED]
)
def test_what_a_kill_leaves_is_continued(uninterrupted, run, config, tmp_path, capfd, moment):
    workdir = Path(shutil.copytree(uninterrupted[1] / moment, tmp_path / "run"))
    there = committed(workdir)
    assert COMMITTED[moment] in (None, there)
    if COMMITTED[moment] is None:
        assert not (workdir / "metrics.jsonl").read_text().endswith("\n")
    assert run(workdir).cursor.step == 60
    assert not there or f"continuing from step {there[0]}" in capfd.readouterr().err
    assert_same_run(workdir, uninterrupted[0], config)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # ended, and perhaps nobody asks how


@pytest.mark.slow
def test_killed_while_a_process_reads(uninterrupted, run, config, tiny_corpus, tmp_path):
    """No process of the run is left ten seconds later; it goes on with threads, whatever has read before."""
    log = tmp_path / "killed.log"  # not a pipe: it would wait for readers that are left
    words = ["pretrain", str(CONFIG), "--corpus", str(tiny_corpus), "--workdir", str(tmp_path / "run")]
    words = [sys.executable, str(HERE / "killed_worker.py"), "reader", "18", *words, "--data.reader-processes", "1"]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiled like the programs of this process
    with log.open("w") as file:
        killed = subprocess.Popen(words, stdout=file, stderr=file, env=quick)
    assert killed.wait(timeout=300) == -signal.SIGKILL, log.read_text()[-3000:]
    left = [int(word) for word in re.search(r"^killed.*, children:(.*)$", log.read_text(), re.M)[1].split()]
    assert left, "the reader should be a process"
    deadline = time.monotonic() + 60
    while any(map(is_alive, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, left)), "a reader process outlives its run"
    run(tmp_path / "run")
    assert_same_run(tmp_path / "run", uninterrupted[0], config)
