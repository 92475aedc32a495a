"""Whether all processes see the same files in a directory."""

import time
import uuid

from etils import epath

from bert_jax.distributed.agreement import is_first, refuse_together, tell
from bert_jax.errors import UserError

PATIENCE_SECONDS = 10.0
"""Network file systems show a new file to other hosts late."""


def check_shared(directory: epath.PathLike) -> None:
    """Have the first process leave a mark in a directory, and the others look for it.

    Raises:
      UserError: somebody does not see it.
    """
    mark = epath.Path(directory) / tell("a mark", lambda: f"mark-{uuid.uuid4().hex}")

    def look() -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not mark.exists():
            if time.monotonic() > end:
                raise UserError(
                    f"{directory} is not the same directory on all hosts: put it on a shared file system or in a bucket"
                )
            time.sleep(0.2)

    tell("leaving a mark", lambda: mark.write_text("") and None)
    try:
        refuse_together(look)
    finally:
        if is_first():  # all have looked
            mark.unlink()
