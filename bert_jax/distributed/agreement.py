"""Collectives on JSON values among the processes of a run, through jax's key-value store; devices are not used.

All processes must make the same calls in the same order. With one process nothing is sent.
"""

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

import jax
from etils import epath
from jax._src import distributed  # the store has no public API; tested with the range of jax in setup.cfg

from bert_jax.errors import OutageError, PeerError, UserError, require

T = TypeVar("T")
_call_numbers = itertools.count()
_timeout_seconds = 3600.0
VISIBILITY_TIMEOUT_SECONDS = 10.0
"""Network file systems show a new file to other hosts with a delay."""


def set_timeout(seconds: float) -> None:
    """Set how long a live process may be late; the supervisors detect processes that have ended."""
    global _timeout_seconds
    _timeout_seconds = seconds


def is_first() -> bool:
    """Whether this is process 0, which writes files and logs."""
    return jax.process_index() == 0


def all_gather(name: str, value: T) -> list[T]:
    """Return the JSON values of all processes, ordered by process index, in every process.

    Raises:
      PeerError: names the processes that are late.
    """
    index, count, client = jax.process_index(), jax.process_count(), distributed.global_state.client
    if count == 1:
        return [value]
    call = f"bert_jax/{next(_call_numbers)}"
    client.key_value_set(f"{call}/{index}", json.dumps(value))
    texts: dict[int, str] = {}
    try:
        try:
            client.wait_at_barrier(call, max(1, int(1000 * _timeout_seconds)))
        finally:
            texts = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(call)}
    except jax.errors.JaxRuntimeError as error:
        # Process 0 holds the store. If nobody is missing, this process came when the others had given up.
        late = sorted({*range(count)} - texts.keys()) if texts else [0]
        shown = ", ".join(map(str, late[:8] or [index]))
        reason = "" if "DEADLINE_EXCEEDED" in str(error) else f" ({str(error).splitlines()[0]})"
        raise PeerError(
            f"process(es) {shown} of {count} did not reach '{name}' within {_timeout_seconds:g} s{reason}"
        ) from error
    return [json.loads(texts[process]) for process in range(count)]


def compute_and_broadcast(name: str, make: Callable[[], T]) -> T:
    """Compute a value in process 0 and return it in all processes.

    Args:
      name: of this call, for messages.
      make: called in process 0 only; returns a JSON value.

    Raises:
      UserError: `make` raised it in process 0, which tells the others if they come; they raise one that refers to it.
      PeerError: a process is late.
    """
    made = None
    if is_first():
        try:
            made = make()
        except UserError as error:
            with contextlib.suppress(PeerError):
                all_gather(name, [None, type(error).__name__])
            raise
    value, refusal = all_gather(name, [made, None])[0]
    if refusal is not None:
        raise _kind(refusal)("process 0 refused the run: see its error message")
    return value


def barrier(name: str) -> None:
    """Return when all processes have made this call.

    Raises:
      PeerError: names the processes that are late.
    """
    all_gather(name, None)


def raise_on_all(check: Callable[[], None]) -> None:
    """Run a check whose work is shared by all processes; if it raises UserError in one, all raise one."""
    own_error = None
    try:
        check()
    except UserError as error:
        own_error = error
    refusals = all_gather("checks", own_error and type(own_error).__name__)
    if own_error is not None:
        raise own_error
    if refusal := next(filter(None, refusals), None):
        raise _kind(refusal)(f"process {refusals.index(refusal)} refused to start: see its error message")


def _kind(refusal: str) -> type[UserError]:
    """What the other processes raise, so that all end with the same exit code."""
    return OutageError if refusal == OutageError.__name__ else UserError


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
