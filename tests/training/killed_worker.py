"""``bert-jax pretrain`` that kills itself, as a power cut would, at a named point.

Usage: killed_worker.py POINT COUNT ARGUMENT...: SIGKILL at the COUNT-th time that the point is reached, after a line
that lists the processes that the run leaves. A reader process runs this file too.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from spoiled import spoil

from bert_jax.data import batches

SPOILED_ROWS = (192, 216)
"""Of steps 31 to 33: checkpoint 20 is good then, and 30 is not."""


def die(run: int | None = None, note: str = "") -> None:
    """Kill the run: this process, or the one that this process reads for."""
    run = run or os.getpid()
    os.write(2, f"\nkilled{note}, children: {' '.join(map(str, children(run)))}\n".encode())
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


def die_in_the_commit(path, *_) -> None:
    """Leave half of the next text that is written there."""

    def write_half(self, content: bytes) -> None:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        die()

    type(path).write_bytes = write_half


def die_while_deleting(checkpoints, steps) -> None:
    """Die when the marker of the first checkpoint to go is gone, and its files are there still."""
    for step in steps:
        (Path(checkpoints.directory) / f"{step:08d}" / "COMMIT.json").unlink()
        die()


def die_in_a_line(writer, step: int, *_) -> None:
    """Leave half a line."""
    with writer.path.open("a") as file:
        file.write('{"step": ' + str(step) + ', "split": "tra')
    die()


def die_at_a_step(is_there) -> None:
    """Die when the loop takes the batch after one for which `is_there(before, after)` is true.

    The step itself is dispatched by then, and readers have prepared more.
    """
    from bert_jax.training.pretraining_task import Pretraining

    original = Pretraining.batches

    def watched(self, cursor):
        cursor = self.train.resolve_cursor(cursor)
        for batch in original(self, cursor):
            yield batch
            if is_there(cursor, batch.next_cursor):
                die(note=f" after step {batch.next_cursor.step}")
            cursor = batch.next_cursor

    Pretraining.batches = watched


def mid_epoch(before, after) -> bool:
    """No epoch begins or ends with this step."""
    return before.positions[0].epoch == after.positions[0].epoch and before.positions[0].row > 0


def straddles(before, after) -> bool:
    """This step has rows of two epochs of one phase."""
    (start,), (end,) = before.positions, after.positions
    return before.phase == after.phase and start.epoch < end.epoch and end.row > 0


def never_commit_at(step: int) -> None:
    """The checkpoint of this step stays unfinished, as if the disk were slow."""
    from bert_jax.training.run_directory import checkpoint

    original = checkpoint.write_commit

    def write_commit(path, *rest):
        if Path(path).name == f"{step:08d}":
            time.sleep(3600)
        return original(path, *rest)

    checkpoint.write_commit = write_commit


def die_in_a_reader(count: int) -> None:
    """Die of a reader, thread or process, that has just filled the COUNT-th batch."""
    original, lock, filled = batches.TrainingStream.batch, threading.Lock(), []
    run = os.getppid() if __name__ == "__mp_main__" else None

    def batch(self, cursor):
        rows = original(self, cursor)
        with lock:
            filled.append(cursor.step)
            if len(filled) == count and (run or threading.current_thread() is not threading.main_thread()):
                die(run, f" with batch {max(filled)} in flight")
        return rows

    batches.TrainingStream.batch = batch


def plant(point: str, count: int) -> None:
    """Make the named point deadly."""
    from bert_jax.training import loop, recovery
    from bert_jax.training.run_directory import checkpoint, metrics

    times = iter(range(1, 10**9))
    if point == "array-write":
        save = at_count(count, checkpoint.Checkpoints.save, before=die_while_arrays_are_written)
        checkpoint.Checkpoints.save = save
    elif point == "before-commit":
        checkpoint.write_commit = at_count(count, checkpoint.write_commit, before=lambda *_: die())
    elif point == "mid-commit":
        checkpoint.write_commit = at_count(count, checkpoint.write_commit, before=die_in_the_commit)
    elif point == "after-commit":
        checkpoint.write_commit = at_count(count, checkpoint.write_commit, after=lambda *_: die())
    elif point == "metrics":
        metrics.MetricsWriter.write = at_count(count, metrics.MetricsWriter.write, before=die_in_a_line)
    elif point == "mid-epoch":
        die_at_a_step(lambda *cursors: mid_epoch(*cursors) and next(times) == count)
    elif point == "epoch-boundary":
        die_at_a_step(lambda *cursors: straddles(*cursors) and next(times) == count)
    elif point == "phase-switch":
        never_commit_at(40)
        die_at_a_step(lambda before, after: before.phase > 0 and next(times) == count)
    elif point == "prefetched":
        die_in_a_reader(count)
    elif point == "before-growth":
        loop.adapt_state_to_phase = at_count(count, loop.adapt_state_to_phase, before=lambda *_: die())
    elif point == "after-growth":
        loop.adapt_state_to_phase = at_count(count, loop.adapt_state_to_phase, after=lambda *_: die())
    elif point == "spoiled":
        spoil(setattr, *SPOILED_ROWS, float("nan"))
    elif point == "rollback-decided":
        spoil(setattr, *SPOILED_ROWS, float("nan"))
        recovery.decide_rollback = at_count(count, recovery.decide_rollback, after=lambda *_: die())
    elif point == "rollback-deleting":
        spoil(setattr, *SPOILED_ROWS, float("nan"))
        checkpoint.Checkpoints.delete = at_count(count, checkpoint.Checkpoints.delete, before=die_while_deleting)
    else:
        assert point == "never", point


if __name__ == "__main__":
    from bert_jax.cli import main

    plant(sys.argv[1], int(sys.argv[2]))
    sys.exit(main.main(sys.argv[3:]))
elif sys.argv[1] == "prefetched":
    die_in_a_reader(int(sys.argv[2]))
