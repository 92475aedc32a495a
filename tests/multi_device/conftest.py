"""Results of the workers, each a process with several devices whose number is fixed when jax starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_worker(name: str) -> dict:
    """What a worker of this directory prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tests.multi_device.{name}"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


@pytest.fixture(scope="session")
def outcome():
    return run_worker("worker")


@pytest.fixture(scope="session")
def steps():
    return run_worker("collectives_worker")


@pytest.fixture
def cases(outcome):
    return outcome["cases"]
