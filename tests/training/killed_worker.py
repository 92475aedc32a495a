"""``bert-jax pretrain`` that is killed with SIGKILL at a named point.

Usage: killed_worker.py POINT COUNT ARGUMENT...: it dies at the COUNT-th time that the point is reached, "commit" or
"reader", after a line that lists the processes that the run leaves. A reader process runs this file too.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from bert_jax.data import batches


def die(run: int | None = None) -> None:
    """Kill the run: this process, or the one that this process reads for."""
    run = run or os.getpid()
    os.write(2, f"\nkilled, children: {' '.join(map(str, children(run)))}\n".encode())
    os.kill(run, signal.SIGKILL)


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # after the name, which may be any text
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return found


def die_before_a_commit(count: int) -> None:
    """Die before the COUNT-th commit."""
    from bert_jax.training.run_directory import checkpoint

    original, commits = checkpoint.write_commit, iter(range(1, 10**9))

    def write_commit(*arguments):
        if next(commits) == count:
            die()
        original(*arguments)

    checkpoint.write_commit = write_commit


def die_in_a_reader(count: int) -> None:
    """Die of a reader process that has just filled the COUNT-th batch."""
    original, lock, filled = batches.TrainingStream.rows_at, threading.Lock(), []

    def batch(self, cursor):
        rows = original(self, cursor)
        with lock:
            filled.append(cursor.step)
            if len(filled) == count:
                die(os.getppid())
        return rows

    batches.TrainingStream.rows_at = batch


if __name__ == "__main__":
    from bert_jax.cli import main

    if sys.argv[1] == "commit":
        die_before_a_commit(int(sys.argv[2]))
    sys.exit(main.main(sys.argv[3:]))
elif sys.argv[1] == "reader":
    die_in_a_reader(int(sys.argv[2]))
