"""The corpora that all processes read, and the metrics of an undisturbed run."""

from pathlib import Path

import pytest

from tests.multi_process.commands import Job, lines
from tests.multi_process.configs import build_corpora


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> list[Path]:
    """Two corpora. Read only."""
    return build_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, corpora) -> list[dict]:
    """Metrics of an undisturbed run of two processes."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    for code, _, stderr in Job(corpora[0], workdir, 2).end():
        assert code == 0, stderr[-3000:]
    return lines(workdir)
