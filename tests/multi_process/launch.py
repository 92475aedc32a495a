"""Start the processes of one run, wait for all of them, and end all if one fails or is late."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_SECONDS = 600


def launch(processes: int, directory: Path, corpora: list[Path]) -> list[dict[str, np.ndarray]]:
    """Return the arrays that each of the workers wrote, by job and name."""
    failure = _attempt(processes, directory, corpora)
    if failure and re.search(r"[Aa]ddress already in use|[Ff]ailed to (bind|add port)", failure):
        failure = _attempt(processes, directory, corpora)  # another program took the port meanwhile
    assert not failure, failure
    return [dict(np.load(directory / f"{process}.npz")) for process in range(processes)]


def _attempt(processes: int, directory: Path, corpora: list[Path]) -> str:
    """Run the workers once; return the error message, "" after success."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    running = []
    try:
        for process in range(processes):
            arguments = [process, processes, port, directory, *corpora]
            with (directory / f"{process}.log").open("wb") as log:
                command = [sys.executable, str(WORKER), *map(str, arguments)]
                running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(process.poll() is None for process in running):
            if time.monotonic() > deadline:
                return _report(f"{processes} processes: not done after {TIMEOUT_SECONDS} s", running, directory)
            if any(process.poll() for process in running):
                time.sleep(1)  # the others may fail too, with messages of their own
                break
            time.sleep(0.05)
        if any(process.poll() != 0 for process in running):
            return _report(f"{processes} processes failed", running, directory)
        return ""
    finally:
        for process in running:
            process.kill()
            process.wait()


def _report(message: str, running: list[subprocess.Popen], directory: Path) -> str:
    parts = [message]
    for number, process in enumerate(running):
        log = (directory / f"{number}.log").read_text(errors="replace")[-3000:]
        parts.append(f"process {number}, {'running' if process.poll() is None else process.returncode}:\n{log}")
    return "\n\n".join(parts)
