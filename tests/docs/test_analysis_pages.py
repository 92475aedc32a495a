"""The commands of docs/analysis.md and of the pages of its suites, with small data and settings."""

import shutil

import pytest

from bert_jax.analysis.suites import SUITES
from tests.analysis import data_folder
from tests.pages import ANALYSIS, ROOT, code_of, run, run_page

pytestmark = pytest.mark.slow


@pytest.fixture
def analysed(folder):
    """`folder` with data/, and runs/second, which ended earlier than runs/first."""
    data_folder.write(folder / "data")
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "second")
    shutil.rmtree(max((folder / "runs" / "second" / "checkpoints").iterdir()))
    return folder


@pytest.mark.parametrize("page", ANALYSIS)
def test_commands(page, analysed, monkeypatch, quick_compilation):
    if "runs/sst2" in code_of(page, "bash"):
        monkeypatch.chdir(analysed)
        task = shutil.copytree(analysed / "data" / "task", analysed / "sst2")
        words = f"bert-jax finetune runs/first --task sst2 --data {task} --workdir runs/sst2 --steps 2 --batch-size 8"
        run(words.split())
    run_page(page, analysed, monkeypatch)


def test_every_suite_has_a_page():
    assert {f"docs/analysis/{suite.name}.md" for suite in SUITES} <= set(ANALYSIS)
    index = (ROOT / "docs" / "analysis.md").read_text()
    assert all(f"analysis/{suite.name}.md" in index for suite in SUITES)
