"""A run continues with other processes, devices and meshes: the same rows, and losses as in promise 1."""

from pathlib import Path

import numpy as np
import pytest

from tests.multi_process.commands import STEPS, Job, lines

pytestmark = pytest.mark.slow


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


def test_losses_agree(tmp_path, corpora, undisturbed):
    """2 processes, then one with 8 devices, then with 2, then 4 processes with 4 devices each."""
    workdir = tmp_path / "run"
    first = continue_run(corpora[0], workdir, 15, 2, 1, "")
    second = continue_run(corpora[0], workdir, first + 15, 1, 8, "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2")
    third = continue_run(corpora[0], workdir, second + 15, 1, 2, "--mesh.data 1 --mesh.fsdp 2")
    assert 0 < first < second < third < STEPS
    last = "--mesh.data 4 --mesh.fsdp 2 --mesh.tensor 2"
    assert continue_run(corpora[0], workdir, None, 4, 4, last) == STEPS
    reference = [line for line in undisturbed if line["split"] == "train"]
    continued = train_lines(workdir)
    assert [line["tokens_seen"] for line in continued] == [line["tokens_seen"] for line in reference]
    losses, expected = (np.array([line["loss"] for line in run]) for run in (continued, reference))
    assert (losses != expected).any(), "sums in a different order should round differently"
    assert abs(losses[0] / expected[0] - 1) <= 1e-6
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    # Evaluation batches have 6 or 8 rows here, and the same rows in all.
    held_out = [
        [line["mlm_loss"] for line in run if line["split"] == "validation"] for run in (lines(workdir), undisturbed)
    ]
    assert len(held_out[0]) == 3
    np.testing.assert_allclose(*held_out, rtol=1e-4)
