"""A process that has this directory on PYTHONPATH has the fault $FAULT, once, when step $FAULT_STEP begins.

Python imports this file at the start of each interpreter. $FAULT_FILE gets the time of the fault.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

FILE = Path(os.environ["FAULT_FILE"])


def is_due(step) -> bool:
    """Whether the fault happens now; its time is written then."""
    if step < int(os.environ["FAULT_STEP"]) or FILE.exists():
        return False
    FILE.write_text(str(time.time()))
    return True


def hang_in_read(batches):
    read = batches.TrainingStream.rows_at

    def rows_at(self, cursor):
        if is_due(cursor.step):
            time.sleep(10**6)
        return read(self, cursor)

    batches.TrainingStream.rows_at = rows_at


def hang_in_step(loop):
    act_before_steps(loop, lambda: time.sleep(10**6))


def raise_in_step(loop):
    def act():
        raise RuntimeError("a bug")

    act_before_steps(loop, act)


def act_before_steps(loop, act):
    counts_at = loop.masked_lm.mask_counts_at

    def mask_counts_at(config, step):  # called once for each step of the loop
        if is_due(step):
            act()
        return counts_at(config, step)

    loop.masked_lm.mask_counts_at = mask_counts_at


FAULTS = {
    "hang in a step": ("bert_jax.training.loop", hang_in_step),
    "hang in a read": ("bert_jax.data.batches", hang_in_read),
    "exception in a step": ("bert_jax.training.loop", raise_in_step),
}


class Patching(importlib.abc.MetaPathFinder):
    """Changes a module after its import."""

    def find_spec(self, name, path=None, target=None):
        module, patch = FAULTS[os.environ["FAULT"]]
        if name != module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(loaded):
            execute(loaded)
            patch(loaded)

        spec.loader.exec_module = exec_module
        return spec


if os.environ["FAULT"] in FAULTS:
    sys.meta_path.insert(0, Patching())
