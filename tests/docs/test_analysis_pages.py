"""The commands of docs/analysis.md and of the pages of its suites, with small data and settings."""

import gc
import shutil
import warnings

import pytest

from bert_jax.analysis.suites import SUITES
from tests.analysis import data_folder
from tests.pages import ROOT, code_of, run, run_page

pytestmark = pytest.mark.slow
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "analysis").glob("*.md"))


@pytest.fixture
def analysed(folder):
    """`folder` with data/ and a fine-tuned runs/sst2."""
    data_folder.write(folder / "data")
    return folder


def test_commands(analysed, monkeypatch, quick_compilation):
    run_page("docs/analysis.md", analysed, monkeypatch)
    with warnings.catch_warnings(action="ignore"):
        exec(compile(code_of("docs/analysis.md", "python"), "docs/analysis.md", "exec"), {"__name__": "__main__"})
        gc.collect()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_suites(page, analysed, monkeypatch, quick_compilation):
    if "runs/sst2" in code_of(page, "bash"):
        monkeypatch.chdir(analysed)
        task = shutil.copytree(analysed / "data" / "task", analysed / "sst2")
        words = f"bert-jax finetune runs/first --task sst2 --data {task} --workdir runs/sst2 --steps 2 --batch-size 8"
        run(words.split())
    run_page(page, analysed, monkeypatch)


def test_every_suite_has_a_page():
    assert {f"docs/analysis/{suite.name}.md" for suite in SUITES} <= set(PAGES)
    index = (ROOT / "docs" / "analysis.md").read_text()
    assert all(f"analysis/{suite.name}.md" in index for suite in SUITES)
