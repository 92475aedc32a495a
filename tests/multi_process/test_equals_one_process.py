"""Commands of two processes give the results of one: a run with every schedule, and fine-tuning that is stopped."""

import time

import numpy as np
import pytest

from tests.finetune import task_files
from tests.multi_process.commands import ROOT, TIMEOUT_SECONDS, end, lines, start
from tests.runs import read_results

pytestmark = pytest.mark.slow

CONFIG = ROOT / "tests/training/schedules_config.py"
EXACT = ("step", "split", "mask_rate", "tokens_seen", "learning_rate")


def test_a_run_with_every_schedule(corpora, tmp_path):
    """Losses to rounding."""
    found = {}
    for processes in (1, 2):
        workdir = tmp_path / str(processes)
        words = ["pretrain", str(CONFIG), "--corpus", str(corpora[0]), "--workdir", str(workdir)]
        for code, _, err in end(start(words, processes)):
            assert code == 0, err[-3000:]
        found[processes] = lines(workdir)
    assert len({line.get("mask_rate") for line in found[1]}) > 10
    for line, wanted in zip(found[2], found[1], strict=True):
        assert line.keys() == wanted.keys()
        assert [line.get(name) for name in EXACT] == [wanted.get(name) for name in EXACT]
        for name in wanted.keys() - {*EXACT}:
            np.testing.assert_allclose(line[name], wanted[name], rtol=2e-4, atol=1e-6, err_msg=name)


def test_fine_tuning_that_stops_and_continues(tiny_run, tmp_path):
    """Stopped in the run of the second seed, by SIGTERM to the second process."""
    task_files.write_glue(tmp_path / "sst2", "sst2")
    words = ["finetune", str(tiny_run), "--task", "sst2", "--data", str(tmp_path / "sst2"), "--seeds", "2"]
    words += ["--steps", "60", "--learning-rate", "5e-3", "--batch-size", "16", "--mesh.data", "2"]
    one, two = ([*words, "--workdir", str(tmp_path / name)] for name in ("one", "two"))
    supervisors = start(two, 2)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not lines(tmp_path / "two" / "seed1"):
        assert time.monotonic() < deadline and supervisors[0].poll() is None, end(supervisors)
        time.sleep(0.02)
    supervisors[1].terminate()
    assert [code for code, _, _ in end(supervisors)] == [75, 75]
    assert not (tmp_path / "two" / "results.json").exists()
    (code, out, _), (other_code, other_out, _) = end(start(two, 2))
    assert code == other_code == 0 and "mean" in out and not other_out.strip()
    assert [code for code, _, _ in end(start(one, 1, devices=2))] == [0]
    found = [read_results(tmp_path / name) for name in ("two", "one")]
    assert found[0] == found[1] and found[0]["mean"] > found[0]["baseline"]
