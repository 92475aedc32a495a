"""Real runs of several processes: one is killed, one gets SIGTERM; and a run that continues with other processes."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.multi_process.commands import STEPS, Job, end, lines, start
from tests.runs import committed

pytestmark = pytest.mark.slow


def test_one_process_writes_and_logs(tmp_path, corpora, undisturbed):
    steps = [line["step"] for line in undisturbed if line["split"] == "train"]
    assert steps == list(range(1, STEPS + 1))


def test_evaluate_of_two_processes(corpora, undisturbed_run, undisturbed):
    """The digits of the run's own last evaluation, and those of one process with as many devices."""
    words = ["evaluate", str(undisturbed_run), "--corpus", str(corpora[0]), "--json"]
    (code, out, err), (other_code, other_out, other_err) = end(start(words, 2))
    assert code == other_code == 0, (err[-3000:], other_err[-3000:])
    assert not other_out.strip()
    metrics = json.loads(out)
    trained = undisturbed[-1]
    assert trained["step"] == STEPS and trained["split"] == "validation" and trained["mlm_loss"] == metrics["mlm_loss"]
    assert {name: metrics[name] for name in trained if name not in ("step", "split")}.items() <= trained.items()
    ((code, out, err),) = end(start(words, 1, devices=2))
    assert code == 0, err[-3000:]
    assert json.loads(out) == metrics


def test_evaluate_refuses_on_all(corpora, tmp_path):
    """No run and no model, which both find; and commands that differ."""
    words = ["evaluate", str(tmp_path), "--corpus", str(corpora[0])]
    for extra, message in ({}, "is not a run or a model"), ({1: ["--rows", "5"]}, "rows is 5 instead of None"):
        for code, out, err in end(start(words, 2, extra=extra)):
            assert code == 2 and not out.strip() and "Traceback" not in err
            assert message in err or "see its error message" in err, err


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory, corpora):
    """Results of both starts of a run: process 1 is killed, then gets SIGTERM; process 0 is killed, and all finish."""
    workdir, results = tmp_path_factory.mktemp("disturbed") / "run", {}
    job = Job(corpora[0], workdir, 2)
    job.wait_for(22)
    job.kill_child(1)
    job.wait_for_restart()  # it goes on from step 20, and no process has checked for a stop request yet
    job.supervisors[1].terminate()
    results["stopped"] = job.end()
    job = Job(corpora[0], workdir, 2)
    job.wait_for(52)
    job.kill_child(0)
    results["finished"] = job.end()
    return results | {"lines": lines(workdir)}


def test_sigterm_to_one_stops_both_after_the_same_step(disturbed):
    """In a run whose second process was killed, which both name, and started again in place."""
    (first, out, err), (second, other, other_err) = disturbed["stopped"]
    assert first == second == 75, err[-3000:]
    for process, stderr in enumerate((err, other_err)):
        assert "warning: process 1 of 2 (" in stderr and f"was killed by SIGKILL; process {process} (" in stderr
    assert not other.strip()
    assert int(out.partition("stopped and saved at step ")[2].split()[0]) < STEPS


def test_only_process_0_logs(disturbed):
    (_, out, err), (_, other_out, other_err) = disturbed["finished"]
    assert "warning: process 0 of 2 (" in err and "was killed by SIGKILL; process 0 (" in err
    assert "finished" in out and "continuing from step" in err and "training:" in err
    assert not other_out.strip() and "continuing" not in other_err and "training:" not in other_err
    assert "coordination_service_agent.cc" not in other_err, "process 0 held jax's service"


def test_restarts_change_nothing(disturbed, undisturbed):
    for code, _, err in disturbed["finished"]:
        assert code == 0, err[-3000:]
    assert disturbed["lines"] == undisturbed


