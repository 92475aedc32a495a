"""What processes of one run agree on while it goes on, through jax's key-value store: no device takes part.

All processes must make the same calls in the same order. With one process nothing is said to anybody.
"""

import itertools
import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import distributed  # the store has no public face; the range of jax in setup.cfg was tried

from bert_jax.errors import PeerError, UserError

T = TypeVar("T")
_turns = itertools.count()
_seconds = 3600.0
ANSWER_SECONDS = 10.0
"""Longer than process 0 waits for the others, they wait for it: so it can say who is missing."""


def wait_at_most(seconds: float) -> None:
    """Give up a process that is alive and later than this; who is not alive is the supervisors' concern."""
    global _seconds
    _seconds = seconds


def is_first() -> bool:
    """Whether this is the process that writes and logs."""
    return jax.process_index() == 0


def tell(name: str, make: Callable[[], T]) -> T:
    """What process 0 makes, for all.

    Args:
      name: for messages.
      make: called in process 0 only; returns a JSON value.

    Raises:
      UserError: `make` raised it; the other processes say so.
      PeerError: process 0 is late.
    """
    if jax.process_count() == 1:
        return make()
    key = f"bert_jax/{next(_turns)}"
    if is_first():
        try:
            made = make()
        except UserError:
            _set(key, {"refused": True})
            raise
        _set(key, {"made": made})
        return made
    answer = _get(key, _seconds + ANSWER_SECONDS, 0, name)
    if "refused" in answer:
        raise UserError("process 0 refuses; its own message says why")
    return answer["made"]


def gather(name: str, value: T) -> list[T]:
    """The values of all processes, JSON values in the order of the processes, in each of them.

    Raises:
      PeerError: a process is late, and which.
    """
    if jax.process_count() == 1:
        return [value]
    key = f"bert_jax/{next(_turns)}"
    here, count, end = jax.process_index(), jax.process_count(), time.monotonic() + _seconds
    if here:
        _set(f"{key}/{here}", [socket.gethostname(), value])
        answer = _get(f"{key}/all", _seconds + ANSWER_SECONDS, 0, name)
    else:
        values, missing = [value], []
        for process in range(1, count):
            try:
                values.append(_get(f"{key}/{process}", end - time.monotonic(), process, name)[1])
            except PeerError:
                missing.append(process)
        answer = {"values": values, "missing": missing}
        _set(f"{key}/all", answer)
    if answer["missing"]:
        late = ", ".join(map(str, answer["missing"][:8]))
        raise PeerError(f"process(es) {late} of {count} did not come to '{name}' within {_seconds:g} s")
    return answer["values"]


def meet(name: str) -> None:
    """Return when all processes are here.

    Raises:
      PeerError: a process is late, and which.
    """
    gather(name, None)


def refuse_together(check: Callable[[], None]) -> None:
    """Run a check of which every process does its share: if one refuses, none is left waiting for it."""
    refusal = None
    try:
        check()
    except UserError as error:
        refusal = error
    refused = gather("checks", refusal is not None)
    if refusal is not None:
        raise refusal
    if any(refused):
        raise UserError(f"process {refused.index(True)} refuses to start; its own message says why")


def _set(key: str, value: Any) -> None:
    distributed.global_state.client.key_value_set(key, json.dumps(value))


def _get(key: str, seconds: float, process: int, name: str) -> Any:
    try:
        text = distributed.global_state.client.blocking_key_value_get(key, max(1, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"process {process} of {jax.process_count()} did not come to '{name}' within {_seconds:g} s ({reason})"
        ) from error
    return json.loads(text)
