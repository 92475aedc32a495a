"""Whether all processes see the same files in a directory."""

import time
import uuid

from etils import epath

from bert_jax.distributed.agreement import broadcast_from_first, is_first, raise_on_all
from bert_jax.errors import UserError

VISIBILITY_TIMEOUT_SECONDS = 10.0
"""Network file systems show a new file to other hosts with a delay."""


def check_shared(directory: epath.PathLike) -> None:
    """Write a probe file in process 0 and wait until every process sees it.

    Raises:
      UserError: a process does not see it.
    """
    probe = epath.Path(directory) / broadcast_from_first("a probe's name", lambda: f"probe-{uuid.uuid4().hex}")

    def wait_for_probe() -> None:
        deadline = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
        while not probe.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{directory} is not the same directory on all hosts: put it on a shared file system or in a bucket"
                )
            time.sleep(0.2)

    broadcast_from_first("writing a probe", lambda: probe.write_text("") and None)
    try:
        raise_on_all(wait_for_probe)
    finally:
        if is_first():  # all processes have looked
            probe.unlink()
