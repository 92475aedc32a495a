"""Fine-tuning in several processes: stopped by SIGTERM, continued, and the scores of one process."""

import json
import time

import pytest

from tests.finetune import task_files
from tests.multi_process.commands import TIMEOUT_SECONDS, end, lines, start

pytestmark = pytest.mark.slow


def test_two_processes_stop_and_continue_as_one(tiny_run, tmp_path):
    """Stopped in the run of the second seed, by SIGTERM to the second process."""
    task_files.write_glue(tmp_path / "sst2", "sst2")
    words = ["finetune", str(tiny_run), "--task", "sst2", "--data", str(tmp_path / "sst2"), "--seeds", "2"]
    words += ["--steps", "60", "--learning-rate", "5e-3", "--batch-size", "16", "--mesh.data"]

    def command(name: str, devices: int) -> list[str]:
        return [*words, str(devices), "--workdir", str(tmp_path / name)]

    supervisors = start(command("two", 2), 2)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not lines(tmp_path / "two" / "seed1"):
        assert time.monotonic() < deadline and supervisors[0].poll() is None, end(supervisors)
        time.sleep(0.02)
    supervisors[1].terminate()
    assert [code for code, _, _ in end(supervisors)] == [75, 75]
    assert not (tmp_path / "two" / "results.json").exists()
    (code, out, _), (other_code, other_out, _) = end(start(command("two", 2), 2))
    assert code == other_code == 0 and "mean" in out and not other_out.strip()
    assert [code for code, _, _ in end(start(command("one", 2), 1, devices=2))] == [0]
    found = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("two", "one")]
    assert found[0] == found[1] and found[0]["mean"] > found[0]["baseline"]
