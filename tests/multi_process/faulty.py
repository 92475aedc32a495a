"""``bert-jax`` whose training process has a fault: faulty.py FAULT FIRST LAST ARGUMENT...

It has the fault before (a flipped bit: after) each of the steps FIRST to LAST that it computes, counted over rollbacks.
If the file $FAULT_FILE is set, it has the fault once in all starts, and writes the time of it there. The supervisor's
child imports this file.
"""

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATH = "encoder/layers/up/kernel"
FILE = os.environ.get("FAULT_FILE")


class Due:
    """Whether the fault happens at the call, one of a step."""

    def __init__(self, first: int, last: int):
        self.first, self.last, self.calls = first, last, itertools.count(1)

    def __call__(self) -> bool:
        if not self.first <= next(self.calls) <= self.last or (FILE and Path(FILE).exists()):
            return False
        if FILE:
            Path(FILE).write_text(str(time.time()))
        return True


def flip(bit: int, is_due: Due) -> None:
    """A bit of this process's copy of a parameter changes."""
    import dataclasses

    import jax

    from tests.runs import flip_bit

    def after(step, state):
        if not is_due():
            return state
        print(f"flipped a bit after step {step}", file=sys.stderr)
        return dataclasses.replace(state, params=flip_bit(state.params, PATH, jax.local_devices()[0], bit))

    hook_steps(None, after)


def hang_in_step(is_due: Due) -> None:
    hook_steps(lambda *_: is_due() and time.sleep(10**6), None)


def hang_in_read(is_due: Due) -> None:
    from bert_jax.data.batches import TrainingStream

    read = TrainingStream.rows_at

    def rows_at(self, cursor):
        if is_due():
            time.sleep(10**6)
        return read(self, cursor)

    TrainingStream.rows_at = rows_at


def fail(is_due: Due) -> None:
    """A bug."""

    def before(*_):
        if is_due():
            raise RuntimeError("a bug")

    hook_steps(before, None)


def hook_steps(before, after) -> None:
    from bert_jax.training.programs import Programs
    from tests.runs import HookedStep

    compile_step = Programs.train_step
    Programs.train_step = lambda self, *arguments: HookedStep(compile_step(self, *arguments), before, after)


FAULTS: dict[str, Callable[[Due], None]] = {
    "flipped-bit": functools.partial(flip, 20),
    "flipped-exponent": functools.partial(flip, 30),
    "hang-in-step": hang_in_step,
    "hang-in-read": hang_in_read,
    "exception": fail,
}


def inject(fault: str, first: int, last: int) -> None:
    """Change the steps that are compiled from now on, or their reader."""
    FAULTS[fault](Due(first, last))


if __name__ == "__main__":
    from bert_jax.cli import main
    from bert_jax.distributed import supervisor

    fault, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    call = f"from tests.multi_process import faulty; faulty.inject({fault!r}, {first}, {last}); "
    supervisor.CHILD = supervisor.CHILD.replace("from bert_jax.cli.main", call + "from bert_jax.cli.main")
    assert call in supervisor.CHILD
    sys.exit(main.main(sys.argv[4:]))
