"""The commands of docs/plan.md. Here, because compilation for TPUs changes the process (tests/conftest.py)."""

import pytest

from tests.pages import run_page


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch):
    run_page("docs/plan.md", tmp_path, monkeypatch)
