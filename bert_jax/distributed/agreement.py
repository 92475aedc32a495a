"""Collectives on JSON values among the processes of a run, through jax's key-value store; devices are not used.

All processes must make the same calls in the same order. With one process nothing is sent.
"""

import itertools
import json
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from etils import epath
from jax._src import distributed  # the store has no public API; tested with the range of jax in setup.cfg

from bert_jax.errors import PeerError, UserError

T = TypeVar("T")
_call_numbers = itertools.count()
_timeout_seconds = 3600.0
VISIBILITY_TIMEOUT_SECONDS = 10.0
"""Network file systems show a new file to other hosts with a delay."""
REPLY_MARGIN_SECONDS = 10.0
"""The other processes wait this much longer for process 0 than it waits for them, so that it can name missing ones."""


def set_timeout(seconds: float) -> None:
    """Set how long a live process may be late; the supervisors detect processes that have ended."""
    global _timeout_seconds
    _timeout_seconds = seconds


def is_first() -> bool:
    """Whether this is process 0, which writes files and logs."""
    return jax.process_index() == 0


def broadcast_from_first(name: str, make: Callable[[], T]) -> T:
    """Compute a value in process 0 and return it in all processes.

    Args:
      name: of this call, for messages.
      make: called in process 0 only; returns a JSON value.

    Raises:
      UserError: `make` raised it in process 0; the other processes raise one that refers to process 0.
      PeerError: process 0 is late.
    """
    if jax.process_count() == 1:
        return make()
    key = f"bert_jax/{next(_call_numbers)}"
    if is_first():
        try:
            value = make()
        except UserError:
            _set(key, {"refused": True})
            raise
        _set(key, {"value": value})
        return value
    reply = _get(key, _timeout_seconds + REPLY_MARGIN_SECONDS, 0, name)
    if "refused" in reply:
        raise UserError("process 0 refused the run: see its error message")
    return reply["value"]


def all_gather(name: str, value: T) -> list[T]:
    """Return the JSON values of all processes, ordered by process index, in every process.

    Raises:
      PeerError: names the processes that are late.
    """
    if jax.process_count() == 1:
        return [value]
    key = f"bert_jax/{next(_call_numbers)}"
    index, count, deadline = jax.process_index(), jax.process_count(), time.monotonic() + _timeout_seconds
    if index:
        _set(f"{key}/{index}", [socket.gethostname(), value])
        reply = _get(f"{key}/all", _timeout_seconds + REPLY_MARGIN_SECONDS, 0, name)
    else:
        values, missing = [value], []
        for process in range(1, count):
            try:
                values.append(_get(f"{key}/{process}", deadline - time.monotonic(), process, name)[1])
            except PeerError:
                missing.append(process)
        reply = {"values": values, "missing": missing}
        _set(f"{key}/all", reply)
    if reply["missing"]:
        late = ", ".join(map(str, reply["missing"][:8]))
        raise PeerError(f"process(es) {late} of {count} did not reach '{name}' within {_timeout_seconds:g} s")
    return reply["values"]


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
    refused = all_gather("checks", own_error is not None)
    if own_error is not None:
        raise own_error
    if any(refused):
        raise UserError(f"process {refused.index(True)} refused to start: see its error message")


def check_shared_directory(directory: epath.PathLike) -> None:
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


def _set(key: str, value: Any) -> None:
    distributed.global_state.client.key_value_set(key, json.dumps(value))


def _get(key: str, seconds: float, process: int, name: str) -> Any:
    client = distributed.global_state.client
    try:
        text = client.blocking_key_value_get(key, max(1, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        try:
            text = client.key_value_try_get(key)  # on a loaded machine even a value that is there can take longer
        except jax.errors.JaxRuntimeError:
            reason = str(error).splitlines()[0]
            raise PeerError(
                f"process {process} of {jax.process_count()} did not reach '{name}' within {_timeout_seconds:g} s "
                f"({reason})"
            ) from error
    return json.loads(text)