def test_a_process_that_stops_is_noticed_and_replaced(tmp_path, corpora, undisturbed):
    """It is suspended every now and then, and named as slow; then it gets SIGSTOP, as one whose host is frozen: the
    other one waits for a step, writes its stacks, and ends.

    Both have agreed on a checkpoint by time before, from which they continue.
    """
    flags = [
        "--recovery.stall-seconds",
        "10",
        "--checkpoint.every-minutes",
        "0.02",
        "--checkpoint.keep-best",
        "mlm_loss",
    ]
    job = Job(corpora[0], tmp_path / "run", 2, checkpoint_every=1000, extra={0: flags, 1: flags})
    step = 1
    while not committed(tmp_path / "run"):
        job.wait_for(step)
        step += 1
    for _ in range(3):
        os.kill(job.child(1), signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(job.child(1), signal.SIGCONT)
        job.wait_for(lines(job.workdir)[-1]["step"] + 2)  # the shares of a line are compared after the next one
    os.kill(job.child(1), signal.SIGSTOP)
    (code, _, err), (other_code, _, _) = job.end()
    assert (code, other_code) == (0, 0), err[-3000:]
    assert "continuing from step" in err
    assert "process 1 (" in err and ") is slow: it was busy or suspended for " in err
    assert "warning: process 0 of 2 (" in err and "waiting for the step for " in err
    assert "process(es) 1 wrote no stacks: stopped, or cut off from the disk; the same command continues" in err
    assert "in train" in (tmp_path / "run" / "stacks" / "process0.txt").read_text()
    assert lines(tmp_path / "run") == undisturbed


def test_a_different_command_is_refused_before_the_start(tmp_path, corpora):
    results = Job(corpora[0], tmp_path / "run", 2, extra={1: ["--seed", "1"]}).end()
    for code, _, err in results:
        assert code == 2 and "process 1 (" in err and "in its config" in err and "seed is 1 instead of 0" in err
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_not_shared_is_refused(tmp_path, corpora, separate_mount):
    workdir = tmp_path / "run"
    workdir.mkdir()
    results = Job(corpora[0], workdir, 2, interpreters={1: separate_mount(workdir)}).end()
    assert [code for code, _, _ in results] == [2, 2], results
    assert "is not the same directory on all hosts" in results[1][2]
    assert not list(workdir.glob("probe-*"))


def test_an_error_of_one_process_ends_all(tmp_path, corpora, separate_mount):
    """Only that process sees the error while the others wait for it. jax's own timeout, 300 s, exceeds a job's here."""
    corpus = tmp_path / "corpus"
    shutil.copytree(corpora[0], corpus)
    results = Job(corpus, tmp_path / "run", 2, interpreters={1: separate_mount(corpus)}).end()
    assert [code for code, _, _ in results] == [2, 2]
    assert "error: " in results[1][2] and str(corpus) in results[1][2]
    assert "process 1 of 2 (" in results[0][2] and "ended with exit code 2" in results[0][2]


def train_lines(workdir: Path) -> list[dict]:
    return [line for line in lines(workdir) if line["split"] == "train"]


def continue_run(corpus: Path, workdir: Path, until: int | None, processes: int, devices: int, mesh: str) -> int:
    """Start the run; stop it after a step, or let it end. Returns the number of steps done."""
    extra = {process: mesh.split() for process in range(processes)}
    job = Job(corpus, workdir, processes, devices=devices, extra=extra)
    if until is not None:
        job.wait_for(until)
        job.supervisors[0].terminate()
    for code, _, stderr in job.end():
        assert code == (0 if until is None else 75), stderr[-3000:]
    return len(train_lines(workdir))


def test_a_run_continues_with_other_processes_and_meshes(tmp_path, corpora, undisturbed):
    """One process with 2 devices, two with 4 devices and two micro-batches each, one with one; against 2 processes."""
    workdir = tmp_path / "run"
    first = continue_run(corpora[0], workdir, 15, 1, 2, "--mesh.data 1 --mesh.fsdp 2")
    cube = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --micro-batch 2"
    second = continue_run(corpora[0], workdir, first + 20, 2, 4, cube)
    assert 0 < first < second < STEPS
    assert continue_run(corpora[0], workdir, None, 1, 1, "") == STEPS
    reference = [line for line in undisturbed if line["split"] == "train"]
    continued = train_lines(workdir)
    assert [line["tokens_seen"] for line in continued] == [line["tokens_seen"] for line in reference]
    losses, expected = (np.array([line["loss"] for line in run]) for run in (continued, reference))
    assert (losses != expected).any(), "sums in a different order should round differently"
    assert np.median(np.abs(np.diff(expected))) > 0.01, "losses change by far more than the tolerance"
    assert abs(losses[0] / expected[0] - 1) <= 1e-6
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    # Evaluation batches have 6 or 8 rows here, and the same rows in all.
    held_out = [
        [line["mlm_loss"] for line in run if line["split"] == "validation"] for run in (lines(workdir), undisturbed)
    ]
    assert len(held_out[0]) == 3
    np.testing.assert_allclose(*held_out, rtol=1e-4)
