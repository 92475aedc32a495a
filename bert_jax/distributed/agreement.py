"""Collectives on JSON values among the processes of a run, through jax's key-value store; devices are not used.

All processes must make the calls of one name in the same order; threads use names of their own. With one process
nothing is sent.
"""

import collections
import contextlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from bert_jax.distributed import jax_internals
from bert_jax.errors import OutageError, PeerError, UserError

T = TypeVar("T")
_call_counts: collections.Counter[str] = collections.Counter()
_timeout_seconds = 3600.0


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
    return [value] if jax.process_count() == 1 else _exchange(name, value, _read_all)


def gather_to_first(name: str, value: T) -> list[T]:
    """Return the JSON values of all processes, ordered by process index, in process 0; an empty list in the others.

    Raises:
      PeerError: names the processes that are late.
    """
    if jax.process_count() == 1:
        return [value]
    return _exchange(name, value, _read_all if is_first() else lambda client, call: [])


def compute_and_broadcast(name: str, make: Callable[[], T]) -> T:
    """Compute a value in process 0 and return it in all processes.

    Args:
      name: of this call, for messages.
      make: called in process 0 only; returns a JSON value.

    Raises:
      UserError: `make` raised it in process 0, which tells the others if they come; they raise one that refers to it.
      PeerError: a process is late.
    """
    if jax.process_count() == 1:
        return make()
    made = None
    if is_first():
        try:
            made = make()
        except UserError as error:
            with contextlib.suppress(PeerError):
                _exchange(name, [None, type(error).__name__], _read_first)
            raise
    value, refusal = _exchange(name, [made, None], _read_first)
    if refusal is not None:
        raise _kind(refusal)("process 0 refused the run: see its error message")
    return value


def _exchange(name: str, value: Any, read: Callable[[Any, str], T]) -> T:
    """Store this process's value, wait for those of all others, and read what is needed of them.

    Each process makes three calls to the store, whatever the number of processes, and process 0 one more: it deletes
    the values of the previous call of this name, which all have read.
    """
    index, count, client = jax.process_index(), jax.process_count(), jax_internals.key_value_store()
    _call_counts[name] += 1
    call = f"bert_jax/{name}/{_call_counts[name]}"
    try:
        client.key_value_set(f"{call}/{index}", json.dumps(value))
        client.wait_at_barrier(call, _timeout_ms())
        values = read(client, call)
        if index == 0:
            client.key_value_delete(f"bert_jax/{name}/{_call_counts[name] - 1}")
        return values
    except jax.errors.JaxRuntimeError as error:
        present: set[int] = set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            present = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(call)}
        # Process 0 holds the store. If nobody is missing, this process came when the others had given up.
        late = sorted({*range(count)} - present) if present else [0]
        shown = ", ".join(map(str, late[:8] or [index]))
        reason = "" if "DEADLINE_EXCEEDED" in str(error) else f" ({str(error).splitlines()[0]})"
        raise PeerError(
            f"process(es) {shown} of {count} did not reach '{name}' within {_timeout_seconds:g} s{reason}"
        ) from error


def _read_all(client: Any, call: str) -> list[Any]:
    texts = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(call)}
    return [json.loads(texts[process]) for process in range(jax.process_count())]


def _read_first(client: Any, call: str) -> Any:
    return json.loads(client.blocking_key_value_get(f"{call}/0", _timeout_ms()))


def _timeout_ms() -> int:
    return max(1, int(1000 * _timeout_seconds))


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
