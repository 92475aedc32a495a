"""The corpora that all processes read."""

from pathlib import Path

import pytest

from tests.multi_process.configs import build_corpora


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> list[Path]:
    """Two corpora. Read only."""
    return build_corpora(tmp_path_factory.mktemp("corpora"))
