"""gpu_session.py: all stages run to their end on a CPU; the tiles that it edits are in the sources."""

import functools
import json
from pathlib import Path

import pytest

from tests.pages import load_script

ROOT = Path(__file__).resolve().parents[2]
session = functools.partial(load_script, ROOT / "scripts" / "benchmarks" / "gpu_session.py")


@pytest.mark.slow
def test_a_dry_session(tmp_path, capsys):
    trees = f"before={ROOT},without-norm={ROOT}"
    assert session().main([str(tmp_path), "--dry", "--trees", trees]) == 0
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [row["what"] for row in rows if row["outcome"] != "done"] == []
    assert {row["stage"] for row in rows} == set(session().STAGES)
    timed = [row for row in rows if "ms" in row]
    assert len(timed) >= 8 and all(row["ms"] > 0 for row in timed)
    assert "losses are equal: True" in capsys.readouterr().out
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 8


def test_tiles_are_edited(tmp_path):
    tree = session().edited(tmp_path, (128, 8, 3))
    assert "GPU_ATTENTION_BLOCK, TPU_ATTENTION_BLOCK = 128, 128\n" in (tree / "bert_jax/config/sections.py").read_text()
    assert "num_warps=8, num_stages=3" in (tree / "bert_jax/model/gpu_attention.py").read_text()


def test_a_tree_that_is_no_change(tmp_path, capsys):
    assert session().main([str(tmp_path), "--dry", "--trees", "without-nothing=."]) == 2
    assert "without-nothing: changes are attention, in-place" in capsys.readouterr().err
