"""Whether the hosts of a run see the same files."""

import time
import uuid

from etils import epath

from bert_jax.distributed.agreement import compute_and_broadcast, is_first, raise_on_all
from bert_jax.errors import require

VISIBILITY_TIMEOUT_SECONDS = 10.0
"""Network file systems show a new file to other hosts with a delay."""


def becomes_visible(path: epath.Path) -> bool:
    """Whether a file that another process has written appears within `VISIBILITY_TIMEOUT_SECONDS`."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def check_shared_directory(directory: epath.PathLike) -> None:
    """Write a probe file in process 0 and wait until every process sees it.

    Raises:
      UserError: a process does not see it.
    """
    probe = epath.Path(directory) / compute_and_broadcast("a probe's name", lambda: f"probe-{uuid.uuid4().hex}")

    def check() -> None:
        advice = "put it on a shared file system or in a bucket"
        require(becomes_visible(probe), f"{directory} is not the same directory on all hosts: {advice}")

    compute_and_broadcast("writing a probe", lambda: probe.write_text("") and None)
    try:
        raise_on_all(check)
    finally:
        if is_first():  # all processes have looked
            probe.unlink()
