"""gpu_session.py: a dry session on a CPU; the commands of a real one; the tiles that it edits are in the sources."""

import argparse
import functools
import json
import subprocess
import time
from pathlib import Path

import pytest

from bert_jax.bench import bench
from bert_jax.training.run_directory.metrics import read_metrics
from tests.pages import load_script

ROOT = Path(__file__).resolve().parents[2]
session = functools.partial(load_script, ROOT / "scripts" / "benchmarks" / "gpu_session.py")


BENCH = ["-m", "bert_jax", "bench"]


@pytest.mark.slow
def test_a_dry_session(tmp_path, capsys):
    """Each way in which a stage starts a process. The other stages only time other steps."""
    stages = "device,trace,tiles,tests,deterministic"
    assert session().main([str(tmp_path), "--dry", "--stages", stages, "--trees", f"without-norm={ROOT}"]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [row["what"] for row in rows if row["outcome"] != "done"] == []
    assert {row["stage"] for row in rows} == set(stages.split(","))
    timed = [row for row in rows if "ms" in row]
    assert len(timed) == 2 and all(row["ms"] > 0 for row in timed)
    assert "losses are equal: True" in capsys.readouterr().out
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 8


@pytest.mark.slow
def test_training_goes_on_with_the_next_call(tmp_path, tiny_corpus, monkeypatch):
    """Two dry calls, each stopped by its limit of time: both save, and the second begins where the first ended. The
    time of a call is up when it has logged steps.
    """
    steps = [0]

    class Limited(subprocess.Popen):
        def communicate(self, data=None, timeout=None):
            if "pretrain" not in self.args or timeout is None:
                return super().communicate(data, timeout)
            while self.poll() is None:
                if any(line["step"] > steps[-1] for line in read_metrics(tmp_path / "words" / "metrics.jsonl")):
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.2)
            return super().communicate(data, timeout)

    monkeypatch.setattr(subprocess, "Popen", Limited)
    for _ in range(2):
        assert session().main([str(tmp_path), "--dry", "--stages", "words", "--corpus", str(tiny_corpus)]) == 0
        (row,) = json.loads((tmp_path / "report.json").read_text())
        assert row["outcome"] == "saved; repeat the command", (tmp_path / "words.txt").read_text()
        steps.append(max(int(path.name) for path in (tmp_path / "words" / "checkpoints").iterdir()))
    assert 0 < steps[1] < steps[2]


def test_training_needs_a_corpus(tmp_path, capsys):
    assert session().main([str(tmp_path), "--dry", "--stages", "words"]) == 2
    assert "give --corpus DIR" in capsys.readouterr().err


def test_commands_of_a_session(tmp_path):
    """`bench` knows the flags of every command that times a step, and most are beside a prediction."""
    trees = {"before": ROOT} | {f"without-{change}": ROOT for change in session().SAVED}
    at = session().Setting(tmp_path, tmp_path, trees, dry=False, corpus=tmp_path)
    commands = {name: list(stage(at)) for name, (stage, _) in session().STAGES.items()}
    timed = [one for stage in commands.values() for one in stage if one.words[: len(BENCH)] == BENCH]
    parser = argparse.ArgumentParser()
    bench.flags(parser.add_argument)
    for command in timed:
        parser.parse_args(command.words[len(BENCH) :])
    assert sum(command.predicted is not None for command in timed) >= len(timed) - len(session().TILES)
    assert all(any(command in timed for command in commands[name]) for name in ("before", "shapes", "float8"))
    assert len(commands["without"]) == 2 * len(session().SAVED)


def test_tiles_are_edited(tmp_path):
    tree = session().edited(tmp_path, (128, 8, 3))
    assert "GPU_ATTENTION_BLOCK, TPU_ATTENTION_BLOCK = 128, 128\n" in (tree / "bert_jax/config/sections.py").read_text()
    assert "num_warps=8, num_stages=3" in (tree / "bert_jax/model/gpu_attention.py").read_text()


def test_a_tree_that_is_no_change(tmp_path, capsys):
    assert session().main([str(tmp_path), "--dry", "--trees", "without-nothing=."]) == 2
    assert "without-nothing: changes are attention, in-place" in capsys.readouterr().err
