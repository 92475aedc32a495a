"""The results of worker.py, shared by all tests of this directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture(scope="session")
def outcome():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, str(WORKER)], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


@pytest.fixture
def cases(outcome):
    return outcome["cases"]
