"""The corpora that all processes read, what groups of them computed, and the metrics of an undisturbed run."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.peers import free_port
from tests.multi_process.commands import ROOT, Job, lines
from tests.multi_process.configs import build_corpora

TIMEOUT_SECONDS = 600
Written = list[dict[str, np.ndarray]]


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


@pytest.fixture(scope="session")
def groups(tmp_path_factory, corpora) -> Callable[[str, int], Written]:
    """Arrays of a job of worker.py, of each of 1 or 4 processes. A group is started once and does all its jobs."""

    @functools.cache
    def start(processes: int) -> Written:
        directory, port, running = tmp_path_factory.mktemp(f"{processes}-processes"), free_port(), []
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        try:
            for process in range(processes):
                words = ["-m", "tests.multi_process.worker", process, processes, port, directory, *corpora]
                with (directory / f"{process}.log").open("wb") as log:
                    running.append(
                        subprocess.Popen([sys.executable, *map(str, words)], stdout=log, stderr=log, env=environment)
                    )
            codes = [process.wait(TIMEOUT_SECONDS) for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        logs = [(directory / f"{process}.log").read_text(errors="replace")[-3000:] for process in range(processes)]
        assert not any(codes), "\n\n".join(map(str, zip(codes, logs, strict=True)))
        return [dict(np.load(directory / f"{process}.npz")) for process in range(processes)]

    def of(job: str, processes: int) -> Written:
        prefix = f"{job}/"
        return [
            {name.removeprefix(prefix): array for name, array in written.items() if name.startswith(prefix)}
            for written in start(processes)
        ]

    return of


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory, corpora) -> Path:
    """Work directory of an undisturbed run of two processes. Read only."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    for code, _, stderr in Job(corpora[0], workdir, 2).end():
        assert code == 0, stderr[-3000:]
    return workdir


@pytest.fixture(scope="session")
def undisturbed(undisturbed_run) -> list[dict]:
    """Metrics of an undisturbed run of two processes."""
    return lines(undisturbed_run)


@pytest.fixture
def separate_mount(tmp_path):
    """Makes an interpreter that sees an empty directory in place of another: a host with disks of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this user may not create mount namespaces")

    def make(directory) -> str:
        script = tmp_path / "python"
        mounts = f'mount -t tmpfs none {directory} && exec "$0" "$@"'
        script.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{mounts}' {sys.executable} \"$@\"\n")
        script.chmod(0o755)
        return str(script)

    return make
