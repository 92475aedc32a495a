"""The corpora that all processes read, what groups of them computed, and the metrics of an undisturbed run."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.multi_process.commands import Job, lines
from tests.multi_process.configs import build_corpora
from tests.multi_process.launch import launch


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> list[Path]:
    """Two corpora, and the first one with a damaged second shard. Read only."""
    directory = tmp_path_factory.mktemp("corpora")
    large, small = build_corpora(directory)
    damaged = shutil.copytree(large, directory / "damaged")
    _, second = sorted(damaged.glob("*array_record*"), key=lambda path: "train" not in path.name)
    raw = bytearray(second.read_bytes())
    raw[100] ^= 1
    second.write_bytes(raw)
    return [large, small, damaged]


class Groups:
    """What 1, 2 and 4 processes wrote; each group is started once and does all jobs of worker.py."""

    def __init__(self, directory: Path, corpora: list[Path]):
        self._directory, self._corpora, self._written = directory, corpora, {}

    def of(self, job: str, processes: int) -> list[dict[str, np.ndarray]]:
        """Arrays of a job, of each process."""
        if processes not in self._written:
            directory = self._directory / str(processes)
            directory.mkdir()
            self._written[processes] = launch(processes, directory, self._corpora)
        prefix = f"{job}/"
        return [
            {name.removeprefix(prefix): array for name, array in written.items() if name.startswith(prefix)}
            for written in self._written[processes]
        ]


@pytest.fixture(scope="session")
def groups(tmp_path_factory, corpora) -> Groups:
    return Groups(tmp_path_factory.mktemp("groups"), corpora)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, corpora) -> list[dict]:
    """Metrics of an undisturbed run of two processes."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    for code, _, stderr in Job(corpora[0], workdir, 2).end():
        assert code == 0, stderr[-3000:]
    return lines(workdir)
