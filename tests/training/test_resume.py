"""A run that is killed and started again ends bit-identical to one that was left alone."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.config.presets import load_config
from bert_jax.data.cursor import Cursor
from bert_jax.data.mixture_spec import CorpusWeight
from bert_jax.training import loop, pretraining, reporter
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.run_directory.metrics import read_metrics
from bert_jax.training.state import abstract_state

HERE = Path(__file__).parent
CONFIG = HERE / "killed_config.py"


def final_state(workdir: Path, corpus: Path):
    """Every array of the newest checkpoint, and where the run stands."""
    task = pretraining.open_task(load_config(str(CONFIG)), [CorpusWeight(corpus)])
    mesh = loop.checked_mesh(task)
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(workdir), keep=2) as checkpoints:
        state, about = checkpoints.restore(lambda about: abstract_state(task.at(about["phase"]), mesh))
    return jax.tree.map(np.asarray, state), about


def lines_without_timing(workdir: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "timing"} for line in read_metrics(workdir / "metrics.jsonl")]


def assert_same_run(workdir: Path, uninterrupted: Path, corpus: Path) -> None:
    (state, about), (expected, expected_about) = (final_state(w, corpus) for w in (workdir, uninterrupted))
    assert about == expected_about and about["cursor"]["step"] == 60
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    assert lines_without_timing(workdir) == lines_without_timing(uninterrupted)


def command(workdir: Path, corpus: Path, point: str = "never", count: int = 1, *flags: str) -> list[str]:
    run = ["pretrain", str(CONFIG), "--corpus", str(corpus), "--workdir", str(workdir), *flags]
    return [sys.executable, str(HERE / "killed_worker.py"), point, str(count), *run]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_corpus) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    progress = pretraining.pretrain(load_config(str(CONFIG)), [CorpusWeight(tiny_corpus)], workdir)
    assert progress.cursor.step == 60 and progress.cursor.phase == 1 and progress.cursor.positions[0].epoch > 2
    return workdir


def test_the_run_grows_learns_and_logs(uninterrupted):
    lines = lines_without_timing(uninterrupted)
    train = [line for line in lines if line["split"] == "train"]
    assert [("gradient_norm/layer_01" in line) for line in train] == [line["step"] > 40 for line in train]
    assert train[0]["mlm_loss"] - train[-1]["mlm_loss"] > 0.5
    assert [line["step"] for line in lines if line["split"] == "validation"] == [15, 30, 45, 60]


def test_another_seed_is_another_run(uninterrupted, tiny_corpus, tmp_path):
    """So that equality below is not equality of anything with anything."""
    config = load_config(str(CONFIG))
    progress = pretraining.pretrain(
        type(config)(**{**vars(config), "seed": 1}), [CorpusWeight(tiny_corpus)], tmp_path / "run"
    )
    assert progress.evaluation["mlm_loss"] != lines_without_timing(uninterrupted)[-1]["mlm_loss"]


@pytest.mark.parametrize(("step", "number"), [(14, signal.SIGINT), (40, signal.SIGTERM)])
def test_a_signal_saves_and_the_same_command_continues(uninterrupted, tiny_corpus, tmp_path, monkeypatch, step, number):
    """Within a phase and at the switch; the second call must start where the first one stopped."""
    config, workdir = load_config(str(CONFIG)), tmp_path / "run"
    add_step = reporter.Reporter.add_step

    def add_step_and_terminate(self, done, *rest):
        add_step(self, done, *rest)
        if done == step:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(reporter.Reporter, "add_step", add_step_and_terminate)
        if number == signal.SIGTERM:
            assert pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], workdir).cursor.step == step
        else:
            with pytest.raises(KeyboardInterrupt, match=f"stopped and saved at step {step} of 60; the same command"):
                pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], workdir)
    newest = next(checkpoint.committed_checkpoint_paths(checkpoint.checkpoint_directory(workdir)))
    assert checkpoint.read_metadata(newest)["cursor"]["step"] == step
    progress = pretraining.pretrain(config, [CorpusWeight(tiny_corpus)], workdir)
    assert progress.cursor.step == 60
    assert_same_run(workdir, uninterrupted, tiny_corpus)


def test_a_finished_run_does_nothing_more(uninterrupted, tiny_corpus):
    before = sorted((path, path.stat().st_mtime_ns) for path in (uninterrupted / "checkpoints").rglob("*"))
    progress = pretraining.pretrain(load_config(str(CONFIG)), [CorpusWeight(tiny_corpus)], uninterrupted)
    assert progress.cursor.step == 60 and progress.evaluation
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (uninterrupted / "checkpoints").rglob("*"))


def test_damage_falls_back_and_is_repaired(uninterrupted, tiny_corpus, tmp_path, capfd):
    """One flipped bit in the newest checkpoint: the run goes on from the one before, and says so."""
    import shutil

    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted, workdir)
    newest = next(checkpoint.committed_checkpoint_paths(checkpoint.checkpoint_directory(workdir)))
    data = max(Path(newest).rglob("d/*"), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    pretraining.pretrain(load_config(str(CONFIG)), [CorpusWeight(tiny_corpus)], workdir)
    said = capfd.readouterr().err
    assert "is damaged" in said and "continuing from step 50" in said
    assert_same_run(workdir, uninterrupted, tiny_corpus)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "count", "committed_after"),
    [
        ("array-write", 2, ["00000010"]),
        ("before-commit", 2, ["00000010"]),
        ("mid-commit", 1, []),  # half a file must not count: there is no other checkpoint to go back to
        ("after-commit", 2, ["00000010", "00000020"]),
        ("after-commit", 4, ["00000020", "00000030", "00000040"]),  # at the phase switch, before the oldest goes
        ("before-growth", 1, None),
        ("after-growth", 1, None),
        ("metrics", 6, None),  # a save is under way, and may be committed or not
    ],
)
def test_killed_at_a_named_point(uninterrupted, tiny_corpus, tmp_path, point, count, committed_after):
    workdir = tmp_path / "run"
    killed = subprocess.run(command(workdir, tiny_corpus, point, count), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    there = [path.name for path in checkpoint.committed_checkpoint_paths(checkpoint.checkpoint_directory(workdir))]
    assert committed_after is None or sorted(there) == committed_after
    if point == "metrics":
        assert not (workdir / "metrics.jsonl").read_text().endswith("\n")
    again = subprocess.run(command(workdir, tiny_corpus), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    if there:
        assert f"continuing from step {int(max(there))}" in again.stderr
    assert_same_run(workdir, uninterrupted, tiny_corpus)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # ended, and perhaps nobody asks how


def die_at(workdir: Path, corpus: Path, point: str, count: int, *flags: str) -> str:
    """Run until the point; what was said. No process of the run is left ten seconds later."""
    log = workdir.with_name("killed.log")  # not a pipe: it would wait for readers that are left
    with log.open("w") as file:
        run = subprocess.Popen(command(workdir, corpus, point, count, *flags), stdout=file, stderr=file)
    assert run.wait(timeout=300) == -signal.SIGKILL, log.read_text()[-3000:]
    said = log.read_text()
    left = [int(word) for word in re.search(r"^killed.*, children:(.*)$", said, re.M)[1].split()]
    assert bool(left) == bool(flags), "readers should be threads, or processes"
    deadline = time.monotonic() + 10
    while any(map(is_alive, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, left)), "a reader process outlives its run"
    return said


@pytest.fixture(scope="module")
def uninterrupted_rescue(tmp_path_factory, tiny_corpus) -> Path:
    """A run that meets three bad batches in a row, rolls back from step 33 to 20, and skips them."""
    workdir = tmp_path_factory.mktemp("rescued") / "run"
    done = subprocess.run(command(workdir, tiny_corpus, "spoiled"), capture_output=True, text=True)
    assert done.returncode == 0 and "Rolling back to step 20" in done.stderr, done.stderr[-3000:]
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(("point", "left"), [("rollback-decided", [20, 30]), ("rollback-deleting", [20])])
def test_killed_while_going_back(uninterrupted_rescue, uninterrupted, tiny_corpus, tmp_path, point, left):
    workdir = tmp_path / "run"
    killed = subprocess.run(command(workdir, tiny_corpus, point), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert (
        sorted(
            int(path.name) for path in checkpoint.committed_checkpoint_paths(checkpoint.checkpoint_directory(workdir))
        )
        == left
    )
    again = subprocess.run(command(workdir, tiny_corpus, "spoiled"), capture_output=True, text=True)
    assert again.returncode == 0 and "continuing from step 20" in again.stderr, again.stderr[-3000:]
    assert_same_run(workdir, uninterrupted_rescue, tiny_corpus)
    assert (workdir / "ledger.jsonl").read_text() == (uninterrupted_rescue / "ledger.jsonl").read_text() != ""
    assert lines_without_timing(workdir) != lines_without_timing(uninterrupted)


READER = ("--data.reader-processes", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "count", "flags"),
    [
        ("mid-epoch", 16, ()),
        ("mid-epoch", 22, READER),
        ("epoch-boundary", 1, ()),
        ("phase-switch", 1, ()),
        ("prefetched", 35, ()),
        ("prefetched", 18, READER),
    ],
)
def test_killed_at_a_named_place_in_the_stream(uninterrupted, tiny_corpus, tmp_path, point, count, flags):
    """It goes on with threads, whatever has read before."""
    workdir = tmp_path / "run"
    said = die_at(workdir, tiny_corpus, point, count, *flags)
    stream = pretraining.open_task(load_config(str(CONFIG)), [CorpusWeight(tiny_corpus)]).train
    step = int(re.search(r"^killed (?:after step|with batch) (\d+)", said, re.M)[1])
    before, after = stream.cursor_at(Cursor(), step - (point != "prefetched")), stream.cursor_at(Cursor(), step)
    assert before.phase == after.phase
    there = [int(path.name) for path in checkpoint.committed_checkpoint_paths(checkpoint.checkpoint_directory(workdir))]
    assert max(there, default=0) < step
    (start,), (end,) = before.positions, after.positions
    if point == "mid-epoch":
        assert start.epoch == end.epoch and start.row > 0
    elif point == "epoch-boundary":
        assert start.epoch + 1 == end.epoch and end.row > 0
    elif point == "phase-switch":
        assert after.phase == 1 and step == 41 and sorted(there) == [20, 30]  # so that the switch itself is done again
    again = subprocess.run(command(workdir, tiny_corpus), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert not there or f"continuing from step {max(there)}" in again.stderr
    assert_same_run(workdir, uninterrupted, tiny_corpus)


@pytest.mark.slow
def test_killed_at_five_random_moments(uninterrupted, tiny_corpus, tmp_path):
    """One run, killed five times wherever it happens to be; seeded, but the machine's load also decides where."""
    workdir, chance, kills = tmp_path / "run", random.Random(0), 0
    while kills < 5:
        process = subprocess.Popen(command(workdir, tiny_corpus), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started = len(read_metrics(workdir / "metrics.jsonl"))
        # Not before something new has happened: five kills during start-up would show little.
        while process.poll() is None and len(read_metrics(workdir / "metrics.jsonl")) in (0, started):
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        if process.returncode == 0:
            break
        kills += 1
    assert kills >= 3, "the run ended before it could be killed"
    again = subprocess.run(command(workdir, tiny_corpus), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads((workdir / "config.json").read_text())["config"]["name"] == "killed"
    assert_same_run(workdir, uninterrupted, tiny_corpus)
