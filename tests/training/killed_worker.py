"""``bert-jax pretrain`` that kills itself, as a power cut would, at a named point.

Usage: killed_worker.py POINT COUNT ARGUMENT...: SIGKILL at the COUNT-th time that the point is reached.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from bert_jax import cli
from bert_jax.training import checkpoint, metrics


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_count(count: int, original, before=None, after=None):
    """Wrap a function so that its COUNT-th call dies before or after the original."""
    calls = iter(range(1, 10**9))

    def wrapped(*args, **kwargs):
        now = next(calls) == count
        if now and before:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if now and after:
            after(*args, **kwargs)
        return result

    return wrapped


def die_while_arrays_are_written(checkpoints, step: int, *_) -> None:
    """Watch the directory of this save and die as soon as a part of the arrays is on disk."""
    target = Path(checkpoints.directory) / f"{step:08d}"

    def watch() -> None:
        while True:
            parts = [path for path in target.glob("state*/**/d/*") if path.is_file() and path.stat().st_size]
            if parts:
                die()
            time.sleep(0)

    threading.Thread(target=watch, daemon=True).start()


def die_in_a_line(writer, step: int, *_) -> None:
    """Leave half a line behind."""
    with writer.path.open("a") as file:
        file.write('{"step": ' + str(step) + ', "split": "tra')
    die()


def plant(point: str, count: int) -> None:
    """Make the named point deadly."""
    if point == "array-write":
        save = at_count(count, checkpoint.Checkpoints.save, before=die_while_arrays_are_written)
        checkpoint.Checkpoints.save = save
    elif point == "before-commit":
        checkpoint.write_commit = at_count(count, checkpoint.write_commit, before=lambda *_: die())
    elif point == "after-commit":
        checkpoint.write_commit = at_count(count, checkpoint.write_commit, after=lambda *_: die())
    elif point == "metrics":
        metrics.MetricsWriter.write = at_count(count, metrics.MetricsWriter.write, before=die_in_a_line)
    else:
        assert point == "never", point


if __name__ == "__main__":
    plant(sys.argv[1], int(sys.argv[2]))
    sys.exit(cli.main(sys.argv[3:]))
