"""Two processes of two devices; one flips a bit of a device's copy of a parameter: it is named, the result the same."""

import json
from pathlib import Path

import pytest

from tests.multi_process.commands import Job, faulty_python, lines

pytestmark = pytest.mark.slow
EVERY = 7
FLAGS = ["--recovery.replica-check-every", str(EVERY)]
SHAPE = {"processes": 2, "devices": 2, "steps": 30}


@pytest.fixture
def run_with_flips(tmp_path, corpora):
    """Runs whose process 1 flips a bit after each of some steps; returns the results of its processes."""

    def run(workdir: Path, first: int, last: int, *flags: str) -> list[tuple[int, str, str]]:
        interpreter = faulty_python(tmp_path, "flipped-bit", first, last)
        extra = {process: [*FLAGS, *flags] for process in range(2)}
        return Job(corpora[0], workdir, **SHAPE, extra=extra, interpreters={1: interpreter}).end()

    return run


def rollbacks(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "ledger.jsonl").read_text().splitlines()]


def test_a_flipped_bit_changes_nothing(tmp_path, corpora, run_with_flips):
    extra = dict.fromkeys(range(2), FLAGS)
    for code, _, stderr in Job(corpora[0], tmp_path / "undisturbed", **SHAPE, extra=extra).end():
        assert code == 0, stderr[-3000:]
    results = run_with_flips(tmp_path / "run", 15, 15)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "flipped a bit" in results[1][2] and "flipped a bit" not in results[0][2]
    (entry,) = rollbacks(tmp_path / "run")
    # The checkpoint of step 20 is not made, since its comparison comes first; that of step 21 would be too late.
    assert (entry["step"], entry["to"], entry["skipped_rows"]) == (20, 10, None)
    assert "device" in entry["reason"] and "of process 1 (" in entry["reason"]
    assert "of process 1 (" in results[0][2] and "Rolling back to step 10, no rows are skipped" in results[0][2]
    assert lines(tmp_path / "run") == lines(tmp_path / "undisturbed") != []


def test_a_defective_process_ends_the_run(tmp_path, run_with_flips):
    results = run_with_flips(tmp_path / "run", 1, 10**6, "--recovery.max-rollbacks", "2")
    for code, _, stderr in results:
        assert code == 2 and "Traceback" not in stderr, stderr[-3000:]
        assert "of process 1 (" in stderr and "The run was rolled back 2 time(s)" in stderr
    assert [entry["step"] for entry in rollbacks(tmp_path / "run")] == [EVERY, EVERY]
    assert not (tmp_path / "run" / "checkpoints").exists()
